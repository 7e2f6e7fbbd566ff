"""llm.c's own test program, compiled from its sources, on a model and a debug state that are written here.

Skipped unless the environment variable LLMC_SOURCE names a folder with llm.c's sources, and gcc is there. The program
compares logits, loss and all 16 gradients with the debug state, and then the losses of ten AdamW steps with a table in
its source. That table is of OpenAI's weights, which are not here: in the copy that is compiled it holds the losses of
the same ten steps made by daskgpt. Nothing else of it is changed.
"""

from __future__ import annotations

import os
import re
import shutil
import subprocess
from pathlib import Path

import numpy as np
import pytest
from command_lines import PATIENCE, run
from conftest import GOLDEN

import daskgpt
from daskgpt.config.run import OptimizerConfig
from daskgpt.formats.llmc import DebugState, read_debug_state, write_debug_state
from daskgpt.formats.published import padded
from daskgpt.model.parameters import initial_parameters
from daskgpt.training.inference import Inference
from daskgpt.training.step import State, TrainingStep

SOURCE = os.environ.get("LLMC_SOURCE", "")
pytestmark = [
    pytest.mark.skipif(not SOURCE, reason="LLMC_SOURCE names no folder with llm.c's sources"),
    pytest.mark.skipif(shutil.which("gcc") is None, reason="gcc is not installed"),
]
TABLE = re.compile(r"(float expected_losses\[10\] = \{)[^}]*(\};)")
# gpt2_update(&model, 1e-4f, 0.9f, 0.999f, 1e-8f, 0.01f, step+1): every tensor is decayed.
OPTIMIZER = OptimizerConfig(
    schedule="constant", learning_rate=1e-4, beta1=0.9, beta2=0.999, eps=1e-8, weight_decay=0.01, decay="all"
)


def compiled(folder, losses):
    """The test program with its table of losses replaced."""
    for name in ("train_gpt2.c", "test_gpt2.c"):
        shutil.copy(Path(SOURCE) / name, folder)
    shutil.copytree(Path(SOURCE) / "llmc", folder / "llmc")
    text, count = TABLE.subn(
        lambda found: found[1] + ", ".join(f"{loss:.9f}f" for loss in losses) + found[2],
        (folder / "test_gpt2.c").read_text(),
    )
    assert count == 1
    (folder / "test_gpt2.c").write_text(text)
    flags = ["-Ofast", "-fopenmp", "-march=native", "-Wno-unused-result"]
    command = ["gcc", *flags, "test_gpt2.c", "-o", "test_gpt2", "-lm"]
    subprocess.run(command, cwd=folder, check=True, capture_output=True, timeout=PATIENCE)


def accepted(folder):
    """What the program prints."""
    done = subprocess.run(["./test_gpt2"], cwd=folder, capture_output=True, text=True, timeout=550)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def computed(config, parameters, tokens, targets):
    """Debug state and ten losses, by daskgpt."""
    with daskgpt.open_scheduler("threads", 2) as scheduler:
        state = State.of_weights(config, parameters)
        wanted = ("logits", "loss", "gradients")
        found = Inference(config, tokens.shape, tokens.shape, state.layout, wanted)(scheduler, state, tokens, targets)
        step, losses = TrainingStep(config, tokens.shape, tokens.shape, OPTIMIZER), []
        state = step.initial({name: values.copy() for name, values in parameters.items()})
        for _ in range(10):
            loss, state = step(scheduler, state, tokens, targets, 10)
            losses.append(loss)
    gradients = {name: np.ascontiguousarray(found[name]) for name in parameters}
    logits = np.ascontiguousarray(found["logits"][..., : config.vocabulary])
    return DebugState(tokens, targets, logits, float(found["loss"]), gradients), losses


def assert_accepted(told):
    assert "overall okay: 1" in told, told
    assert told.count("TENSOR OK") == 16
    assert told.count("OK (LOGITS)") == told.count("LOSS OK") == 1
    assert len(re.findall(r"step \d: loss .* OK = 1", told)) == 10
    assert "NOT OK" not in told
    assert "MISMATCH" not in told


def written(folder, config, parameters, shape):
    """Model and debug state under the names that the program looks for, and its ten losses compiled into it."""
    random = np.random.default_rng(7)
    tokens, targets = random.integers(0, config.vocabulary, (2, *shape)).astype(np.int32)
    state, losses = computed(config, parameters, tokens, targets)
    assert losses[0] - losses[-1] > 0.05  # the steps do something: a program that did not update would be refused
    daskgpt.save(folder / "own.safetensors", config, parameters)
    result = run("convert", folder / "own.safetensors", folder / "gpt2_124M.bin")
    assert result.returncode == 0, result.stderr
    write_debug_state(folder / "gpt2_124M_debug_state.bin", config, state)
    compiled(folder, losses)


def test_a_small_model_is_accepted(tmp_path):
    config, parameters = daskgpt.load(GOLDEN / "gpt2_small.bin")
    written(tmp_path, config, parameters, (4, 32))
    assert_accepted(accepted(tmp_path))
    # What it refuses: another loss, another gradient, another model.
    path = tmp_path / "gpt2_124M_debug_state.bin"
    state = read_debug_state(path, config)
    state.gradients["h.1.mlp.c_fc.weight"][3, 5] += 0.05
    write_debug_state(path, config, state)
    told = accepted(tmp_path)
    assert "overall okay: 0" in told
    assert told.count("TENSOR OK") == 15


@pytest.mark.slow
def test_a_model_of_gpt2s_shape_is_accepted(tmp_path):
    config = daskgpt.preset("gpt2")
    assert config.padded_vocabulary == padded(config.vocabulary)
    written(tmp_path, config, initial_parameters(config, 0), (4, 64))
    told = accepted(tmp_path)
    print(told)
    assert_accepted(told)
