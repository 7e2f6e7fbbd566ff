"""The same model in Hugging Face's transformers and here, both ways: logits, text, and every form that it writes.

Skipped where transformers and PyTorch are not installed (the extra `test-peers`).
"""

from __future__ import annotations

import os
import subprocess
import sys

import numpy as np
import pytest
from command_lines import PATIENCE, run
from conftest import SMALL, random_parameters
from tolerances import TOLERANCES

import daskgpt
from daskgpt.config.model import GPT2Config
from daskgpt.convert import LINES
from daskgpt.formats.huggingface import write_huggingface
from daskgpt.formats.opened import OpenedModel
from daskgpt.formats.published import held

os.environ.setdefault("HF_HUB_OFFLINE", "1")
torch = pytest.importorskip("torch", reason="PyTorch is not installed (the extra test-peers)")
transformers = pytest.importorskip("transformers", reason="transformers is not installed (the extra test-peers)")

BYTES = GPT2Config(blocks=2, heads=2, channels=32, vocabulary=257, positions=64)
SIZES = [pytest.param(SMALL, id="small"), pytest.param(daskgpt.preset("gpt2"), id="gpt2", marks=pytest.mark.slow)]


def theirs_of(config, seed=0):
    """A random model of theirs: embeddings with larger values than their own start, so that logits differ by units."""
    torch.manual_seed(seed)
    sizes = {
        "n_layer": config.blocks,
        "n_head": config.heads,
        "n_embd": config.channels,
        "n_positions": config.positions,
    }
    settings = transformers.GPT2Config(**sizes, vocab_size=config.vocabulary, bos_token_id=0, eos_token_id=0)
    model = transformers.GPT2LMHeadModel(settings).eval()
    with torch.no_grad():
        for name, values in model.named_parameters():
            values.add_(torch.randn_like(values) * (0.3 if "wte" in name or values.ndim == 1 else 0.02))
    return model


def logits_of(model, tokens):
    with torch.no_grad():
        return model(torch.from_numpy(tokens).long()).logits.numpy()


def own_logits(path, tokens):
    from daskgpt.model.precision import precision_of
    from daskgpt.training.chunk_choice import ChunkChoice
    from daskgpt.training.inference import Inference
    from daskgpt.training.step import State

    config, parameters = daskgpt.load(path)
    precision = precision_of("float32")
    weights = State.of_weights(config, parameters, precision)
    with daskgpt.open_scheduler("threads", 2) as scheduler:
        chunk = ChunkChoice(config, tokens.shape, daskgpt.DataflowConfig(), precision, scheduler.threads).first
        inference = Inference(config, tokens.shape, chunk, weights.layout, ("logits",), precision)
        return inference(scheduler, weights, tokens, tokens)["logits"][..., : config.vocabulary]


def batch_of(config):
    shape = (2, min(24, config.positions))
    return np.random.default_rng(5).integers(0, config.vocabulary, shape).astype(np.int32)


def assert_same_logits(own, theirs):
    assert np.abs(theirs).max() > 1
    np.testing.assert_allclose(own, theirs, **TOLERANCES["another program's logits"])


def converted(source, target, *more):
    result = run("convert", source, target, *more)
    assert result.returncode == 0, result.stderr
    return target


@pytest.mark.parametrize("config", SIZES)
def test_theirs_read_here(config, tmp_path):
    model, tokens = theirs_of(config), batch_of(config)
    expected = logits_of(model, tokens)
    model.save_pretrained(tmp_path / "one")
    model.save_pretrained(tmp_path / "shards", max_shard_size="20MB" if config.channels > 100 else "8KB")
    assert len(list((tmp_path / "shards").glob("model-*.safetensors"))) > 2
    for name in ("one", "shards"):
        assert_same_logits(own_logits(tmp_path / name, tokens), expected)
    converted(tmp_path / "shards", tmp_path / "llmc.bin")
    assert_same_logits(own_logits(tmp_path / "llmc.bin", tokens), expected)


@pytest.mark.parametrize("config", SIZES)
def test_ours_read_there(config, tmp_path):
    parameters = random_parameters(config, np.random.default_rng(3))
    if config.channels > 100:  # of so many channels sums with such values are some hundreds
        start = daskgpt.initial_parameters(config, 0)
        parameters = {name: values * np.float32(0.05) + start[name] for name, values in parameters.items()}
    daskgpt.save(tmp_path / "own.safetensors", config, parameters)
    tokens = batch_of(config)
    converted(tmp_path / "own.safetensors", tmp_path / "folder")
    model, said = transformers.GPT2LMHeadModel.from_pretrained(tmp_path / "folder", output_loading_info=True)
    assert not any(said[kind] for kind in ("missing_keys", "unexpected_keys", "mismatched_keys"))
    assert_same_logits(own_logits(tmp_path / "own.safetensors", tokens), logits_of(model.eval(), tokens))


def test_our_shards_read_there(tmp_path):
    parameters = random_parameters(SMALL, np.random.default_rng(3))
    model = OpenedModel(SMALL, [], "", "", lambda tensor: held(tensor, parameters[tensor.name]))
    write_huggingface(tmp_path / "folder", model, {}, shard_bytes=8000)
    assert len(list((tmp_path / "folder").glob("model-*.safetensors"))) > 2
    theirs, said = transformers.GPT2LMHeadModel.from_pretrained(tmp_path / "folder", output_loading_info=True)
    assert not any(said[kind] for kind in ("missing_keys", "unexpected_keys", "mismatched_keys"))
    tokens = batch_of(SMALL)
    assert_same_logits(own_logits(tmp_path / "folder", tokens), logits_of(theirs.eval(), tokens))


