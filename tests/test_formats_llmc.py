"""llm.c's files: golden values, round trips, bfloat16, memory, and that a write is whole or absent."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
import textwrap
import tracemalloc
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from command_lines import PATIENCE
from llmc_samples import CONFIG, DEBUG_STATE, GOLDEN, MODEL, SMALL, small_debug_state, small_parameters

from daskgpt.config.model import GPT2Config
from daskgpt.formats.llmc import (
    read_debug_state,
    read_model,
    write_debug_state,
    write_model,
)
from daskgpt.formats.published import held, to_bfloat16
from daskgpt.model.parameters import PARAMETERS, Tensor, initial_parameters, parameter_shapes


def assert_same_bits(first: dict[str, np.ndarray], second: dict[str, np.ndarray]) -> None:
    assert list(first) == list(second)
    for name, values in first.items():
        assert values.dtype == second[name].dtype == np.float32
        assert values.shape == second[name].shape
        assert values.tobytes() == second[name].tobytes(), name


# Golden values


def test_golden_model_has_the_documented_header_and_shapes() -> None:
    config, parameters = read_model(MODEL)
    assert config == CONFIG
    sizes = json.loads((GOLDEN / "gpt2_small.json").read_text())["config"]
    assert sizes == {
        "max_positions": config.positions,
        "vocabulary": config.vocabulary,
        "padded_vocabulary": config.padded_vocabulary,
        "blocks": config.blocks,
        "heads": config.heads,
        "channels": config.channels,
        "B": 4,
        "T": 32,
    }
    assert {name: values.shape for name, values in parameters.items()} == parameter_shapes(CONFIG)
    assert not parameters["wte.weight"][CONFIG.vocabulary :].any()
    assert parameters["wte.weight"][: CONFIG.vocabulary].any(axis=1).all()


def test_tensors_lie_in_llmc_order_stacked_over_the_blocks() -> None:
    _, parameters = read_model(MODEL)
    values = np.fromfile(MODEL, "<f4", offset=1024)
    C, P, Vp, L = 64, 64, 512, 3
    ln1w = (Vp + P) * C
    qkvw = ln1w + 2 * L * C
    fcw = qkvw + L * (3 * C * C + 3 * C) + L * (C * C + C) + 2 * L * C
    np.testing.assert_array_equal(parameters["h.2.ln_1.weight"], values[ln1w + 2 * C : ln1w + 3 * C])
    block = values[qkvw + 3 * C * C : qkvw + 2 * 3 * C * C].reshape(3 * C, C)
    np.testing.assert_array_equal(parameters["h.1.attn.c_attn.weight"], block)
    block = values[fcw + 2 * 4 * C * C : fcw + 3 * 4 * C * C].reshape(4 * C, C)
    np.testing.assert_array_equal(parameters["h.2.mlp.c_fc.weight"], block)
    np.testing.assert_array_equal(parameters["ln_f.bias"], values[-C:])


def test_golden_debug_state_agrees_with_itself_and_with_its_model() -> None:
    _, parameters = read_model(MODEL)
    state = read_debug_state(DEBUG_STATE, CONFIG)
    assert state.tokens.shape == state.targets.shape == (4, 32)
    assert state.tokens.dtype == state.targets.dtype == np.int32
    assert state.logits.shape == (4, 32, 509)
    assert np.float32(json.loads((GOLDEN / "gpt2_small.json").read_text())["loss"]) == state.loss

    logits = state.logits.astype(np.float64)
    exponentials = np.exp(logits - logits.max(-1, keepdims=True))
    probabilities = exponentials / exponentials.sum(-1, keepdims=True)
    at_targets = np.take_along_axis(probabilities, state.targets[..., None].astype(np.int64), -1)
    # The logits were rounded to float32, a relative 6e-8 of values up to about 10.
    assert -np.log(at_targets).mean() == pytest.approx(state.loss, abs=1e-6)

    # The last layernorm's bias gets the logits' gradient through wte: the last gradient lies where it must.
    dlogits = probabilities - np.eye(509)[state.targets]
    dbias = (dlogits @ parameters["wte.weight"][:509]).mean((0, 1))
    np.testing.assert_allclose(state.gradients["ln_f.bias"], dbias, rtol=0, atol=1e-6)
    assert {name: values.shape for name, values in state.gradients.items()} == parameter_shapes(CONFIG)
    unused = np.setdiff1d(np.arange(CONFIG.positions), np.arange(32))
    assert not state.gradients["wpe.weight"][unused].any()
    assert not state.gradients["wte.weight"][CONFIG.vocabulary :].any()


# Round trips


def test_golden_files_are_written_again_byte_for_byte(tmp_path: Path) -> None:
    config, parameters = read_model(MODEL)
    write_model(tmp_path / "model.bin", config, parameters)
    assert (tmp_path / "model.bin").read_bytes() == MODEL.read_bytes()
    write_debug_state(tmp_path / "state.bin", config, read_debug_state(DEBUG_STATE, config))
    assert (tmp_path / "state.bin").read_bytes() == DEBUG_STATE.read_bytes()


def test_round_trip_keeps_every_bit_and_the_padded_rows(tmp_path: Path) -> None:
    parameters = small_parameters()
    parameters["ln_f.bias"][:] = [-0.0, np.inf, np.nan, np.float32(1e-42)]
    assert parameters["wte.weight"][SMALL.vocabulary :].all()
    path = tmp_path / "model.bin"
    write_model(str(path), SMALL, parameters)
    config, again = read_model(str(path))
    assert config == SMALL
    assert_same_bits(again, parameters)


def test_arrays_that_are_read_can_be_written_and_own_their_memory() -> None:
    _, parameters = read_model(MODEL)
    for name, values in parameters.items():
        assert values.flags.writeable, name
        assert values.flags.c_contiguous, name
        base = values if values.base is None else values.base
        assert base.nbytes == values.nbytes, name


def test_order_and_memory_layout_of_the_given_parameters_do_not_matter(tmp_path: Path) -> None:
    parameters = small_parameters()
    write_model(tmp_path / "plain.bin", SMALL, parameters)
    transposed = {name: np.asfortranarray(parameters[name]) for name in reversed(parameters)}
    for values in transposed.values():
        values.flags.writeable = False
    for version in (3, 5):
        write_model(tmp_path / f"plain{version}.bin", SMALL, parameters, version)
        write_model(tmp_path / f"transposed{version}.bin", SMALL, transposed, version)
        assert (tmp_path / f"plain{version}.bin").read_bytes() == (tmp_path / f"transposed{version}.bin").read_bytes()


def test_debug_state_round_trip(tmp_path: Path) -> None:
    state = small_debug_state()
    write_debug_state(tmp_path / "state.bin", SMALL, state)
    again = read_debug_state(tmp_path / "state.bin", SMALL)
    assert again.loss == state.loss
    assert isinstance(again.loss, float)
    for name in ("tokens", "targets", "logits"):
        np.testing.assert_array_equal(getattr(again, name), getattr(state, name))
        assert getattr(again, name).dtype == getattr(state, name).dtype
    assert_same_bits(again.gradients, state.gradients)


# bfloat16


def test_version_5_rounds_to_the_nearest_and_reads_back_the_same(tmp_path: Path) -> None:
    config, parameters = read_model(MODEL)
    write_model(tmp_path / "first.bin", config, parameters, version=5)
    assert (tmp_path / "first.bin").stat().st_size == 1024 + (MODEL.stat().st_size - 1024) // 2
    assert np.fromfile(tmp_path / "first.bin", "<i4", 8).tolist() == [20240326, 5, 64, 509, 3, 4, 64, 512]
    config_again, rounded = read_model(tmp_path / "first.bin")
    assert config_again == config
    for name, values in parameters.items():
        assert rounded[name].dtype == np.float32
        # 8 significant bits: half a unit of the last place is at most 2**-8 of the value.
        np.testing.assert_allclose(rounded[name], values, rtol=2**-8, atol=0)
    write_model(tmp_path / "second.bin", config, rounded, version=5)
    assert (tmp_path / "second.bin").read_bytes() == (tmp_path / "first.bin").read_bytes()


@pytest.mark.parametrize(
    ("value", "expected"),
    [
        (0x3F800000, 0x3F80),  # 1 is exact
        (0x3F808000, 0x3F80),  # tie: down to the even one
        (0x3F818000, 0x3F82),  # tie: up to the even one
        (0x3F808001, 0x3F81),  # just above a tie
        (0x3F817FFF, 0x3F81),  # just below a tie
        (0xBF818000, 0xBF82),  # the sign does not matter
        (0x3FFFFFFF, 0x4000),  # the carry enters the exponent
        (0x7F7FFFFF, 0x7F80),  # the largest float32 becomes infinity
        (0x7F800000, 0x7F80),  # infinity
        (0xFF800000, 0xFF80),  # minus infinity
        (0x80000000, 0x8000),  # minus zero
        (0x00018000, 0x0002),  # subnormal tie
        (0x7F800001, 0x7FC0),  # a NaN whose upper half is that of infinity
        (0xFFFFFFFF, 0xFFFF),  # a NaN whose carry would run over
    ],
)
def test_rounding_to_bfloat16(value: int, expected: int) -> None:
    bits = np.array([value], np.uint32)
    assert to_bfloat16(bits.view(np.float32)).tolist() == [expected]


def widened(bits: np.ndarray) -> np.ndarray:
    row = next(row for row in PARAMETERS if row.name == "wpe.weight")
    return held(Tensor("wpe.weight", row, None, bits.shape), bits, "BF16")


def test_every_bfloat16_widens_exactly_and_comes_back() -> None:
    bits = np.arange(2**16, dtype=np.uint16)
    wide = widened(bits)
    assert wide.dtype == np.float32
    np.testing.assert_array_equal(wide.view(np.uint32), bits.astype(np.uint32) << 16)
    quiet = np.where(np.isnan(wide), bits | 0x40, bits)
    np.testing.assert_array_equal(to_bfloat16(wide), quiet)


def test_rounding_picks_the_nearer_neighbour_of_random_values() -> None:
    values = np.random.default_rng(3).standard_normal(10_000).astype(np.float32)
    below = values.view(np.uint32) & np.uint32(0xFFFF0000)
    neighbours = np.stack([below, below + np.uint32(0x10000)]).view(np.float32).astype(np.float64)
    distances = np.abs(neighbours - values)
    rounded = widened(to_bfloat16(values)).astype(np.float64)
    np.testing.assert_array_equal(np.abs(rounded - values), distances.min(axis=0))


# Memory


def peak_bytes(work: Callable[[], Any]) -> int:
    tracemalloc.start()
    try:
        work()
        return tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()


def test_tensors_are_streamed(tmp_path: Path) -> None:
    config = GPT2Config(blocks=16, heads=2, channels=128, vocabulary=64, positions=64)
    parameters = initial_parameters(config, seed=0)
    size = sum(values.nbytes for values in parameters.values())
    for version in (3, 5):
        path = tmp_path / f"{version}.bin"
        # A second copy would be a whole (or for version 5 half a) size; one tensor is less than a fortieth of it.
        assert peak_bytes(partial(write_model, path, config, parameters, version)) < 0.2 * size
        assert peak_bytes(partial(read_model, path)) < 1.2 * size


# Whole or absent

WRITE_UNDER_A_SIZE_LIMIT = textwrap.dedent("""
    import resource, signal, sys
    from daskgpt.formats.llmc import read_model, write_model
    config, parameters = read_model(sys.argv[1])
    signal.signal(signal.SIGXFSZ, signal.SIG_DFL if sys.argv[3] == "die" else signal.SIG_IGN)
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    resource.setrlimit(resource.RLIMIT_FSIZE, (300_000, resource.RLIM_INFINITY))
    parameters["wte.weight"] += 1
    try:
        write_model(sys.argv[2], config, parameters)
    except OSError as error:
        print(error)
        sys.exit(3)
