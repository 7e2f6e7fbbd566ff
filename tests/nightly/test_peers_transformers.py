"""Tests of the same model in Hugging Face's transformers and here, both ways: logits, text, and what it writes.

Skipped where transformers and PyTorch are not installed (the extra `test-peers`).
"""

import json
import os
from dataclasses import replace
from textwrap import dedent

import numpy as np
import pytest
from batch_results import results_of
from conftest import SMALL, random_parameters
from documents import ROOT
from small_runs import fit, losses_of
from tolerances import TOLERANCES

import daskgpt
from daskgpt import convert, train
from daskgpt.config.model import ModelConfig
from daskgpt.data.dataset import shuffled

os.environ.setdefault("HF_HUB_OFFLINE", "1")
torch = pytest.importorskip("torch", reason="PyTorch is not installed (the extra test-peers)")
transformers = pytest.importorskip("transformers", reason="transformers is not installed (the extra test-peers)")

BYTES = ModelConfig(blocks=2, heads=2, channels=32, vocabulary=257, positions=64)
SIZES = [pytest.param(SMALL, id="small"), pytest.param(daskgpt.preset("gpt2"), id="gpt2")]


def theirs_of(config):
    """A random model of theirs: embeddings with larger values than their own start, so that logits differ by units."""
    torch.manual_seed(0)
    sizes = {"n_layer": config.blocks, "n_head": config.heads, "n_embd": config.channels}
    sizes |= {"n_positions": config.positions, "vocab_size": config.vocabulary}
    sizes |= {f"{part}_pdrop": 0.0 for part in ("attn", "embd", "resid")}
    model = transformers.GPT2LMHeadModel(transformers.GPT2Config(**sizes, bos_token_id=0, eos_token_id=0)).eval()
    with torch.no_grad():
        for name, values in model.named_parameters():
            values.add_(torch.randn_like(values) * (0.3 if "wte" in name or values.ndim == 1 else 0.02))
    return model


@pytest.mark.parametrize("name", ["gpt2", "smollm2-135m"])
def test_peft_adapts_their_model_as_ours(name, small_text, tmp_path):
    peft = pytest.importorskip("peft", reason="PEFT is not installed (the extra test-peers)")
    sizes = {"blocks": 2, "heads": 4, "channels": 32, "vocabulary": 257, "positions": 64, "lora": 4}
    config = daskgpt.preset(name, **sizes, **({"kv_heads": 2, "hidden": 48} if name != "gpt2" else {}))
    plain = replace(config, lora=0)
    parameters = daskgpt.initial_parameters(plain, 0)
    parameters["wte.weight"] *= np.float32(20)  # so that logits differ by units
    daskgpt.save(tmp_path / "base.safetensors", plain, parameters)
    options = {"parameters": parameters, "out": tmp_path / "run", "optimizer": {"learning_rate": 0.05, "warmup": 0}}
    fit(small_text, config=config, **options)
    assert convert.main([str(tmp_path / "base.safetensors"), str(tmp_path / "base")]) == 0
    assert convert.main([str(tmp_path / "run"), str(tmp_path / "adapters"), "--to", "peft"]) == 0
    base = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "base")
    assert_same_logits(tmp_path / "run", peft.PeftModel.from_pretrained(base, tmp_path / "adapters").eval())


