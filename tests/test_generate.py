"""The command that writes: several texts, where they end, and a chat."""

from __future__ import annotations

import os
import subprocess
import sys

import numpy as np
import pytest
from command_lines import PATIENCE, refused, run
from conftest import random_parameters

import daskgpt
from daskgpt.data.encodings import get_encoding
from daskgpt.generation.ending import end_of_text, shown

CONFIG = daskgpt.GPT2Config(blocks=1, heads=2, channels=16, vocabulary=257, positions=32)


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    """A model that writes printable characters and lines."""
    parameters = random_parameters(CONFIG, np.random.default_rng(8))
    parameters["wte.weight"] *= np.float32(0.1)
    likely = np.zeros(257, bool)
    likely[[*range(97, 123), 10, 32]] = True
    parameters["ln_f.bias"] = np.ones(16, np.float32)
    parameters["wte.weight"] += np.where(likely, np.float32(1), np.float32(-1))[:, None]
    path = tmp_path_factory.mktemp("model") / "model.safetensors"
    daskgpt.save(path, CONFIG, parameters, encoding="bytes", sequence_length=32)
    return path


def test_a_batch_is_the_texts_one_by_one(model):
    arguments = "--tokens", 40, "--seed", 3
    batch = run("generate", model, "--prompt", "abc", "--prompt", "x", "--samples", 2, *arguments)
    assert batch.returncode == 0, batch.stderr
    parts = batch.stdout.split("--- ")[1:]
    assert [part.split("\n", 1)[0] for part in parts] == ["1 of 4", "2 of 4", "3 of 4", "4 of 4"]
    texts = [part.split("\n", 1)[1] for part in parts]
    assert [text[0] for text in texts] == ["a", "a", "x", "x"]
    assert len(set(texts)) == 4
    for options in ((), ("--threads", 2)):
        alone = run("generate", model, "--prompt", "abc", *arguments, *options)
        assert alone.stdout == texts[0]
    assert "tokens/s (" in alone.stderr
    assert "of a copy's" in alone.stderr
    rounded = run("generate", model, "--prompt", "abc", *arguments, "--precision", "bfloat16", "--top-p", 0.5)
    assert rounded.returncode == 0
    assert rounded.stdout != texts[0]


def test_a_text_ends_at_words_that_are_waited_for(model):
    arguments = "--prompt", "abc", "--tokens", 200, "--seed", 3
    whole = run("generate", model, *arguments).stdout
    word = whole[60:62]
    text = run("generate", model, *arguments, "--until", word).stdout
    assert text == whole[: whole.index(word, 3) + 2] + "\n"


def test_end_of_text_is_not_shown_and_words_may_span_tokens():
    encoding = get_encoding("bytes")
    end = end_of_text(encoding)
    assert end == 256
    assert list(shown(encoding, [97, 256, 98], end)) == [97]
    assert list(shown(encoding, [97, 256, 98])) == [97, 256, 98]
    assert list(shown(encoding, [97, None], end)) == [97]
    assert bytes(shown(encoding, "a né new".encode(), until="né")).decode() == "a né"


def test_a_chat_is_one_text(model):
    words = [sys.executable, "-m", "daskgpt.generate", str(model), "-i", "--tokens", "12", "--temperature", "0"]
    said = subprocess.run(
        words, input="abc\n\nxyz\n", capture_output=True, text=True, timeout=PATIENCE, env=dict(os.environ)
    )
    assert said.returncode == 0, said.stderr
    config, parameters = daskgpt.load(model)
    text = [*b"abc\n"]
    answers = []
    for line in (b"", b"", b"xyz\n"):
        text += line
        answer = list(daskgpt.sample(config, parameters, text, 12, temperature=0))
        text += answer
        answers.append(bytes(answer).decode())
    assert said.stdout == "".join(f"{answer}\n" for answer in answers) + "\n"
    empty = subprocess.run(words, input="", capture_output=True, text=True, timeout=PATIENCE)
    assert (empty.returncode, empty.stdout) == (0, "\n")


def test_what_cannot_be_written_is_one_line(model):
    for arguments, message in {
        ("--top-p", 2): "top_p must lie above 0 and be at most 1; got top_p=2.0",
        ("--samples", 0): "samples must be at least 1; got samples=0",
        ("--prompt", ""): "the prompt must have a token",
        ("--precision", "float16"): "invalid choice",
        ("--threads", -1): "threads must not be negative",
    }.items():
        assert message in refused(run("generate", model, *arguments)), arguments
