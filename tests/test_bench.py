"""Measuring: what is printed and recorded, what a step will take, and the same step in other programs."""

from __future__ import annotations

import importlib.util
import json
import os
import subprocess
import sys
import tracemalloc
from dataclasses import replace

import numpy as np
import pytest
from conftest import SMALL

from daskgpt import bench
from daskgpt.config.model import GPT2Config, preset
from daskgpt.config.run import DataflowConfig
from daskgpt.graph.nodes import is_leaf
from daskgpt.instruments import machine
from daskgpt.instruments.compare.llmc_program import compare_llmc, run_program
from daskgpt.instruments.compare.messages import TorchOptions
from daskgpt.instruments.compare.torch_process import check_losses, compare_torch
from daskgpt.instruments.compare.turns import Pair, PairedTurns, alternate, steps_of_a_turn, undisturbed
from daskgpt.instruments.measure import Steps, measure
from daskgpt.instruments.memory import describe_prediction, fits, predict
from daskgpt.instruments.random_tokens import random_batch
from daskgpt.model.parameters import parameter_count
from daskgpt.model.step_operations import step_operations
from daskgpt.schedulers import machine_memory
from daskgpt.schedulers.addresses import open_scheduler
from daskgpt.train import main as train_main
from daskgpt.training.step import TrainingStep

SIZE = ["--blocks", "2", "--heads", "2", "--channels", "32", "--batch-size", "4", "--sequence-length", "32"]
FLAGS = [*SIZE, "--steps", "3", "--warmup", "1", "--recorded", "1"]
FIELDS = {
    *("step_ms", "step_ms_min", "step_ms_max", "forward_ms", "backward_ms", "update_ms", "tokens_per_s", "gflops"),
    *("matmul_gflops", "matmul_share", "tasks", "grain", "overhead", "peak_gb", "preset", "batch_size", "threads"),
    *("sequence_length", "batch_chunk", "sequence_chunk", "groups", "scheduler", "precision", "cpu", "versions"),
    "others_cores",
}
NO_TORCH = importlib.util.find_spec("torch") is None


def job_of(config=SMALL, batch_size=4, sequence_length=12, groups=0, **dataflow):
    asked = bench.BenchConfig(batch_size=batch_size, sequence_length=sequence_length, groups=groups)
    return bench.job_of(config, asked, DataflowConfig(**dataflow))


def printed(capsys, *arguments, main=bench.main):
    assert main(list(arguments)) == 0
    return capsys.readouterr().out


@pytest.mark.parametrize("flags", [["--grain", "auto"], ["--scheduler", "sync"]], ids=str)
def test_the_record_of_a_measurement(capsys, flags):
    out = printed(capsys, *FLAGS, *flags, "--sequence-chunk", "16", "--json")
    assert out.count("\n") == 1
    found = json.loads(out)
    assert set(found) == FIELDS
    assert 0 < found["step_ms_min"] <= found["step_ms"] <= found["step_ms_max"]
    assert min(found["forward_ms"], found["backward_ms"], found["update_ms"]) > 0
    assert found["tokens_per_s"] == pytest.approx(4 * 32 / found["step_ms"] * 1e3, rel=1e-3)
    config = GPT2Config(blocks=2, heads=2, channels=32)
    operations = step_operations(config, 4, 32)
    assert found["gflops"] == pytest.approx(operations / found["step_ms"] / 1e6, rel=1e-2)
    assert found["matmul_share"] == pytest.approx(found["gflops"] / found["matmul_gflops"], rel=2e-2)
    assert 0 <= found["overhead"] < 1
    assert found["peak_gb"] > 0.03
    assert found["threads"] == (1 if "sync" in flags else len(os.sched_getaffinity(0)))
    assert (found["batch_size"], found["sequence_length"], found["sequence_chunk"]) == (4, 32, 16)
    assert found["batch_chunk"] in (1, 2, 4)  # what the machine chose
    graph = TrainingStep(
        config, (4, 32), (found["batch_chunk"], 16), job_of().optimizer, grain=found["grain"], in_place=True
    ).runnable.graph
    assert found["tasks"] == sum(not is_leaf(node) for node in graph.values())
    assert found["versions"]["numpy"] == np.__version__


