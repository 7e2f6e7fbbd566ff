"""HellaSwag's own files: a JSON object a line, with the beginning of a story and ways to go on."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import numpy as np
from tiktoken import Encoding

from daskgpt.config.errors import refusal
from daskgpt.data.encodings import encode
from daskgpt.formats.llmc_questions import Question

ENDING = ".jsonl"


def read_hellaswag(path: str | os.PathLike[str], encoding: Encoding) -> list[Question]:
    """The questions of `hellaswag_val.jsonl` and its like: `ctx`, `endings` and `label` of every line.

    A completion is a space and an ending, encoded for itself: what llm.c and the published figures of GPT-2 do.

    Errors   FileNotFoundError where nothing is there; ValueError naming the first line that is no such object, or has
             no label (the test part has none)
    Source   Zellers et al. 2019, arXiv:1905.07830
    """
    path = Path(path)
    try:
        lines = path.read_text(encoding="utf-8").splitlines()
    except UnicodeDecodeError as error:
        rule, got = "the file must be UTF-8 text", {"path": path, "first wrong byte": error.start}
        raise refusal(ValueError, "read_hellaswag", rule, got, "It is damaged, or something else.") from error
    questions = [_question(path, number, line, encoding) for number, line in enumerate(lines, 1) if line.strip()]
    if not questions:
        rule, advice = "the file must hold questions", "Give a JSON object a line."
        raise refusal(ValueError, "read_hellaswag", rule, {"path": path}, advice)
    return questions


def _question(path: Path, number: int, line: str, encoding: Encoding) -> Question:
    found, reason = _fields(line)
    if found is None:
        rule = (
            'a line must be a JSON object with "ctx" (a text), "endings" (texts) and "label" (which of them is right)'
        )
        got = {"path": path, "line": number, "found": reason}
        raise refusal(ValueError, "read_hellaswag", rule, got, "Give HellaSwag's training or validation part.")
    context, endings, label = found
    completions = tuple(encode(encoding, " " + ending).astype(np.int64) for ending in endings)
    return Question(encode(encoding, context).astype(np.int64), completions, label)


def _fields(line: str) -> tuple[tuple[str, list[str], int] | None, str]:
    """Context, endings and label, or None and why not."""
    try:
        known: Any = json.loads(line)
    except (ValueError, RecursionError):
        return None, "no JSON"
    if not isinstance(known, dict):
        return None, "no object"
    missing = [name for name in ("ctx", "endings", "label") if name not in known]
    if missing:
        return None, f"no {missing[0]}"
    context, endings, label = known["ctx"], known["endings"], known["label"]
    if not isinstance(context, str) or not context:
        return None, "a ctx without text"
    if not isinstance(endings, list) or len(endings) < 2 or not all(isinstance(each, str) for each in endings):
        return None, "endings that are not two texts or more"
    label = int(label) if isinstance(label, str) and label.isdecimal() and len(label) < 5 else label
    if isinstance(label, bool) or not isinstance(label, int) or not 0 <= label < len(endings):
        return None, "a label that names none of the endings"
    return (context, endings, label), ""
