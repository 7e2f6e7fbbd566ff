"""Tests with llm.c's own test program, compiled from its sources, on a model and a debug state that are written here.

Skipped unless the environment variable LLMC_SOURCE names a folder with llm.c's sources, and gcc is there. The program
compares logits, loss and all 16 gradients with the debug state, and then the losses of ten AdamW steps with a table in
its source. That table is of OpenAI's weights, which are not here: in the copy that is compiled it holds the losses of
the same ten steps made by daskgpt. Nothing else of it is changed.
"""

import os
import re
import shutil
import subprocess
from pathlib import Path

import numpy as np
import pytest
from batch_results import results_of
from llmc_samples import DEBUG_STATE_MAGIC, MODEL, MODEL_MAGIC, SIZES, DebugState, read_debug_state, read_model
from steps import run_step, state_of, step_of

import daskgpt
from daskgpt.config.run import OptimizerConfig
from daskgpt.model.parameters import parameter_shapes

SOURCE = os.environ.get("LLMC_SOURCE", "")
pytestmark = pytest.mark.skipif(not (SOURCE and shutil.which("gcc")), reason="needs LLMC_SOURCE and gcc")
TABLE = re.compile(r"(float expected_losses\[10\] = \{)[^}]*(\};)")
BUILD = ["gcc", "-Ofast", "-fopenmp", "-march=native", "test_gpt2.c", "-o", "test_gpt2", "-lm"]
# gpt2_update(&model, 1e-4f, 0.9f, 0.999f, 1e-8f, 0.01f, step+1): every tensor is decayed.
OPTIMIZER = OptimizerConfig(
    schedule="constant", learning_rate=1e-4, beta1=0.9, beta2=0.999, eps=1e-8, weight_decay=0.01, decay="all"
)


def write_file(path, header, arrays):
    numbers = np.zeros(256, "<i4")
    numbers[: len(header)] = header
    path.write_bytes(b"".join(np.ascontiguousarray(values).tobytes() for values in (numbers, *arrays)))


def write_model(path, config, parameters):
    """Write a model file, version 3, with rows of padding to a multiple of 128, as the program wants."""
    rows = -(-config.padded_vocabulary // 128) * 128
    padded = np.pad(parameters["wte.weight"], [(0, rows - config.padded_vocabulary), (0, 0)])
    sizes = vars(config) | {"padded_vocabulary": rows}
    arrays = parameters | {"wte.weight": padded}
    header = [MODEL_MAGIC, 3, *(sizes[name] for name in SIZES)]
    write_file(path, header, [arrays[name] for name in parameter_shapes(config)])


def write_debug_state(path, config, state):
    """Write a debug state, version 2."""
    gradients = (state.gradients[name] for name in parameter_shapes(config))
    arrays = state.tokens, state.targets, state.logits, np.array(state.loss, np.float32), *gradients
    write_file(path, [DEBUG_STATE_MAGIC, 2, *state.tokens.shape], arrays)


def computed(config, parameters, tokens, targets):
    """Debug state and ten losses, by daskgpt."""
    with daskgpt.open_scheduler("threads", 2) as scheduler:
        results = results_of(scheduler, config, parameters, (tokens, targets), tokens.shape)
        step, losses = step_of(config, tokens.shape, tokens.shape, OPTIMIZER), []
        state = state_of(step, {name: values.copy() for name, values in parameters.items()})
        for _ in range(10):
            outcome, state = run_step(scheduler, step, state, (tokens, targets), 10)
            losses.append(outcome.loss)
    gradients = {name: np.ascontiguousarray(results[name]) for name in parameters}
    logits = np.ascontiguousarray(results["logits"][..., : config.vocabulary])
    return DebugState(tokens, targets, logits, float(results["loss"]), gradients), losses


def write(folder, config, parameters, shape):
    """Model and debug state under the names that the program looks for, and the program with the ten losses in it."""
    random = np.random.default_rng(7)
    tokens, targets = random.integers(0, config.vocabulary, (2, *shape)).astype(np.int32)
    state, losses = computed(config, parameters, tokens, targets)
    assert losses[0] - losses[-1] > 0.05  # the steps do something: a program that did not update would be refused
    write_model(folder / "gpt2_124M.bin", config, parameters)
    write_debug_state(folder / "gpt2_124M_debug_state.bin", config, state)
    shutil.copytree(SOURCE, folder, dirs_exist_ok=True, ignore=shutil.ignore_patterns(".git", "*.bin"))
    text = (Path(SOURCE) / "test_gpt2.c").read_text()
    text, count = TABLE.subn(rf"\g<1>{', '.join(f'{loss:.9f}f' for loss in losses)}\g<2>", text)
    assert count == 1
    (folder / "test_gpt2.c").write_text(text)
    subprocess.run(BUILD, cwd=folder, check=True, capture_output=True)


def told(folder):
    """What the program prints."""
    return subprocess.run(["./test_gpt2"], cwd=folder, capture_output=True, text=True, check=True).stdout


def test_llmc_accepts_a_small_model_and_rejects_a_wrong_gradient(tmp_path):
    config, parameters = read_model(MODEL)
    write(tmp_path, config, parameters, (4, 32))
    output = told(tmp_path)
    assert output.count("TENSOR OK") == 16
    assert "overall okay: 1" in output
    path = tmp_path / "gpt2_124M_debug_state.bin"
    state = read_debug_state(path, config)
    state.gradients["h.1.mlp.c_fc.weight"][3, 5] += 0.05
    write_debug_state(path, config, state)
    output = told(tmp_path)
    assert "overall okay: 0" in output
    assert output.count("TENSOR OK") == 15


def test_llmc_accepts_a_model_of_gpt2_size(tmp_path):
    config = daskgpt.preset("gpt2")
    write(tmp_path, config, daskgpt.initial_parameters(config, 0), (4, 64))
    assert "overall okay: 1" in told(tmp_path)
