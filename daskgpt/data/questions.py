"""Multiple-choice questions: HellaSwag's lines of JSON, and llm.c's evaluation files."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from daskgpt.config.errors import refusal, require
from daskgpt.data.reading import DOCUMENT, records
from daskgpt.data.source import Source
from daskgpt.data.tokenizer import Encoding, encode
from daskgpt.formats.llmc import HEADER_BYTES, QUESTIONS, read_header

WHERE = "read_questions"
START = 2**16 - 1  # number before each question in llm.c's files


@dataclass(frozen=True, eq=False)
class Question:
    """A context, several completions, and the number of the right one.

    Dtype    context and completions token ids
    """

    context: np.ndarray
    completions: tuple[np.ndarray, ...]
    label: int


def read_questions(source: Source, encoding: Encoding) -> list[Question]:
    """Return the questions of HellaSwag's records, or of llm.c's evaluation files.

    A completion of HellaSwag's is a space and an ending, encoded separately, as in llm.c and the published figures of
    GPT-2.

    encoding   of HellaSwag's texts; llm.c's files hold token ids

    Errors     ValueError for a damaged file, naming the first record that has not `ctx`, `endings` and `label` (which
               the test part of HellaSwag lacks)
    Source     Zellers et al. 2019, arXiv:1905.07830
    """
    questions = list[Question]()
    for file in source.files:
        if file.form == DOCUMENT:
            questions += read_llmc_questions(Path(file.path))
            continue
        for number, record in records(file, WHERE):
            try:
                questions.append(_question(encoding, record))
            except (ValueError, TypeError, KeyError) as error:
                rule = 'a record must have "ctx" (a text), "endings" (texts) and "label" (one of them)'
                got = {"path": file.path, "line": number, "found": f"{type(error).__name__}: {str(error)[:60]}"}
                raise refusal(ValueError, WHERE, rule, got, "Give HellaSwag's training or validation part.") from None
    return questions


def _question(encoding: Encoding, known: Any) -> Question:
    context, endings, label = known["ctx"], known["endings"], int(known["label"])
    if not (isinstance(endings, list) and len(endings) > 1 and 0 <= label < len(endings)):
        raise ValueError("fewer than two endings, or a label of none of them")
    if not all(isinstance(each, str) for each in endings) or not (isinstance(context, str) and context):
        raise ValueError("no ctx, or an ending that is not a text")
    completions = tuple(encode(encoding, " " + ending).astype(np.int64) for ending in endings)
    return Question(encode(encoding, context).astype(np.int64), completions, label)


def read_llmc_questions(path: Path) -> list[Question]:
    """Return the questions of a file that llm.c's `write_evalfile` wrote (HellaSwag, MMLU), in version 1 (GPT-2's ids).

    Errors   FileNotFoundError if there is no file; ValueError for another file, or a damaged one
    """
    where, advice = "read_questions", "The file is damaged: write it again."
    count = read_header(path, where, QUESTIONS, (1,))[2]
    size = path.stat().st_size
    got = {"path": path, "count": count, "bytes": size}
    require(count > 0 and size % 2 == 0, where, "the file must hold questions of 2-byte numbers", got, advice)
    numbers, found = np.fromfile(path, "<u2", offset=HEADER_BYTES), list[Question]()
    for index in range(count):
        mark, nbytes, number, label, completions = np.resize(numbers[:5], 5).tolist()
        question, numbers = numbers[: nbytes // 2], numbers[nbytes // 2 :]
        lists, right, left = list[np.ndarray](), 2 * question.size == nbytes, question[5:]
        for _ in range(1 + completions):
            length = int(left[0]) if left.size else 0
            lists.append(left[1 : 1 + length].astype(np.int64))
            right = right and 0 < length == lists[-1].size
            left = left[1 + length :]
        right = right and left.size == 0 and (mark, number) == (START, index) and completions > max(1, label)
        rule = "every question must be complete, and its label one of the completions"
        require(right, where, rule, {"path": path, "question": index}, advice)
        found.append(Question(lists[0], tuple(lists[1:]), label))
    rule, got = "nothing must follow the last question", {"path": path, "numbers": numbers.size}
    require(numbers.size == 0, where, rule, got, advice)
    return found
