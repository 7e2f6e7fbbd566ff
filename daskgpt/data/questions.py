"""Multiple-choice questions: HellaSwag's lines of JSON."""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np

from daskgpt.data.reading import parsed_records
from daskgpt.data.source import Source
from daskgpt.data.tokenizer import Encoding, encode

WHERE = "read_questions"


@dataclass(frozen=True, eq=False)
class Question:
    """A context, several completions, and the number of the right one.

    Dtype    context and completions token ids
    """

    context: np.ndarray
    completions: tuple[np.ndarray, ...]
    label: int


def read_questions(source: Source, encoding: Encoding) -> list[Question]:
    """Return the questions of HellaSwag's records.

    A completion is a space and an ending, encoded separately, as in llm.c and the published figures of GPT-2.

    Errors     ValueError naming the first record that has not `ctx`, `endings` and `label` (which the test part of
               HellaSwag lacks)
    Source     Zellers et al. 2019, arXiv:1905.07830
    """
    rule = 'a record must have "ctx" (a text), "endings" (texts) and "label" (one of them)'
    advice, parse = "Give HellaSwag's training or validation part.", partial(_question, encoding)
    return [question for file in source.files for _, question in parsed_records(parse, rule, advice, file, WHERE)]


def _question(encoding: Encoding, record: Any) -> Question:
    context, endings, label = record["ctx"], record["endings"], int(record["label"])
    if not (isinstance(endings, list) and len(endings) > 1 and 0 <= label < len(endings)):
        raise ValueError("fewer than two endings, or a label of none of them")
    if not all(isinstance(ending, str) for ending in endings) or not (isinstance(context, str) and context):
        raise ValueError("no ctx, or an ending that is not a text")
    completions = tuple(encode(encoding, " " + ending).astype(np.int64) for ending in endings)
    return Question(encode(encoding, context).astype(np.int64), completions, label)