def assert_same_logits(path, theirs):
    """A file read here, and a model of theirs."""
    config, parameters = daskgpt.load(path)
    shape = (2, min(24, config.positions))
    tokens = np.random.default_rng(5).integers(0, config.vocabulary, shape).astype(np.int32)
    with daskgpt.open_scheduler("threads", 2) as scheduler:
        logits = results_of(scheduler, config, parameters, (tokens,), (1, shape[1] // 2))["logits"]
    ours = logits[..., : config.vocabulary]
    with torch.no_grad():
        expected = theirs(torch.from_numpy(tokens).long()).logits.numpy()
    assert np.abs(expected).max() > 1
    np.testing.assert_allclose(ours, expected, **TOLERANCES["another program's logits"])


def converted(source, target):
    assert convert.main([str(source), str(target)]) == 0
    return target


@pytest.mark.parametrize("config", SIZES)
def test_reads_models_of_transformers(config, tmp_path):
    model = theirs_of(config)
    model.save_pretrained(tmp_path / "one")
    model.save_pretrained(tmp_path / "shards", max_shard_size="20MB" if config.channels > 100 else "8KB")
    assert len(list((tmp_path / "shards").glob("model-*.safetensors"))) > 2
    for path in (tmp_path / "one", tmp_path / "shards", converted(tmp_path / "shards", tmp_path / "own.safetensors")):
        assert_same_logits(path, model)


@pytest.mark.parametrize("config", SIZES)
def test_transformers_reads_our_models(config, tmp_path):
    parameters = random_parameters(config, np.random.default_rng(3))
    if config.channels > 100:  # of so many channels sums with such values are some hundreds
        start = daskgpt.initial_parameters(config, 0)
        parameters = {name: values * np.float32(0.05) + start[name] for name, values in parameters.items()}
    daskgpt.save(tmp_path / "own.safetensors", config, parameters)
    folder = converted(tmp_path / "own.safetensors", tmp_path / "folder")
    theirs, said = transformers.GPT2LMHeadModel.from_pretrained(folder, output_loading_info=True)
    assert not any(said[kind] for kind in ("missing_keys", "unexpected_keys", "mismatched_keys"))
    assert_same_logits(tmp_path / "own.safetensors", theirs.eval())


@pytest.mark.parametrize("biases", [True, False])
def test_conversion_of_nanogpt_checkpoints(tmp_path, monkeypatch, biases):
    model, state = theirs_of(SMALL), {}
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
    monkeypatch.chdir(tmp_path)
    exec(dedent(convert.__doc__[convert.__doc__.index("    import json") :]), {})
    assert_same_logits(tmp_path / "NEW_FOLDER", model)


def test_fine_tuning_on_pairs_matches_a_loop_in_pytorch(tmp_path, monkeypatch, capsys):
    """The same pairs in the same order, masked by their own hands: 50 steps of AdamW, the losses side by side."""
    length, size, steps, rate = 48, 8, 50, 1e-3
    pairs = [(f"question {number}: ", f"{number * number} is the answer") for number in range(200)]
    lines = (json.dumps({"prompt": one, "response": other}) for one, other in pairs)
    (tmp_path / "pairs.jsonl").write_text("\n".join(lines))
    model = theirs_of(replace(BYTES, positions=96)).train()  # without dropout, as its configuration is
    model.save_pretrained(tmp_path / "theirs")
    flags = f"--batch-size {size} --sequence-length {length} --steps {steps} --schedule constant --warmup 0 --clip 1"
    flags += f" --learning-rate {rate} --beta2 0.999 --weight-decay 0.01 --sample-tokens 0 --validation-fraction 0.1"
    where = ["--init", str(tmp_path / "theirs"), "--data", str(tmp_path / "pairs.jsonl")]
    assert train.main(["--preset", "finetune", *flags.split(), *where, "--out", str(tmp_path / "run")]) == 0

    rows = []
    for number, (prompt, response) in enumerate(pairs):
        if number % 10 != 4:  # which are held out
            ids = [*prompt.encode(), *response.encode(), 256]
            labels = [-100] * (len(prompt) - 1) + ids[len(prompt) :]
            rows.append((ids + [256] * (length - len(ids)), labels + [-100] * (length - len(labels))))
    tokens, labels = (torch.tensor([row[part] for row in rows]) for part in (0, 1))
    matrices = [values for values in model.parameters() if values.ndim > 1]
    others = [values for values in model.parameters() if values.ndim < 2]
    groups = [{"params": matrices, "weight_decay": 0.01}, {"params": others, "weight_decay": 0.0}]
    optimizer = torch.optim.AdamW(groups, lr=rate, betas=(0.9, 0.999))
    losses, count = [], len(rows)
    for step in range(steps):
        places = np.arange(step * size, (step + 1) * size)
        drawn = [int(shuffled(np.array([place % count]), count, 0, place // count)[0]) for place in places]
        logits = model(tokens[drawn]).logits
        loss = torch.nn.functional.cross_entropy(logits.flatten(0, 1), labels[drawn].flatten(), ignore_index=-100)
        optimizer.zero_grad()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        losses.append(loss.item())
    ours = losses_of(tmp_path / "run")
    np.testing.assert_allclose(ours, losses, **TOLERANCES["fifty steps"])
    assert losses[-1] < 0.5 * losses[0]
    converted(tmp_path / "run", tmp_path / "tuned-hf")
    assert_same_logits(tmp_path / "run", transformers.GPT2LMHeadModel.from_pretrained(tmp_path / "tuned-hf").eval())
    page, names = (ROOT / "docs" / "finetuning.md").read_text(), {}
    monkeypatch.chdir(tmp_path)
    exec(page.split("```python\n")[1].split("```")[0], names)
    assert names["tokenizer"].decode(names["prompt"].input_ids[0]) in capsys.readouterr().out
    print(f"losses {losses[0]:.3f} to {losses[-1]:.3f}, off by {np.abs(np.subtract(ours, losses)).max():.1e} at most")
