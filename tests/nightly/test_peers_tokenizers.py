"""Tokenizers of Hugging Face's folders beside transformers: random added tokens in every form that it saves them."""

import json
import random
import shutil

import pytest
from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers, trainers

from daskgpt.formats.encoding import get_encoding
from daskgpt.formats.huggingface import encoding_named, tokenizer_files

transformers = pytest.importorskip("transformers", reason="transformers is not installed (the extra test-peers)")
pytestmark = pytest.mark.nightly

TEXT = "the quick brown fox jumps over the lazy dog\n\n  and what's more, it's naïve: 12345 times!\n word words\n" * 40
WORDS = ["<|user|>", "<|assistant|>", "word", "[tool]", "the fox", "  ", "<a b>", "\n\n", "X", "日本", "<|end|>"]
PARTS = [*WORDS, "the", " quick", "\n", " ", "s", "1", "42", "!", "本", "🙂", "é", "e\u0301", "'s", "words", "\t"]
PARTS += ["<|endoftext|>", "</s>", "<pad>", "\u3000", "a", "naïve"]
QWEN = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"


def trained(kind):
    level = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=kind not in ("qwen", "whole"))
    library = Tokenizer(models.BPE())
    library.pre_tokenizer = {
        "digits": pre_tokenizers.Sequence([pre_tokenizers.Digits(individual_digits=True), level]),
        "qwen": pre_tokenizers.Sequence([pre_tokenizers.Split(Regex(QWEN), "isolated"), level]),
    }.get(kind, level)
    if kind == "qwen":
        library.normalizer = normalizers.NFC()
    library.decoder = decoders.ByteLevel()
    alphabet, special = pre_tokenizers.ByteLevel.alphabet(), ["<|endoftext|>"]
    trainer = trainers.BpeTrainer(
        vocab_size=340, special_tokens=special, initial_alphabet=alphabet, show_progress=False
    )
    library.train_from_iterator([TEXT], trainer)
    return library


def token(content, rng):
    flags = {name: rng.random() < 0.3 for name in ("single_word", "lstrip", "rstrip", "normalized", "special")}
    return AddedToken(content, **flags)


def saved(folder, kind, form, rng):
    """A folder with random added tokens, and transformers' tokenizer for it."""
    library, added = trained(kind), [token(word, rng) for word in rng.sample(WORDS, rng.randint(0, 7))]
    names = {"eos_token": rng.choice(["<|endoftext|>", "</s>"])}
    names |= {"pad_token": "<pad>"} if rng.random() < 0.4 else {}
    theirs = transformers.PreTrainedTokenizerFast(tokenizer_object=library, **names)
    theirs.add_tokens(added)
    theirs.save_pretrained(folder)
    if form == "decoder":  # as version 4 writes it
        tokens = json.loads((folder / "tokenizer.json").read_text())["added_tokens"]
        config = json.loads((folder / "tokenizer_config.json").read_text())
        config["added_tokens_decoder"] = {token["id"]: {n: token[n] for n in token.keys() - {"id"}} for token in tokens}
        config["tokenizer_class"] = "PreTrainedTokenizerFast"
        (folder / "tokenizer_config.json").write_text(json.dumps(config))
    return transformers.AutoTokenizer.from_pretrained(folder)


def ids_of(tokenizer, text):
    """The ids, None where the library itself panics."""
    try:
        return tokenizer(text, add_special_tokens=False).input_ids
    except BaseException as error:
        if "Panic" not in type(error).__name__:
            raise
        return None


@pytest.mark.parametrize("form", ["saved", "decoder"])
@pytest.mark.parametrize("kind", ["plain", "digits", "qwen", "whole"])
def test_ids_and_texts_of_transformers(kind, form, tmp_path):
    rng, compared = random.Random(f"{kind} {form}"), 0
    for number in range(12):
        theirs = saved(tmp_path / f"{number}", kind, form, rng)
        name = encoding_named(str(tmp_path / f"{number}"))
        ours = get_encoding(name)
        assert ours.eot_token == theirs.eos_token_id
        (tmp_path / "back").mkdir()
        for file, content in tokenizer_files(get_encoding(name), 64).items():
            (tmp_path / "back" / file).write_bytes(content)
        exported = transformers.AutoTokenizer.from_pretrained(tmp_path / "back")
        shutil.rmtree(tmp_path / "back")
        for text in ["".join(rng.choice(PARTS) for _ in range(rng.randint(1, 25))) for _ in range(60)]:
            if (expected := ids_of(theirs, text)) is not None:
                assert ours.encode(text).tolist() == expected == ids_of(exported, text), repr(text)
                assert ours.decode(expected) == theirs.decode(expected)
                compared += 1
    assert compared > 600