@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
def test_their_16_bit_files(dtype, tmp_path):
    model, tokens = theirs_of(SMALL), batch_of(SMALL)
    model.to(getattr(torch, dtype)).save_pretrained(tmp_path / "half")
    # What is in the file, computed in float32 by both.
    assert_same_logits(own_logits(tmp_path / "half", tokens), logits_of(model.float(), tokens))
    _, parameters = daskgpt.load(tmp_path / "half")
    np.testing.assert_array_equal(parameters["wte.weight"], model.transformer.wte.weight.detach().numpy())


def test_a_model_without_its_head(tmp_path):
    """GPT2Model's files have no prefix, and older ones the masks."""
    model, tokens = theirs_of(SMALL), batch_of(SMALL)
    model.transformer.save_pretrained(tmp_path / "bare")
    assert_same_logits(own_logits(tmp_path / "bare", tokens), logits_of(model, tokens))


def test_their_pipeline_writes_text_as_generate_does(tmp_path):
    parameters = random_parameters(BYTES, np.random.default_rng(3))
    daskgpt.save(tmp_path / "own.safetensors", BYTES, parameters, encoding="bytes", sequence_length=64)
    converted(tmp_path / "own.safetensors", tmp_path / "folder")
    pipeline = transformers.pipeline("text-generation", model=str(tmp_path / "folder"), device="cpu")
    (found,) = pipeline("The quick", max_new_tokens=12, do_sample=False)
    assert found["generated_text"].startswith("The quick")
    tokens = daskgpt.sample(BYTES, parameters, prompt=list(b"The quick"), count=12, temperature=0.0)
    ids = pipeline.tokenizer("The quick").input_ids
    assert ids == list(b"The quick")
    with torch.no_grad():
        theirs = pipeline.model.generate(torch.tensor([ids]), max_new_tokens=12, do_sample=False, eos_token_id=None)
    assert theirs[0, len(ids) :].tolist() == list(tokens)


def test_their_tokenizer_of_a_gpt2_folder(tmp_path):
    encodings = pytest.importorskip("daskgpt.data.encodings")
    try:
        codec = encodings.get_encoding("gpt2")
    except FileNotFoundError as error:
        pytest.skip(str(error))
    config = GPT2Config(blocks=1, heads=1, channels=4, vocabulary=50257, positions=64)
    daskgpt.save(tmp_path / "own.safetensors", config, daskgpt.initial_parameters(config, 0))
    converted(tmp_path / "own.safetensors", tmp_path / "folder")
    text = "  Hello world's\n\n\tnaïve 日本 🙂 12345  end"
    expected = encodings.encode(codec, text).tolist()
    for tokenizer in (
        transformers.AutoTokenizer.from_pretrained(tmp_path / "folder"),
        transformers.GPT2Tokenizer.from_pretrained(tmp_path / "folder"),
        transformers.PreTrainedTokenizerFast(tokenizer_file=str(tmp_path / "folder" / "tokenizer.json")),
    ):
        assert tokenizer(text).input_ids == expected
        assert tokenizer.decode(expected) == text
        assert tokenizer("<|endoftext|>").input_ids == [50256]
        assert len(tokenizer) == 50257
    (tmp_path / "folder" / "tokenizer.json").unlink()
    assert transformers.AutoTokenizer.from_pretrained(tmp_path / "folder")(text).input_ids == expected


@pytest.mark.parametrize("biases", [True, False])
def test_the_lines_that_convert_nanogpts_checkpoint(tmp_path, biases):
    model, tokens = theirs_of(SMALL), batch_of(SMALL)
    state = {}
    for name, values in model.state_dict().items():
        if name.endswith(".bias") and not biases:
            model.get_parameter(name).data.zero_()
            continue
        turned = name.startswith("transformer.h.") and values.ndim == 2
        state["_orig_mod." + name] = values.T.contiguous() if turned else values
    state["_orig_mod.transformer.h.0.attn.bias"] = torch.tril(torch.ones(1, 1, 16, 16))
    sizes = {"n_layer": SMALL.blocks, "n_head": SMALL.heads, "n_embd": SMALL.channels, "block_size": SMALL.positions}
    sizes |= {"bias": biases, "vocab_size": SMALL.vocabulary, "dropout": 0.0}
    torch.save({"model": state, "model_args": sizes, "iter_num": 7, "config": {"dataset": "x"}}, tmp_path / "ckpt.pt")
    refused = run("convert", tmp_path / "ckpt.pt", tmp_path / "out")
    assert refused.returncode == 2
    assert "`python -m daskgpt.convert --help` has the lines that convert one." in refused.stderr
    script = LINES.split("moves logits by some thousandths:\n\n")[1]
    script = "\n".join(line.removeprefix("    ") for line in script.splitlines())
    done = subprocess.run(
        [sys.executable, "-c", script], cwd=tmp_path, capture_output=True, text=True, timeout=PATIENCE
    )
    assert done.returncode == 0, done.stderr
    assert_same_logits(own_logits(tmp_path / "NEW_FOLDER", tokens), logits_of(model, tokens))
