"""Tests of lowered programs: which calls become native, where their values lie, and what cannot be traced."""

import os
import pickle
import subprocess
import sys
from collections import Counter
from dataclasses import replace
from pathlib import Path
from unittest.mock import Mock, patch

import numpy as np
import pytest
from custom_layers import squared_relu
from one_number import MODELS, Dials, bits_after_steps, start_values
from steps import run_step, state_of, step_of

from daskgpt.config.run import OptimizerConfig
from daskgpt.graph.calls import KernelCall, is_ours
from daskgpt.graph.lowering import Form, Lowered, NativeRun, lower
from daskgpt.graph.program import Call, calls_of
from daskgpt.graph.update_in_place import Update
from daskgpt.kernels import elementwise, linear
from daskgpt.kernels.bfloat16.rounding import to_bfloat16, words
from daskgpt.kernels.compilation import kernel
from daskgpt.kernels.tracing import Buffer, NotNative, Operand, Trace
from daskgpt.model.optimizer import Clipped
from daskgpt.model.precision import OfArrays
from daskgpt.schedulers.local import local_scheduler

CONFIG, BATCH = MODELS["odd"].config, MODELS["odd"].batch


def items_after_steps(config, chunk=(3, 20), grain="block", **optimizer):
    """Return the lowered calls of a step that ran twice."""
    step = step_of(config, BATCH, chunk, OptimizerConfig(**optimizer), in_place=True, grain=grain)
    state = state_of(step, start_values(config))
    tokens = np.arange(BATCH[0] * BATCH[1], dtype=np.int32).reshape(BATCH) % config.vocabulary
    for _ in range(2):
        _, state = run_step(local_scheduler("sync", 1), step, state, (tokens, tokens), 2)
    return [item for node in step.graph.values() if calls_of(node) for item in node.func.lowered.items]


@pytest.mark.parametrize(
    ("changes", "settings", "in_python"),
    [
        *(({}, {"grain": grain}, []) for grain in ("kernel", "chunk")),
        *(({}, {"grain": grain, "chunk": (2, 5)}, []) for grain in ("segment", "block")),
        *(({}, {"optimizer": name, "clip": 0.1}, ["norm"]) for name in ("adamw", "muon")),
        ({"norm": "rmsnorm", "activation": "relu2", "qk_norm": "rmsnorm"}, {}, []),
        ({"position": "rotary", "channels": 24, "activation": "swiglu", "bias": "none", "head": "untied"}, {}, []),
        ({"activation": "custom_layers:SQUARED_RELU"}, {}, ["squared_relu.forward", "squared_relu.backward"]),
        ({}, {"optimizer": "custom_layers:SIGN", "clip": 0.1}, ["norm", "sign"]),
    ],
    ids=str,
)
def test_only_norms_and_what_is_from_outside_stay_in_python(changes, settings, in_python):
    items = items_after_steps(replace(CONFIG, **changes), **settings)
    kinds = Counter(item.kind for item in items if not isinstance(item, NativeRun))
    assert kinds.keys() == set(in_python)
    assert kinds["norm"] == ("norm" in in_python)


def test_what_is_from_outside_stays_so_when_it_is_wrapped():
    """A kernel that Numba compiles takes arrays alone: traced, it would end the step."""
    for wrapped in (OfArrays, Clipped, Update, lambda kernel: OfArrays(Clipped(kernel))):
        assert is_ours(wrapped(elementwise.gelu))
        assert not is_ours(wrapped(squared_relu))


def test_arrays_of_another_form_are_refused_and_others_are_made_contiguous(random):
    """In the place of a result of a kernel: one of another shape or type, one without order, one that is read only."""
    x, lowered = random.standard_normal((2, 6, 8), np.float32), Lowered()
    kernel_call = KernelCall(elementwise.gelu, ["btH"], "bt", {}, ["btH"], {}, x.dtype)
    call = Call(("gelu.forward", 0), kernel_call.run, [0], 1, (0,))
    lower(lowered, [call], [0], {slot: Form(x.shape, x.dtype) for slot in (0, 1)}, [1])
    (run,) = lowered.items

    def result(array):
        slots = [array, None, *[None] * lowered.slots]
        assert not list(run.run(slots, False))
        return slots[1]

    read_only = x.copy()
    read_only.flags.writeable = False
    other_type = x.view(type("Array", (np.ndarray,), {}))
    checked = Mock(side_effect=run._check)
    with patch.object(run, "_check", checked):
        for array in (x, read_only, pickle.loads(pickle.dumps(x))):
            np.testing.assert_array_equal(result(array), elementwise.gelu(x))
        checked.assert_not_called()
        for array in (x.transpose(0, 2, 1).copy().transpose(0, 2, 1), other_type):
            np.testing.assert_array_equal(result(array), elementwise.gelu(x))
        assert checked.call_count == 2
    for array, word in ((x[:1], "shape"), (x.astype(np.float64), "float64"), (x.astype(">f4"), "type=>f4")):
        with pytest.raises(ValueError, match=word):
            result(array)
    # An array without axes keeps its shape beside one that is made contiguous.
    run.fetched.append(run.fetched[0]._replace(slot=1, form=Form((), x.dtype)))
    slots = [x.transpose(0, 2, 1).copy().transpose(0, 2, 1), number := np.zeros((), np.float32)]
    run._check(slots)
    assert slots[0].flags.c_contiguous
    assert slots[1] is number


