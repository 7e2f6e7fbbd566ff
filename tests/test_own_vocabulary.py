"""Tests of a vocabulary that is learned from the training text."""

import json
import math
import tomllib

import numpy as np
import pytest
from command_lines import SMALL
from prepared_texts import forget_vocabularies

from daskgpt import generate, train
from daskgpt.data.dataset import load_dataset
from daskgpt.data.text import END
from daskgpt.data.tokenizer import get_encoding, learn_encoding

SEEN, HELD_OUT = "the quick brown fox jumps over the lazy dog\n", "zyxwvu zyxwvu zyxwvu zyxwvu zyxwvu zyxwvu zyxwvu\n"


@pytest.fixture
def text(tmp_path):
    """Nine tenths of one line, and a tenth of another."""
    path = tmp_path / "text.txt"
    path.write_text(SEEN * 9 * 90 + HELD_OUT * 90)
    return path


def test_vocabulary_is_learned_from_the_training_part(text, monkeypatch):
    dataset = load_dataset(str(text), "learn:270", held_out=END)
    encoding = get_encoding(dataset.encoding_name)
    whole = text.read_text()
    cut = math.floor(len(whole) * 9 / 10)
    assert dataset.encoding_name == learn_encoding([whole[:cut]], 270, "test")
    assert (dataset.vocabulary, dataset.encoding_name.split("-")[1]) == (270, "270")
    for tokens, part in ((dataset.training, whole[:cut]), (dataset.validation, whole[cut:])):
        assert tokens[0] == encoding.eot_token
        assert encoding.decode(np.asarray(tokens[1:]).tolist()) == part
    assert dataset.training.size < 0.7 * cut
    # A text of some pieces is learned from whole.
    whole = load_dataset(str(text), "learn:270").encoding_name
    monkeypatch.setattr("daskgpt.data.tokenizer._PIECE", 50 * len(SEEN))
    assert load_dataset(str(text), "learn:270").encoding_name == whole


def test_run_reports_loss_per_byte_and_keeps_its_vocabulary(text, tmp_path, capsys, monkeypatch):
    out = tmp_path / "run"
    flags = ["--encoding", "learn:300", "--sample-tokens", "0", "--steps", "6"]
    train.main([*SMALL, *flags, "--data", str(text), "--out", str(out)])
    name = tomllib.loads((out / "config.toml").read_text())["data"]["encoding"]
    assert name.startswith("learned-")
    bits = json.loads((out / "metrics.jsonl").read_text().splitlines()[-1])["validation_bits_a_byte"]
    assert f"{bits * math.log(2):.3f} nats a byte, {bits:.3f} bits\n" in capsys.readouterr().out
    with pytest.raises(ValueError, match="must be that of the model"):
        train.main(["--init", str(out), "--encoding", "learn:300", "--data", str(text)])
    forget_vocabularies(monkeypatch)  # as in another process
    assert train.main(["--resume", str(out), "--steps", "8"]) == 0
    assert generate.main([str(out), "--tokens", "4"]) == 0
