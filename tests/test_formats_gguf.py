"""Tests of GGUF files: tensors, tokenizer and refusals, as the library `gguf` reads them."""

import sys

import gguf
import numpy as np
import pytest
from conftest import random_parameters

import daskgpt
from daskgpt import convert
from daskgpt.config.model import ModelConfig
from daskgpt.formats.encoding import decoded, get_encoding, learn_encoding

NAMES = {"wte": "token_embd", "wpe": "position_embd", "ln_f": "output_norm", "ln_1": "attn_norm", "ln_2": "ffn_norm"}
NAMES |= {"attn.c_attn": "attn_qkv", "attn.c_proj": "attn_output", "mlp.c_fc": "ffn_up", "mlp.c_proj": "ffn_down"}
SIZES = {"blocks": 2, "heads": 2, "channels": 32, "vocabulary": 257, "padded_vocabulary": 272, "positions": 64}
DTYPES = {"m.gguf": "F32", "m-F16.gguf": "F16", "m-bf16.gguf": "BF16", "m_q8_0.gguf": "Q8_0"}


def converted(target, encoding="", scale=1, **sizes):
    """Write a random model to a GGUF file."""
    config = ModelConfig(**SIZES | sizes)
    values = random_parameters(config, np.random.default_rng(1))
    values["h.1.attn.c_proj.weight"] *= np.float32(scale)
    daskgpt.save(target.with_name("m.safetensors"), config, values, encoding=encoding)
    assert convert.main([str(target.with_name("m.safetensors")), str(target)]) == 0
    return gguf.GGUFReader(target), values


def named(name):
    """Return llama.cpp's name of a tensor."""
    for ours, theirs in NAMES.items():
        name = name.replace(ours, theirs)
    return name.replace("h.", "blk.")


@pytest.mark.parametrize("file", DTYPES)
@np.errstate(over="ignore", invalid="ignore")
def test_tensors_are_read_back(file, tmp_path):
    reader, values = converted(tmp_path / file, scale=1e-38)  # one of them is subnormal
    tensors = {tensor.name: (tensor.data, tensor.tensor_type) for tensor in reader.tensors}
    assert tensors.keys() == {named(name) for name in values}
    for name, value in values.items():
        data, kind = tensors[named(name)]
        assert kind.name == (DTYPES[file] if value.ndim == 2 and name != "wpe.weight" else "F32")
        rows = value[:257] if name == "wte.weight" else value
        written = gguf.quants.dequantize(data, kind)
        assert np.array_equal(written, gguf.quants.dequantize(gguf.quants.quantize(rows, kind), kind)), name
        assert kind.name != "F32" or written.tobytes() == rows.tobytes()


@pytest.mark.parametrize("encoding", ["bytes", "learned"])
def test_a_tokenizer_is_read_back(encoding, tmp_path):
    if encoding == "learned":
        encoding = learn_encoding(["the quick brown fox jumps over the lazy dog\n" * 9], 270, "test")
    vocabulary = get_encoding(encoding)
    ((end, number),) = vocabulary.specials.items()
    reader, _ = converted(tmp_path / "m.gguf", encoding, vocabulary=number + 3, padded_vocabulary=0)
    facts = {name.removeprefix("tokenizer.ggml."): field.contents() for name, field in reader.fields.items()}
    texts = facts["tokens"]
    assert {decoded(text): i for i, text in enumerate(texts[:number])} == vocabulary.ranks
    assert (texts[number], facts["eos_token_id"], facts["token_type"][number:]) == (end, number, [3, 5, 5])
    assert [merge.replace(" ", "") for merge in facts["merges"]] == (texts[256:number] or [end + end])


@pytest.mark.parametrize(
    ("name", "sizes", "said"),
    [
        ("m.gguf", {"vocabulary": 29}, "must have an encoding.* encoding=not said"),
        ("m.gguf", {"encoding": "gpt2"}, "must have an encoding.* encoding=gpt2"),  # its ids are not in the table
        ("m.gguf", {"norm": "rmsnorm"}, "has no norm"),
        ("m_q8_0.gguf", {"channels": 16}, "multiple of 32"),
        ("m_q8_0.gguf", {"scale": 1e9}, "h.1.attn.c_proj.weight must fit q8_0"),
        ("m-F16.gguf", {"scale": 1e7}, "h.1.attn.c_proj.weight must fit float16"),
        ("no.gguf", {}, r"daskgpt\[gguf\]"),
    ],
)
def test_what_cannot_be_written(name, sizes, said, tmp_path, monkeypatch):
    if name == "no.gguf":
        monkeypatch.setitem(sys.modules, "gguf", None)
    with pytest.raises((ValueError, RuntimeError), match=said):
        converted(tmp_path / name, **sizes)
    assert [path.name for path in tmp_path.iterdir()] == ["m.safetensors"]
