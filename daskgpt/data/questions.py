"""HellaSwag's questions: a JSON object per line, with the beginning of a story and several endings."""

from __future__ import annotations

import json
import os
from pathlib import Path

import numpy as np
from tiktoken import Encoding

from daskgpt.config.errors import refusal, require
from daskgpt.data.tokenizer import encode
from daskgpt.formats.llmc import Question

ENDING = ".jsonl"


def read_hellaswag(path: str | os.PathLike[str], encoding: Encoding) -> list[Question]:
    """Read the questions of `hellaswag_val.jsonl` and its like: `ctx`, `endings` and `label` of every line.

    A completion is a space and an ending, encoded separately, as in llm.c and the published figures of GPT-2.

    Errors   FileNotFoundError if there is no file; ValueError naming the first line that is not such an object, or
             lacks a label (as in the test part)
    Source   Zellers et al. 2019, arXiv:1905.07830
    """
    questions, where = list[Question](), "read_hellaswag"
    for number, line in enumerate(Path(path).read_bytes().splitlines(), 1):
        if not line.strip():
            continue
        try:
            context, endings, label = _fields(line)
        except (ValueError, TypeError, KeyError, RecursionError) as error:
            rule = 'a line must be a JSON object with "ctx" (a text), "endings" (texts) and "label" (one of them)'
            got = {"path": path, "line": number, "found": f"{type(error).__name__}: {str(error)[:60]}"}
            raise refusal(ValueError, where, rule, got, "Give HellaSwag's training or validation part.") from error
        completions = tuple(encode(encoding, " " + ending).astype(np.int64) for ending in endings)
        questions.append(Question(encode(encoding, context).astype(np.int64), completions, label))
    advice = "Give a JSON object per line."
    require(bool(questions), where, "the file must hold questions", {"path": path}, advice)
    return questions


def _fields(line: bytes) -> tuple[str, list[str], int]:
    known = json.loads(line.decode())
    context, endings, label = known["ctx"], known["endings"], int(known["label"])
    if not (isinstance(context, str) and context and isinstance(endings, list) and len(endings) > 1):
        raise ValueError("no ctx, or fewer than two endings")
    if not all(isinstance(each, str) for each in endings) or not 0 <= label < len(endings):
        raise ValueError("an ending that is not a text, or a label of no ending")
    return context, endings, label
