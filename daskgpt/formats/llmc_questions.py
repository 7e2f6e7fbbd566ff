"""llm.c's evaluation files: a header of 256 int32, then questions with a few completions each, as uint16 numbers."""

from __future__ import annotations

import os
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from daskgpt.config.errors import refusal, require
from daskgpt.formats.llmc import KINDS

MAGIC, VERSION = 20240522, 1
HEADER_BYTES = 256 * 4
START = 2**16 - 1  # before each question
WHERE = "read_questions"


@dataclass(frozen=True, eq=False)
class Question:
    """A beginning, some ways to go on from it, and which of them is right.

    Dtype    context and completions token ids
    """

    context: np.ndarray
    completions: tuple[np.ndarray, ...]
    label: int


def is_question_file(path: str | os.PathLike[str]) -> bool:
    """Whether a file begins as llm.c's evaluation files do."""
    with open(path, "rb") as file:
        return int.from_bytes(file.read(4), "little") == MAGIC


def read_questions(path: str | os.PathLike[str]) -> list[Question]:
    """The questions of a file that llm.c's `write_evalfile` wrote (HellaSwag, MMLU), in its version 1 (GPT-2's ids).

    Errors   FileNotFoundError where nothing is there; ValueError for another file, or one that is damaged
    """
    path = Path(path)
    size = path.stat().st_size
    header = np.fromfile(path, "<i4", count=256)
    _require(header.size == 256, path, f"the file must begin with a header of {HEADER_BYTES} bytes", {"bytes": size})
    magic, version, count = (int(number) for number in header[:3])
    advice = KINDS.get(magic, "It is damaged, or something else.")
    require(magic == MAGIC, WHERE, f"the file must begin with {MAGIC}", {"path": path, "magic": magic}, advice)
    _require(version == VERSION, path, f"the version must be {VERSION}", {"version": version})
    _require(count > 0, path, "the file must hold questions", {"count": count})
    _require(size % 2 == 0, path, "the questions must be 2-byte numbers", {"bytes": size})
    numbers = np.fromfile(path, "<u2", offset=HEADER_BYTES)
    questions, place = [], 0
    for index in range(count):
        question, place = _question(path, numbers, place, index)
        questions.append(question)
    _require(place == numbers.size, path, "nothing must follow the last question", {"numbers": numbers.size - place})
    return questions


def _question(path: Path, numbers: np.ndarray, place: int, index: int) -> tuple[Question, int]:
    """The question at a place, and the place behind it."""
    start = numbers[place : place + 5].tolist()
    got: dict[str, object] = {"question": index}
    _require(len(start) == 5, path, "the file must hold all of its questions", got)
    mark, size, number, label, completions = start
    rule = "a question must begin with its mark and its number"
    _require(mark == START and number == index, path, rule, got | {"mark": mark, "number": number})
    row = numbers[place : place + size // 2]
    _require(row.size * 2 == size, path, "the file must hold all of its questions", got | {"bytes": size})
    lists, at = [], 5
    for _ in range(1 + completions):
        length = int(row[at]) if at < row.size else 0
        lists.append(row[at + 1 : at + 1 + length].astype(np.int64))
        whole = length > 0 and len(lists[-1]) == length
        _require(whole, path, "contexts and completions must be whole and have a token", got | {"tokens": length})
        at += 1 + length
    _require(at == row.size, path, "a question must be as long as it says", got | {"bytes": size})
    rule = "the label must be one of the completions"
    _require(completions > 1 and label < completions, path, rule, got | {"label": label, "completions": completions})
    return Question(lists[0], tuple(lists[1:]), label), place + row.size


def _require(holds: bool, path: Path, rule: str, got: dict[str, object]) -> None:
    if not holds:
        raise refusal(ValueError, WHERE, rule, {"path": path, **got}, "The file is damaged: write it again.")