def test_what_a_person_reads(capsys):
    out = printed(capsys, *FLAGS, "--grain", "block", "--batch-chunk", "2")
    rows = dict(line.split(maxsplit=1) for line in out.splitlines())
    for name in ("step", "forward", "backward", "update", "overhead", "tokens", "arithmetic", "memory"):
        assert float(rows[name].split()[0].strip("%").replace(",", "")) > 0
    assert rows["batch"] == "4 x 32 tokens"
    assert rows["chunks"].startswith("2 of 2 x 32 (auto, for ")
    assert "(grain block)" in rows["tasks"]


def test_kernels_of_worker_processes_are_counted():
    job = job_of(scheduler="local", threads=1)
    with open_scheduler("local", 1) as scheduler:
        found = measure(Steps(job, scheduler, 0), warmup=1, timed=2, recorded=1)
    assert found.threads == 1
    assert min(found.busy.values()) > 0
    assert 0 < found.idle < 1
    assert found.peak > machine.resident_memory()  # this process, and the worker


def test_steps_that_overlap_are_timed_by_the_window():
    job = job_of(barrier="none", window=2, grain="block", batch_chunk=2, sequence_chunk=12)
    with open_scheduler("threads", 2) as scheduler:
        steps = Steps(job, scheduler, 0)
        assert len(steps.run(3)) == 2
        assert len(steps.losses) == 4
    with open_scheduler("sync") as scheduler:
        same = job_of(scheduler="sync", grain="block", batch_chunk=2, sequence_chunk=12)  # a library's sums follow them
        alone = Steps(same, scheduler, 0)
        alone.run(4)
    assert alone.losses == steps.losses


def test_batches_depend_on_seed_and_step_alone():
    job = job_of()
    tokens, targets = random_batch(job, 3, 7)
    assert tokens.shape == targets.shape == (4, 12)
    np.testing.assert_array_equal(tokens[:, 1:], targets[:, :-1])
    np.testing.assert_array_equal(random_batch(job, 3, 7)[0], tokens)
    assert not np.array_equal(random_batch(job, 3, 8)[0], tokens)
    assert not np.array_equal(random_batch(job, 4, 7)[0], tokens)
    assert max(random_batch(job, 3, step)[0].max() for step in range(20)) == SMALL.vocabulary - 1


def test_operations_of_gpt2():
    values = (
        50257 * 768 + 12 * 12 * 768 * 768
    )  # unembedding; queries, keys, values, projection and 8 C² of feed-forward
    assert parameter_count(preset("gpt2"), multiplied=True) == values
    products = 2 * values + 12 * 2 * 2 * 768 * (64 + 1) // 2  # a token's, forward
    assert step_operations(preset("gpt2"), 4, 64) == 3 * 4 * 64 * products


def test_the_peak_of_a_process_can_be_reset():
    program = (
        "import numpy as np\nfrom daskgpt.instruments.machine import *\nbefore = resident_memory()\n"
        "large = np.ones(1 << 26, np.uint8)\ndel large\nfirst = peak_memory()\n"
        "print(before, first, reset_peak_memory(), peak_memory())"
    )
    before, first, possible, after = subprocess.check_output([sys.executable, "-c", program], text=True).split()
    assert int(first) > int(before) + (1 << 26) * 0.9
    if possible == "True":
        assert int(after) < int(first) - (1 << 26) * 0.9


def test_other_programs_are_noticed():
    spinning = subprocess.Popen([sys.executable, "-c", "while True: pass"])
    try:
        assert machine.busy_cores(1.0) > 0.2
    finally:
        spinning.kill()
        spinning.wait()


# What a step will take.

PARAMETER_BYTES = 4 * (32 * 16 + 16 * 16 + 2 * (32 + 48 * 17 + 16 * 17 + 32 + 64 * 17 + 16 * 65) + 32)
# A token's values, in channels: the embedding, the last layernorm twice (it is computed again in the backward pass),
# and two gradients. In a block, forward: layernorm 1, qkv 3, attention 1, projection 1, sum 1, layernorm 1, hidden 4,
# gelu 4, projection 1, sum 1; as many backward; layernorms and gelu again 6. One log-sum-exp a head, the loss, its
# gradient, and the logits' gradient.
ACTIVATION_BYTES = 4 * (48 * (16 * (5 + 2 * 42) + 2 * 2 + 2 + 32) + 1)


