"""Tokenizers in Hugging Face's folders: the ids of the library `tokenizers`, used by every command, written back."""

import json
from resource import RUSAGE_SELF, getrusage

import pytest
from safetensors.numpy import load_file, save_file
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

import daskgpt
from daskgpt import convert, evaluate, generate, train
from daskgpt.data.tokenizer import encode, encoding_named, encoding_of_model, get_encoding

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


@pytest.mark.parametrize("specials", [("<|endoftext|>",), ("<|endoftext|>", "<pad>"), ("<pad>", "<|endoftext|>")])
def test_ids_are_those_of_the_library(specials, tmp_path):
    tokenizer = trained(specials)
    tokenizer.save(str(tmp_path / "tokenizer.json"))
    name = encoding_named(str(tmp_path))
    encoding = get_encoding(name)
    assert encode(encoding, TEXT).tolist() == tokenizer.encode(TEXT).ids
    assert encoding.decode(tokenizer.encode(TEXT).ids) == TEXT
    end = "<|endoftext|>"
    assert next(iter(encoding.specials.items())) == (end, tokenizer.token_to_id(end))
    assert encoding.n_vocab == 320


@pytest.mark.parametrize(
    ("part", "value", "keyword"),
    [
        ("pre_tokenizer", {"type": "Whitespace"}, "Whitespace"),
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
    assert Tokenizer.from_file(str(out / "tokenizer.json")).encode(TEXT).ids == trained().encode(TEXT).ids
    assert json.loads((out / "config.json").read_text())["eos_token_id"] == 0
    with pytest.raises(ValueError, match="must be that of the model"):
        train.main(["--init", str(folder), "--data", str(text), "--encoding", "learn:300", *SHORT.split()])


@pytest.mark.parametrize(("vocabulary", "encoding"), [(257, "bytes"), (300, "bytes"), (50304, "gpt2"), (256, "")])
def test_model_without_encoding(vocabulary, encoding):
    if encoding:
        assert encoding_of_model(vocabulary) == encoding
    else:
        with pytest.raises(ValueError, match="--encoding"):
            encoding_of_model(vocabulary)
