"""Pairs of a prompt and its response, read from lines of JSON, and the examples that they become.

An example is the tokens of prompt, response and end-of-text. A sequence holds one example, from its first token on, and
is filled up with end-of-text; only the tokens after the prompt count as targets. So a response is learned in the very
context in which the model will write it, and attention never reads another example.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import numpy as np
from tiktoken import Encoding

from daskgpt.config.errors import require
from daskgpt.config.files import digest_of, json_lines, matching_files
from daskgpt.data.text import runs
from daskgpt.data.tokenizer import encode

PAIRS = ".jsonl"
KEYS = ("prompt", "response")
WHERE = "read_pairs"
Pair = tuple[str, str]
Weighted = tuple[np.ndarray, np.ndarray, np.ndarray]  # tokens, targets, and loss weights of the targets


def are_pairs(source: str) -> bool:
    """Return whether a source names files of pairs, by its ending."""
    return source.endswith(PAIRS)


def read_pairs(source: str) -> list[Pair]:
    """Return the pairs of the files that a path or glob matches: `prompt` and `response` of every line.

    Errors   FileNotFoundError if there is no file; ValueError naming the first line that is not such an object
    """
    rule = 'a line must be a JSON object with "prompt" and "response", texts that are not empty'
    advice = "Correct it; daskgpt.prepare reads lines of plain text."
    paths = matching_files(source, WHERE)
    return [pair for path in paths for pair in json_lines(path, WHERE, _pair, rule, advice)]


def _pair(known: Any) -> Pair:
    prompt, response = (known[key] for key in KEYS)
    if not all(isinstance(text, str) and text.encode() for text in (prompt, response)):
        raise ValueError("a prompt or response that is empty or not a text")
    return prompt, response


@dataclass(frozen=True, eq=False)
class Examples:
    """Prompts with responses as tokens, one example after the other.

    lengths  of the examples
    prompts  lengths of their prompts
    filler   the id after the end of an example

    Shapes   tokens (N,), lengths and prompts (n,)
    Dtype    tokens uint16, lengths and prompts int64
    """

    tokens: np.ndarray
    lengths: np.ndarray
    prompts: np.ndarray
    filler: int
    starts: np.ndarray = field(init=False)

    def __post_init__(self) -> None:
        object.__setattr__(self, "starts", np.cumsum(self.lengths) - self.lengths)

    @property
    def size(self) -> int:
        """Number of tokens."""
        return int(self.tokens.size)

    @property
    def count(self) -> int:
        """Number of examples."""
        return int(self.lengths.size)

    def prompt(self, number: int) -> list[int]:
        """Return the tokens of a prompt."""
        start = self.starts[number]
        found: list[int] = self.tokens[start : start + self.prompts[number]].tolist()
        return found

    def batch(self, numbers: np.ndarray, sequence_length: int) -> Weighted:
        """Return some examples as sequences. The weights' mean is 1, and they are equal where targets count, else 0.

        numbers  of examples; -1 for a sequence in which no target counts

        Shapes   numbers (B,) -> tokens, targets, weights (B, T)
        Dtype    int32, weights float64
        """
        places = np.arange(sequence_length + 1)
        inside = places < self.lengths[numbers, None]
        rows = self.tokens[np.minimum(self.starts[numbers, None] + places, self.size - 1)]
        rows = np.where(inside, rows, self.filler).astype(np.int32)
        counted = (inside & (places >= self.prompts[numbers, None]) & (numbers >= 0)[:, None])[:, 1:]
        weights = counted * (counted.size / counted.sum())
        return np.ascontiguousarray(rows[:, :-1]), np.ascontiguousarray(rows[:, 1:]), weights

    def validation_batches(self, batch_size: int, sequence_length: int, most: int) -> list[Weighted]:
        """Return all examples once, or as many as fit into a number of batches, evenly spread.

        The weights' mean over all of them is 1.
        """
        count = min(most, -(-self.count // batch_size))
        numbers = np.arange(count * batch_size) * max(self.count, count * batch_size) // (count * batch_size)
        numbers[numbers >= self.count] = -1
        tokens, targets, weights = self.batch(numbers, sequence_length)
        return list(zip(*(part.reshape(count, batch_size, -1) for part in (tokens, targets, weights))))


def read_examples(
    source: str, codec: Encoding, fraction: float, held_out: str, sequence_length: int
) -> tuple[Examples, Examples, str, str]:
    """Return examples for training and for validation, a description of the source, and a digest of it.

    Prompt and response are encoded apart, as in generation, where only the prompt is known. An example that is longer
    than a sequence and the token after it is cut there; one whose response would be lost is left out.

    Errors   as of read_pairs; ValueError if a part would have no example
    """
    pairs = read_pairs(source)
    parts: tuple[list[np.ndarray], list[np.ndarray]] = ([], [])
    prompts: tuple[list[int], list[int]] = ([], [])
    end, most, cut, lost = np.array([codec.eot_token], np.uint16), sequence_length + 1, 0, 0
    for run in runs(len(pairs), 1, fraction, held_out):
        for texts in pairs[run.start : run.stop]:
            prompt, response = (encode(codec, text) for text in texts)
            whole = np.concatenate([prompt, response, end])
            if prompt.size >= most:
                lost += 1
                continue
            cut += whole.size > most
            parts[run.held_out].append(whole[:most])
            prompts[run.held_out].append(prompt.size)
    rule, got = "each part must have an example that fits", {"data": source, "pairs": len(pairs), "too long": lost}
    advice = "Give more pairs, a larger --sequence-length, or another --validation-fraction."
    require(all(parts), WHERE, rule, got, advice)
    found = [
        Examples(np.concatenate(own), np.array([each.size for each in own]), np.array(sizes), codec.eot_token)
        for own, sizes in zip(parts, prompts)
    ]
    facts = [f"{len(parts[0]):,} pairs and {len(parts[1]):,} held out"]
    facts += [f"{cut:,} cut to {most:,} tokens"] if cut else []
    facts += [f"{lost:,} left out: their prompts alone are longer"] if lost else []
    return found[0], found[1], f"{source} ({'; '.join(facts)})", digest_of(pairs)