@pytest.mark.parametrize("grain", ["kernel", "block", "chunk"])
def test_bytes_of_a_step_are_those_counted_by_hand(grain):
    found = predict(job_of(grain=grain))
    first_gradient = 4 * 32 * 16  # the sum of the unembedding's chunks, which the embedding's goes on from
    assert dict(found.made) == {
        "parameters": PARAMETER_BYTES,
        "gradients": PARAMETER_BYTES + first_gradient,
        "optimizer": 2 * PARAMETER_BYTES,
        "activations": ACTIVATION_BYTES,
    }
    assert found.grain == grain
    assert 3 * PARAMETER_BYTES < found.peak < sum(found.made.values())


def test_out_of_place_the_new_state_comes_beside_the_old():
    found = predict(job_of(scheduler="local"))
    assert found.made["parameters"] == 2 * PARAMETER_BYTES
    assert found.made["optimizer"] == 4 * PARAMETER_BYTES
    assert found.peak > 6 * PARAMETER_BYTES


@pytest.mark.parametrize(
    "dataflow",
    [
        {"grain": "block"},
        {"grain": "kernel", "sequence_chunk": 16},
        {"grain": "chunk", "batch_chunk": 8},
        {"grain": "block", "barrier": "phase"},
        {"grain": "block", "barrier": "none", "window": 3},
        {"grain": "block", "precision": "bfloat16"},
        {"grain": "block", "batch_chunk": 1, "groups": 8},
    ],
    ids=str,
)
def test_the_predicted_peak_is_that_of_the_arrays_of_a_step(dataflow):
    # So wide that arrays, not the 1.2 MB of Python's own objects for a run's tasks, are what is compared.
    job = job_of(replace(SMALL, channels=256, positions=64), 8, 64, scheduler="sync", **dataflow)
    with open_scheduler("sync") as scheduler:
        Steps(job, scheduler, 0).run(1)  # what is imported, compiled and kept
        tracemalloc.start()
        steps = Steps(job, scheduler, 0)
        graph = tracemalloc.get_traced_memory()[0] - state_bytes(steps.state)
        tracemalloc.reset_peak()
        steps.run(1)
        peak = tracemalloc.get_traced_memory()[1] - graph
        tracemalloc.stop()
    assert predict(job).peak == pytest.approx(peak, rel=0.1)


def state_bytes(state):
    return sum(value.nbytes for pack in state.packs for value in pack)


def test_at_bfloat16_matrices_are_held_packed_as_well():
    config = replace(SMALL, channels=64, positions=64)
    job = job_of(config, 8, 64, scheduler="sync", precision="bfloat16")
    with open_scheduler("sync") as scheduler:
        state = Steps(job, scheduler, 0).state
    found = predict(job)
    assert found.made["parameters"] + found.made["optimizer"] == state_bytes(state)
    assert found.made["optimizer"] < 2 * found.made["parameters"]


def test_the_table_of_a_plan(capsys):
    out = printed(capsys, *FLAGS, "--plan", "--grain", "chunk", "--batch-chunk", "2")
    lines = out.splitlines()
    assert all(len(line) <= 80 for line in lines)
    names = [line.split()[0] for line in lines if not line.startswith(" ")]
    assert names[:6] == ["model", "batch", "chunks", "precision", "grain", "tasks"]
    assert names[6:] == ["parameters", "gradients", "optimizer", "activations", "peak", "largest", "memory", "nothing"]
    text = " ".join(out.split())
    for words in ("parameters: 2 blocks, 2 heads, 32 channels", "4 x 32 tokens", "2 of 2 x 32", "grain chunk"):
        assert words in text
    assert lines[-1] == "nothing was run"
    job = job_of(grain="chunk", batch_chunk=2)
    found = predict(job)
    assert f"{found.peak / 1e6:,.1f} MB" in describe_prediction(job, found)
    assert f"{found.largest_bytes / 1e6:,.1f} MB of results, {found.largest_task}" in describe_prediction(job, found)


@pytest.mark.parametrize(
    ("flags", "grain", "sentence"),
    [
        ({}, "block", "block is assumed (auto: a run settles it in its first step, from measured kernel times)"),
        ({"barrier": "layer"}, "kernel", "kernel (auto: with barrier layer a task is one kernel)"),
        (
            {"scheduler": "local"},
            "chunk",
            "chunk (auto: on a cluster a task of one block would cost more than it does)",
        ),
    ],
)
def test_a_plan_says_which_grain_it_counts_with(flags, grain, sentence):
    job = job_of(**flags)
    found = predict(job)
    assert (found.grain, found.tasks) == (grain, predict(job_of(grain=grain, **flags)).tasks)
    assert f"grain {sentence} tasks {found.tasks:,} a step" in " ".join(describe_prediction(job, found).split())


