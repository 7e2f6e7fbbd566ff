"""Tests of a model's output as shown: text is unchanged, and no control sequence reaches a terminal."""

import re

import numpy as np
import pytest
from conftest import SMALL, random_parameters

import daskgpt
from daskgpt import generate, train
from daskgpt.formats.encoding import get_encoding
from daskgpt.generation.sampler import readable, sanitized

SHOWN = {
    "text": (b"a\tb\n\xc3\xa9 \xe2\x82\xac \xf0\x9f\x98\x80 \\x41\r\n", "a\tb\né € 😀 \\x41\n"),
    "colour": (b"\x1b[31mred\x1b[0m", "\\x1b[31mred\\x1b[0m"),
    "bell, backspace, delete": (b"a\x07b\x08c\x7f", "a\\x07b\\x08c\\x7f"),
    "return": (b"hidden\rshown", "hidden\nshown"),
    "returns at an end": (b"\r\r\n\r", "\n\n\n"),
    "C1": ("\x9b31m".encode(), "\\x9b31m"),
    "direction": ("\u202eabc\u2066".encode(), "\\u202eabc\\u2066"),
    "no text": (b"a\xff\xfeb\xc3", "a\\xff\\xfeb\\xc3"),
    "broken character": (b"\xe2\x82x", "\\xe2\\x82x"),
}


@pytest.mark.parametrize("name", SHOWN)
@pytest.mark.parametrize("piece", [1, 2, 3, 1000])
def test_shown_text_does_not_depend_on_token_boundaries(name, piece):
    data, expected = SHOWN[name]
    assert "".join(sanitized(data[start : start + piece] for start in range(0, len(data), piece))) == expected


def test_random_text_and_bytes_are_sanitized(random):
    for _ in range(50):
        codes = random.integers(0x20, 0x2FFFF, 40)
        text = "".join(character for character in map(chr, codes) if character.isprintable())
        assert "".join(readable(get_encoding("bytes"), text.encode())) == text
    shown = "".join(readable(get_encoding("bytes"), random.integers(0, 257, 20000)))
    assert not re.search(r"[\x00-\x08\x0b\x0c\x0e-\x1f\x7f-\x9f\r]", shown)
    # An id that only the model knows is no text.
    assert "".join(readable(get_encoding("bytes"), [97, 300, 98, 256])) == "ab<|endoftext|>"


def test_generate_and_the_sample_of_a_training_show_no_control_character(tmp_path, capsys):
    config = type(SMALL)(blocks=1, heads=2, channels=16, vocabulary=300, positions=64)
    daskgpt.save(tmp_path / "model.safetensors", config, random_parameters(config, np.random.default_rng(3)))
    (tmp_path / "text.txt").write_text("the quick brown fox\n" * 300)
    flags = "--steps 1 --batch-size 2 --sequence-length 16 --validation-batches 1 --vocabulary 300"
    flags += " --learning-rate 0 --final-learning-rate 0"
    more = "--tokens 300 --temperature 100"
    for command, arguments in (
        (generate, [tmp_path / "model.safetensors", *more.split()]),
        (train, ["--data", tmp_path / "text.txt", *flags.split(), "--out", tmp_path / "out"]),
    ):
        assert command.main([str(argument) for argument in arguments]) == 0
        shown = capsys.readouterr().out
        assert not re.search(r"[\x00-\x08\x0b-\x1f\x7f-\x9f\ufffd]", shown)
        assert "\\x" in shown
