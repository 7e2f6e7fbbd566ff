"""Tests of held-out text: the right share, evenly spread, and nothing twice."""

from itertools import pairwise

import numpy as np
import pytest

from daskgpt.data.text import END, SPAN_CHARACTERS, SPAN_TOKENS, Run, runs, split_text, split_tokens


@pytest.mark.parametrize("fraction", [0.01, 0.1, 1 / 3, 0.5, 0.75])
@pytest.mark.parametrize("total", [100, 12_345, 1_000_000])
def test_runs_are_consecutive_and_hold_out_the_share(total: int, fraction: float):
    cuts = runs(total, 100, fraction)
    assert (cuts[0].start, cuts[-1].stop) == (0, total)
    assert all(a.stop == b.start and a.held_out != b.held_out for a, b in pairwise(cuts))
    share = sum(run.stop - run.start for run in cuts if run.held_out)
    assert 0 < share < total
    assert abs(share - fraction * total) <= min(100, fraction * total)


def test_held_out_spans_by_fraction():
    held_out = [run for run in runs(3000, 100, 0.1) if run.held_out]
    assert held_out == [Run(400, 500, True), Run(1400, 1500, True), Run(2400, 2500, True)]
    assert runs(1000, 10, 1 - 1e-9) == [Run(0, 1000, True)]
    assert runs(1000, 10, 0.0) == [Run(0, 1000, False)]
    assert split_text(["text", "more"], 0.0) == (["text", "more"], [])


@pytest.mark.parametrize("files", [1, 3, 500])
def test_text_is_cut_between_lines(files: int):
    lines = [f"{n} {'x' * (n * 7 % 90)}\n" for n in range(20_000)]
    documents = ["".join(lines[n::files]) for n in range(files)]
    training, validation = split_text(documents, 0.1)
    kept = [line for piece in training + validation for line in piece.splitlines(keepends=True)]
    assert sorted(kept) == sorted(lines)
    assert abs(sum(map(len, validation)) / sum(map(len, lines)) - 0.1) < 0.02
    assert len(validation) >= 5
    # Pieces of one document stand in its order.
    text = "".join(lines)
    training, validation = split_text([text], 0.1)
    assert "".join(sorted(training + validation, key=text.index)) == text
    # A piece continues as long as its part does: training pieces are nine spans long.
    assert max(map(len, training)) > 8 * SPAN_CHARACTERS
    assert len(training) == len(validation) + 1


def test_text_without_lines_is_cut_at_spans():
    text = "ä" * (20 * SPAN_CHARACTERS)
    training, validation = split_text([text], 0.1)
    assert [len(piece) for piece in validation] == [SPAN_CHARACTERS] * 2
    assert [len(piece) // SPAN_CHARACTERS for piece in training] == [4, 9, 5]


def test_short_texts_and_distant_line_ends():
    for length in range(1, 60):
        text = "".join("\n" if n % 7 == 6 else chr(65 + n) for n in range(length))
        training, validation = split_text([text[:9], text[9:]], 0.1)
        assert sorted("".join(training + validation)) == sorted(text)
        assert bool(validation) == (length >= 5)
    # Spans of 100 characters, one line end in all: right behind the held-out span.
    text = "a" * 510 + "\n" + "b" * 489
    training, validation = split_text([text], 0.1)
    assert (training, validation) == (["a" * 400, "b" * 489], ["a" * 110 + "\n"])


def test_tokens_are_cut_into_views():
    tokens = np.arange(25 * SPAN_TOKENS, dtype=np.int32)
    training, validation = split_tokens(tokens, 0.1)
    spans = [(int(piece[0]) // SPAN_TOKENS, piece.size // SPAN_TOKENS) for piece in validation]
    assert spans == [(4, 1), (14, 1), (24, 1)]
    assert all(np.shares_memory(piece, tokens) for piece in training + validation)
    np.testing.assert_array_equal(np.sort(np.concatenate(training + validation)), tokens)


def test_held_out_end_is_exact():
    """As others cut the plays: 1,115,394 characters at 0.9 of them."""
    assert runs(1_115_394, SPAN_CHARACTERS, 0.1, END) == [Run(0, 1_003_854, False), Run(1_003_854, 1_115_394, True)]
    words = "first line\nsecond line\n" * 50
    documents = [words[:700], words[700:]]
    training, validation = split_text(documents, 0.5, END)
    assert "".join(training) + "".join(validation) == words
    assert len("".join(validation)) == len(words) // 2
    parts = split_tokens(np.arange(100), 0.25, END)
    assert [part[0].tolist() for part in parts] == [list(range(75)), list(range(75, 100))]