def test_the_grain_of_a_plan_is_that_of_the_run_where_nothing_is_measured():
    with open_scheduler("sync") as scheduler:
        steps = Steps(job_of(barrier="layer", scheduler="sync"), scheduler, 0)
    assert predict(job_of(barrier="layer", scheduler="sync")).grain == steps.step.grain == "kernel"


def test_a_plan_says_whether_its_peak_fits(tmp_path, monkeypatch):
    monkeypatch.setattr(machine_memory, "OWN_CGROUPS", tmp_path / "cgroup")
    monkeypatch.setattr(machine_memory, "CGROUPS", tmp_path)
    physical, whose = machine_memory.memory_limit()
    assert whose == "this machine"
    assert physical == os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    resident = machine.resident_memory()
    assert fits(job_of(), 0).startswith("fits: 0 MB and ")
    assert fits(job_of(), physical - resident // 2).startswith("DOES NOT FIT: ")
    assert "of 4 processes" in fits(job_of(scheduler="local", threads=3), 0)
    assert fits(job_of(scheduler="tcp://host:1"), 10**9).startswith("1.0 GB are needed by the cluster's workers")


def control_groups(tmp_path, monkeypatch, own, files):
    """Let this process be in the control groups of some files."""
    (tmp_path / "cgroup").write_text(own)
    for name, text in files.items():
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(text)
    monkeypatch.setattr(machine_memory, "OWN_CGROUPS", tmp_path / "cgroup")
    monkeypatch.setattr(machine_memory, "CGROUPS", tmp_path)


@pytest.mark.parametrize(
    ("own", "files", "limit"),
    [
        ("0::/a/b\n", {"a/b/memory.max": "max", "a/memory.max": "1000000", "memory.max": "2000000"}, 1_000_000),
        ("0::/of/the/host\n", {"memory.max": "3000000"}, 3_000_000),
        ("2:cpu:/x\n1:memory:/a\n", {"memory/a/memory.limit_in_bytes": "4000000", "memory.max": "5"}, 4_000_000),
        ("1:memory:/a\n", {"memory/a/memory.limit_in_bytes": str(2**63 - 4096)}, None),
    ],
)
def test_a_container_limits_memory(tmp_path, monkeypatch, own, files, limit):
    control_groups(tmp_path, monkeypatch, own, files)
    physical = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    assert machine_memory.memory_limit() == ((limit, "this container") if limit else (physical, "this machine"))


@pytest.mark.parametrize(
    ("own", "files", "left"),
    [
        ("0::/\n", {"meminfo": "MemFree: 1 kB\nMemAvailable: 70 kB\n"}, 70 << 10),
        ("0::/\n", {"meminfo": "MemFree: 1 kB\n"}, None),
        ("0::/\n", {"meminfo": "MemAvailable: 70 kB\n", "memory.max": "9000", "memory.current": "2000"}, 7000),
        (
            "0::/a\n",
            {
                "meminfo": "MemAvailable: 70 kB\n",
                "memory.max": "9000",
                "memory.current": "2000",
                "a/memory.max": "5000",
                "a/memory.current": "2000",
                "a/memory.stat": "anon 1\ninactive_file 500\n",
            },
            3500,
        ),
        ("0::/\n", {"meminfo": "MemAvailable: 70 kB\n", "memory.max": "9000", "memory.current": "9900"}, 0),
    ],
)
def test_memory_that_is_free_now_is_what_machine_and_container_leave(tmp_path, monkeypatch, own, files, left):
    control_groups(tmp_path, monkeypatch, own, files)
    monkeypatch.setattr(machine_memory, "MEMORY_INFO", tmp_path / "meminfo")
    assert machine_memory.available_memory() == left


def test_a_plan_of_a_model_that_fits_no_memory_compiles_and_runs_nothing(tmp_path):
    command = [sys.executable, "-m", "daskgpt.bench", "--plan", "--preset", "gpt2", "--batch-size", "4096"]
    environment = os.environ | {"NUMBA_CACHE_DIR": str(tmp_path)}
    result = subprocess.run(command, capture_output=True, text=True, env=environment)
    assert result.returncode == 0, result.stderr
    rows = {line.split()[0]: line.split()[1:] for line in result.stdout.splitlines() if not line.startswith("  ")}
    assert rows["optimizer"] == ["995.8", "MB", "995.8", "MB"]
    assert float(rows["peak"][0].replace(",", "")) > 1e5  # 100 GB
    assert rows["memory"][:3] == ["DOES", "NOT", "FIT:"]
    compiled = {path.name.split(".")[0] for path in tmp_path.rglob("*") if path.is_file()}
    assert compiled <= {"floating_point"}  # what sets a thread's rounding of subnormal numbers


def test_training_has_a_plan_too(capsys, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "text.txt").write_text("to be or not to be " * 500)
    out = printed(capsys, "--plan", "--data", "text.txt", *SIZE, main=train_main)
    assert "encoding      bytes, 257 ids" in out.splitlines()
    assert out.splitlines()[-1] == "nothing was run"
    assert [path.name for path in tmp_path.iterdir()] == ["text.txt"]


# The same step in other programs.


class Numbers:
    """A side that takes what it is told to take, one step after another."""

    def __init__(self, seconds, order):
        self.seconds, self.order, self.losses = list(seconds), order, []

    def run(self, count):
        self.order.append(self)
        return [self.seconds.pop(0) for _ in range(count)]

    def cpu(self):
        return {}


def test_turns_alternate_and_are_compared_in_pairs(monkeypatch):
    monkeypatch.setattr("daskgpt.instruments.compare.turns.DISTURBED", float("inf"))
    order = []
    ours, theirs = Numbers([1, 3, 4, 4, 9, 9], order), Numbers([4, 4, 1, 1, 9, 9], order)
    pairs = alternate(ours, theirs, 3, 2)
    assert order == [ours, theirs, theirs, ours, ours, theirs]
    assert [(pair.ours, pair.theirs) for pair in pairs] == [(2, 4), (4, 1), (9, 9)]
    found = PairedTurns("other", pairs, 2, 3, (3 * 10**9, 10**9), (5.5, 5.5), 2)
    assert (found.ratio.median, found.ratio.least, found.ratio.largest) == (1, 0.5, 4)
    assert found.record()["ratio"] == 1
    assert found.record()["ours_ms"] == 4000
    assert found.record()["ours_peak_gb"] == 3
    rows = found.describe().splitlines()
    assert rows[0] == "3 turns of 2 steps each, 2 threads"
    assert rows[2].split()[:3] == ["daskgpt", "4,000.0", "2,000.0"]
    assert rows[-1].split()[-3:] == ["1.000", "0.500", "4.000"]


def test_turns_in_which_other_programs_run_are_left_out():
    calm, disturbed = Pair(1, 2, 0.1), Pair(1, 20, 0.9)
    assert undisturbed([calm, disturbed, calm], 2) == [calm, calm]
    assert undisturbed([disturbed, disturbed, calm], 3) == [disturbed, disturbed, calm]
    found = PairedTurns("other", [disturbed, calm], 1, 2, (0, 0), (1, 1), 2)
    assert found.disturbed == 1
    assert "WARNING: other programs ran in 1 of these turns: the ratio says little" in found.describe()
    assert "1 more left out" in PairedTurns("other", [calm], 1, 2, (0, 0), (1, 1), 2).describe()


def test_a_turn_of_short_steps_has_many():
    assert [steps_of_a_turn(*seconds) for seconds in ((0.01, 0.02), (0.4, 0.4), (0.01, 0.5), (3.0, 9.0))] == [
        50,
        2,
        10,
        1,
    ]


def llmc_program(tmp_path, blocks=2, steps=1000):
    path = tmp_path / "train_gpt2"
    path.write_text(
        f"#!{sys.executable}\n"
        "import os, time\n"
        f"print('[GPT-2]\\nmax_seq_len: 16\\nnum_layers: {blocks}\\nnum_heads: 2\\nchannels: 16\\nval loss 3.4')\n"
        f"for step in range({steps}):\n"
        "    took = 900 if step == 0 else 100 + step\n"
        "    print(f'step {step}: train loss 3.{step:06d} (took {took}.250000 ms)', flush=True)\n"
        "    time.sleep(0.01)\n"
        "    open('threads', 'w').write(os.environ['OMP_NUM_THREADS'])\n"
    )
    path.chmod(0o755)
    return path


def test_llmc_is_read_and_stopped(tmp_path):
    lines, peak = run_program(llmc_program(tmp_path), 3, SMALL, 4)
    assert lines == [(3.0, 0.90025), (3.000001, 0.10125), (3.000002, 0.10225), (3.000003, 0.10325)]
    assert peak > 1e6
    assert (tmp_path / "threads").read_text() == "3"


def test_a_comparison_with_llmc(tmp_path):
    job = job_of(scheduler="sync")
    with open_scheduler("sync") as scheduler:
        found = compare_llmc(Steps(job, scheduler, 0), llmc_program(tmp_path), 1, 3)
    assert found.theirs.median == 0.10225
    assert found.first_losses[0] == pytest.approx(np.log(29), abs=0.1)
    assert found.first_losses[1] == 3.0
    assert len(found.pairs) == 2


def test_llmc_programs_that_do_not_fit(tmp_path):
    with pytest.raises(
        ValueError,
        match="bench: both programs must train a model of one size; got blocks=2, llm.c's blocks=5. Give --blocks 5.",
    ):
        run_program(llmc_program(tmp_path, blocks=5), 1, SMALL, 2)
    with pytest.raises(
        RuntimeError,
        match="bench: llm.c's program must print 4 steps; got steps=2. "
        "Start it by hand in its folder and see what is missing.",
    ):
        run_program(llmc_program(tmp_path, steps=2), 1, SMALL, 4)
    with pytest.raises(
        FileNotFoundError,
        match="bench: llm.c's program must be a file; got path=nowhere. Compile train_gpt2 and give its path.",
    ):
        bench.main([*FLAGS, "--against", "llm.c", "nowhere"])


@pytest.mark.parametrize("name", ["torch", "torch-ddp"])
def test_without_torch_the_error_says_how_to_install_it(monkeypatch, name):
    monkeypatch.setitem(sys.modules, "torch", None)  # how Python marks a module that cannot be imported
    with pytest.raises(RuntimeError) as error:
        bench.main(["--against", name])
    assert str(error.value) == (
        f"bench: --against {name} needs PyTorch; got torch=not installed. Install it: pip install 'daskgpt[compare]'."
    )


BAD = {
    "name": (
        ["--against", "tinygrad"],
        "bench: --against must be torch, torch-ddp, or llm.c and the path of its program; got against=tinygrad. "
        "Try --against torch.",
    ),
    "path": (
        ["--against", "llm.c"],
        "--against must be torch, torch-ddp, or llm.c and the path of its program; got against=llm.c.",
    ),
    "torch": (
        ["--torch-bf16"],
        "bench: --torch-compile and --torch-bf16 must come with --against torch or torch-ddp; got against=none. "
        "Add it.",
    ),
    "steps": (["--steps", "0"], "BenchConfig: steps must be at least 1; got steps=0. Give 1 or more."),
    "positions": (["--positions", "8"], "a sequence must not be longer than the model's positions"),
}


@pytest.mark.parametrize("name", BAD)
def test_bad_input_is_found_before_anything_runs(name):
    arguments, message = BAD[name]
    with pytest.raises(ValueError) as error:
        bench.main(arguments)
    assert message in str(error.value)


def test_first_losses_must_agree():
    check_losses((5.0, 5.0009), "float32")
    check_losses((5.0, 5.04), "bfloat16")
    for theirs in (5.002, float("nan")):
        with pytest.raises(RuntimeError) as error:
            check_losses((5.0, theirs), "float32")
        assert f"find the same first loss, to 0.001; got daskgpt=5.000000, torch={theirs:.6f}." in str(error.value)


@pytest.mark.skipif(NO_TORCH, reason="PyTorch is not installed: pip install 'daskgpt[compare]'")
@pytest.mark.parametrize("bf16", [False, True])
def test_torch_trains_the_same_model(bf16, tmp_path):
    job = job_of(replace(SMALL, channels=32), 4, 16, grain="block")
    with open_scheduler("threads", 2) as scheduler:
        steps = Steps(job, scheduler, 0)
        found = compare_torch(steps, TorchOptions(bf16=bf16), 1, 2)
    assert abs(found.first_losses[0] - found.first_losses[1]) < (5e-2 if bf16 else 1e-5)
    assert min(found.ours.least, found.theirs.least) > 0
    assert min(found.peaks) > 0
