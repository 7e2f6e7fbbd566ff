"""Pairs of a prompt and its response, and the examples that they become.

An example is the tokens of prompt, response and end-of-text. A sequence holds one example, from its first token on, and
is filled up with end-of-text; only the tokens after the prompt count as targets. So a response is learned in the very
context in which the model will write it, and attention never reads another example.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from functools import partial
from typing import Any

import numpy as np

from daskgpt.config.errors import require
from daskgpt.config.files import digest_of
from daskgpt.data.reading import is_unicode, parsed_records
from daskgpt.data.source import Source, pair_fields
from daskgpt.data.text import runs
from daskgpt.data.tokenizer import Encoding, encode

WHERE = "read_pairs"
Pair = tuple[str, str]
Weighted = tuple[np.ndarray, np.ndarray, np.ndarray]  # tokens, targets, and loss weights of the targets


def read_pairs(source: Source) -> tuple[list[Pair], list[str]]:
    """Return the pairs of a source's files, and what was left out: pairs with an empty text, or half a character.

    The names of prompt and response are those of each file's first record (`source.PAIR_FIELDS`). A prompt of two
    fields, an instruction and its input, has a line break between them.

    Errors   ValueError naming the first record without such texts
    """
    pairs, left_out = list[Pair](), list[str]()
    for file in source.files:
        names = pair_fields(file.fields)
        assert names is not None, "a file of pairs"
        rule = f'a record must have "{names[0][0]}" and "{names[1]}", texts'
        for number, pair in parsed_records(partial(_pair, *names), rule, "Correct it.", file, WHERE):
            if all(text and is_unicode(text) for text in pair):
                pairs.append(pair)
            else:
                left_out.append(f"{file.name} line {number}")
    return pairs, left_out


def _pair(asking: tuple[str, ...], answering: str, record: Any) -> Pair:
    questions, answer = [record[asking[0]], *(record.get(name) or "" for name in asking[1:])], record[answering]
    for text in (*questions, answer):
        if not isinstance(text, str):
            raise TypeError(f"{type(text).__name__} is not a text")
    return "\n".join(text for text in questions if text), answer


@dataclass(frozen=True, eq=False)
class Examples:
    """Prompts with responses as tokens, one example after the other.

    lengths  of the examples
    prompts  lengths of their prompts
    filler   the id after the end of an example

    Shapes   tokens (N,), lengths and prompts (n,)
    Dtype    tokens uint16 or uint32, lengths and prompts int64
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
        tokens: list[int] = self.row(number)[: self.prompts[number]].tolist()
        return tokens

    def row(self, number: int) -> np.ndarray:
        """Return the tokens of an example."""
        start = self.starts[number]
        return self.tokens[start : start + self.lengths[number]]

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
    source: Source, codec: Encoding, fraction: float, held_out: str, sequence_length: int
) -> tuple[list[Examples], str, str]:
    """Return the examples for training and those held out, a description of the source, and a digest of its pairs.

    fraction   held out; with 0, all examples are in the first part, and the second one is empty

    Prompt and response are encoded apart, as in generation, where only the prompt is known. An example that is longer
    than a sequence and the token after it is cut there; one whose response would be lost is left out.

    Errors   as of read_pairs; ValueError if a part would have no example
    """
    pairs, wrong = read_pairs(source)
    parts: tuple[list[np.ndarray], list[np.ndarray]] = ([], [])
    prompts: tuple[list[int], list[int]] = ([], [])
    most, cut, lost = sequence_length + 1, 0, 0
    for run in runs(len(pairs), 1, fraction, held_out):
        for texts in pairs[run.start : run.stop]:
            prompt, response = (encode(codec, text, source.name) for text in texts)
            whole = np.concatenate([prompt, response, np.array([codec.eot_token], prompt.dtype)])
            if prompt.size >= most:
                lost += 1
                continue
            cut += whole.size > most
            parts[run.held_out].append(whole[:most])
            prompts[run.held_out].append(prompt.size)
    rule, got = "each part must have an example that fits", {"data": source.name, "pairs": len(pairs), "too long": lost}
    advice = "Give more pairs, a larger --sequence-length, or another --validation-fraction."
    require(all(parts[: 1 + (fraction > 0)]), WHERE, rule, got, advice)
    examples = [
        Examples(np.concatenate(rows), np.array([row.size for row in rows]), np.array(sizes), codec.eot_token)
        for rows, sizes in zip(parts, prompts)
        if rows
    ]
    facts = [source.described, f"{len(parts[0]):,} pairs" + (f" and {len(parts[1]):,} held out" if parts[1] else "")]
    facts += [f"{cut:,} cut to {most:,} tokens"] if cut else []
    facts += [f"{lost:,} left out: their prompts alone are longer"] if lost else []
    facts += [f"{len(wrong):,} left out: empty or half a character ({wrong[0]})"] if wrong else []
    return examples, f"{source.name} ({'; '.join(facts)})", digest_of(pairs)