""")


def write_under_a_size_limit(target: Path, then: str) -> subprocess.CompletedProcess[str]:
    """A process whose files may have 300,000 bytes writes the golden model (748,800 bytes) and fails, or is killed."""
    return subprocess.run(
        [sys.executable, "-c", WRITE_UNDER_A_SIZE_LIMIT, str(MODEL), str(target), then],
        cwd=Path(__file__).parents[1],
        capture_output=True,
        text=True,
        check=False,
        timeout=PATIENCE,
    )


@pytest.mark.parametrize("before", [None, b"the model of yesterday"])
def test_a_write_that_fails_in_the_middle_leaves_nothing(tmp_path: Path, before: bytes | None) -> None:
    target = tmp_path / "model.bin"
    if before is not None:
        target.write_bytes(before)
    done = write_under_a_size_limit(target, "fail")
    assert done.returncode == 3, done.stderr
    told = f"all of the file must be written; got path={target} (File too large). Make room there"
    assert told in done.stdout
    left = {path.name: path.read_bytes() for path in tmp_path.iterdir()}
    assert left == ({} if before is None else {"model.bin": before})


def test_a_process_killed_in_the_middle_leaves_the_old_file(tmp_path: Path) -> None:
    target = tmp_path / "model.bin"
    target.write_bytes(MODEL.read_bytes())
    done = write_under_a_size_limit(target, "die")
    assert done.returncode == -signal.SIGXFSZ, done.stderr
    assert target.read_bytes() == MODEL.read_bytes()
    # It had no time to clean up: what it wrote bears another name, and is a part only.
    (rest,) = (path for path in tmp_path.iterdir() if path != target)
    assert re.fullmatch(r"\.model\.bin\.\d+-[0-9a-f]{8}\.tmp", rest.name)
    assert 0 < rest.stat().st_size <= 300_000
    with pytest.raises(ValueError, match="The file is truncated"):
        read_model(rest)


def test_a_whole_file_replaces_the_old_one_and_has_the_usual_rights(tmp_path: Path) -> None:
    target = tmp_path / "model.bin"
    target.write_bytes(b"old")
    write_model(target, SMALL, small_parameters())
    assert_same_bits(read_model(target)[1], small_parameters())
    assert os.listdir(tmp_path) == ["model.bin"]
    (tmp_path / "other").touch()
    assert target.stat().st_mode == (tmp_path / "other").stat().st_mode
