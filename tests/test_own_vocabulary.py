"""A vocabulary that is learned from the text that is trained on: of nothing that is held out, and kept with the run."""

from __future__ import annotations

import json
import math
import re
import tomllib

import numpy as np
import pytest
from command_lines import SMALL, refused, run

from daskgpt.data.corpus.learning import learn_vocabulary
from daskgpt.data.dataset import load_dataset
from daskgpt.data.encodings import get_encoding, ranks_of
from daskgpt.data.split import END
from daskgpt.formats.llmc_tokens import write_tokens

pytest.importorskip("tokenizers")

SEEN, HELD_OUT = "the quick brown fox jumps over the lazy dog\n", "zyxwvu zyxwvu zyxwvu zyxwvu zyxwvu zyxwvu zyxwvu\n"


@pytest.fixture
def text(tmp_path):
    """Nine tenths of one line, and a tenth of another."""
    path = tmp_path / "text.txt"
    path.write_text(SEEN * 9 * 90 + HELD_OUT * 90)
    return path


def test_a_vocabulary_is_learned_from_what_is_trained_on(text):
    dataset = load_dataset(str(text), "learn:270", held_out=END)
    encoding = get_encoding(dataset.encoding_name)
    whole = text.read_text()
    cut = math.floor(len(whole) * 9 / 10)
    assert ranks_of(dataset.encoding_name) == learn_vocabulary([whole[:cut]], 270)
    assert (dataset.vocabulary, dataset.encoding_name.split("-")[1]) == (270, "270")
    for tokens, part in ((dataset.training, whole[:cut]), (dataset.validation, whole[cut:])):
        assert tokens[0] == encoding.eot_token
        assert encoding.decode(np.asarray(tokens[1:]).tolist()) == part
    assert dataset.training.size < 0.7 * cut
    assert not any(b"yx" in token for token in ranks_of(dataset.encoding_name))


def test_a_text_of_some_pieces_is_learned_from_whole(text, monkeypatch):
    whole = load_dataset(str(text), "learn:270").encoding_name
    monkeypatch.setattr("daskgpt.data.own_vocabulary._PIECE", 50 * len(SEEN))
    assert load_dataset(str(text), "learn:270").encoding_name == whole


@pytest.mark.parametrize(
    ("encoding", "message"),
    [
        ("learn:many", "load_dataset: an encoding to be learned must be learn: and a number of ids; got encoding"),
        ("learn:12", "load_dataset: learn must lie between 258 and 65536; got learn=12."),
    ],
)
def test_sizes_that_are_none_are_refused(encoding, message, text):
    with pytest.raises(ValueError, match=re.escape(message)):
        load_dataset(str(text), encoding)


def test_tokens_tell_no_vocabulary(tmp_path):
    write_tokens(tmp_path / "tokens.bin", np.arange(100, dtype=np.uint16))
    with pytest.raises(
        ValueError, match="load_dataset: a vocabulary must be learned from text; got encoding=learn:300"
    ):
        load_dataset(str(tmp_path / "tokens.bin"), "learn:300")


def test_a_run_says_its_loss_by_the_text_and_keeps_its_vocabulary(text, tmp_path):
    out = tmp_path / "run"
    flags = (*SMALL, "--encoding", "learn:300", "--sample-tokens", 0)
    result = run("train", *flags, "--data", text, "--steps", 6, "--out", out)
    assert result.returncode == 0, result.stderr
    name = tomllib.loads((out / "config.toml").read_text())["data"]["encoding"]
    assert name.startswith("learned-")
    bits = json.loads((out / "metrics.jsonl").read_text().splitlines()[-1])["validation_bits_a_byte"]
    assert f"validation by the text: {bits * math.log(2):.3f} nats a byte, {bits:.3f} bits\n" in result.stdout
    assert refused(run("train", "--init", out, "--encoding", "learn:300", "--data", text)).startswith(
        f"train: the encoding must be that of the run to start from; got encoding=learn:300, init={out} ({name})."
    )
    resumed = run("train", "--resume", out, "--steps", 8)
    assert resumed.returncode == 0, resumed.stderr
    assert run("generate", out, "--tokens", 4).returncode == 0