def operand(trace, *shape):
    return Operand(trace, Buffer(shape, np.dtype("f4"), ("outside",)), shape, np.dtype("f4"))


@pytest.mark.parametrize(
    "use",
    [
        lambda x: x + 1,
        lambda x: np.exp(x),
        lambda x: np.concatenate([x, x]),
        lambda x: np.asarray(x),
        lambda x: x[0],
        lambda x: x.T,
        lambda x: float(x),
        lambda x: x.astype("f8"),
        lambda x: linear.backward_bias(x, total=np.empty(3, "f4"), accumulate=False),  # an array that it would keep
        lambda x: to_bfloat16(x),  # Numba looks for an attribute of its own first
        lambda x: words(x),  # which keeps what uses a thread's scratch memory from being native
    ],
)
def test_what_needs_the_numbers_of_an_operand_is_not_native(use):
    with pytest.raises(NotNative):
        use(operand(Trace(), 2, 3))


def last_of(result, numbers):
    result[0] = numbers[-1]


@pytest.mark.parametrize(("count", "native"), [(151, True), (152, False)])
def test_calls_of_too_many_words_stay_in_python(count, native):
    """A call has two words for what it returns, seven for an array of one axis, and one for each number."""
    written = kernel(f"L1 n{count}")(last_of)

    def call_of(x):
        written(result := np.empty(1, np.int64, like=x), tuple(range(count)))
        return result

    call_of.traceable = True
    lowered, form = Lowered(), Form((1,), np.dtype(np.int64))
    lower(lowered, [call := Call(("call", 0), call_of, [0], 1, (0,))], [0], {0: form, 1: form}, [1])
    (item,) = lowered.items
    assert (item is call, isinstance(item, NativeRun)) == (not native, native)
    if native:
        slots = [np.zeros(1, np.int64), None, *[None] * lowered.slots]
        assert not list(item.run(slots, False))
        assert slots[1].tolist() == [count - 1]


def test_arrays_of_another_kind_than_in_the_first_run_are_refused():
    step = step_of(CONFIG, BATCH, (3, 20), OptimizerConfig(), in_place=True)
    tokens, scheduler = np.zeros(BATCH, np.int32), local_scheduler("sync", 1)
    state = state_of(step, start_values(CONFIG))
    run_step(scheduler, step, state, (tokens, tokens), 1)
    (pack,) = state.packs
    for change in (np.asfortranarray, lambda array: array[:-1], lambda array: np.frombuffer(array.tobytes(), "f4")):
        changed = [change(array) if array.shape == (63, 21) else array for array in pack]
        with pytest.raises(ValueError, match="the array must have shape"):
            run_step(scheduler, step, replace(state, packs=[tuple(changed)]), (tokens, tokens), 1)


def test_no_native_call_reads_memory_that_it_has_not_written():
    """The C library fills each piece of memory before it hands it out, and when it is given back."""
    code = "from one_number import *; print(bits_after_steps(MODELS['odd'], 'float32', Dials((3, 10), window=1)))"
    support = Path(__file__).parent / "support"
    environment = os.environ | {"MALLOC_PERTURB_": "85", "PYTHONPATH": os.pathsep.join([str(support), *sys.path])}
    run = subprocess.run([sys.executable, "-c", code], env=environment, capture_output=True, text=True, check=True)
    assert run.stdout.strip() == bits_after_steps(MODELS["odd"], "float32", Dials((3, 10), in_place=False))


def test_ids_outside_of_the_vocabulary_are_refused_before_a_step():
    step = step_of(CONFIG, BATCH, (3, 20), OptimizerConfig(), in_place=True)
    good, bad = np.zeros(BATCH, np.int32), np.full(BATCH, CONFIG.vocabulary, np.int32)
    for batch in ((bad, good), (good, -1 + good)):
        with pytest.raises(ValueError, match="must be from 0"):
            step.inputs(batch, 0, 1)
