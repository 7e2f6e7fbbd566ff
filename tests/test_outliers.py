"""Steps that are left out: by limits that follow from the steps before, and to the same bits everywhere."""

from __future__ import annotations

import json
import math
import re

import numpy as np
import pytest
from command_lines import write_text
from conftest import SMALL, random_batch, random_parameters
from small_runs import fit, losses_of, stopping_at, tensors_of

import daskgpt
from daskgpt.config.run import OptimizerConfig
from daskgpt.model.precision import precision_of
from daskgpt.schedulers.addresses import open_scheduler
from daskgpt.training.outliers import LEAST, WINDOW, Outliers
from daskgpt.training.step import NO_LIMITS, Outcome, TrainingStep


def test_limits_are_those_of_the_steps_before():
    found = Outliers(3.0)
    losses = np.sin(np.arange(200)) + 5
    for step, loss in enumerate(losses):
        if step in (LEAST, 90, 199):
            known = losses[max(step - WINDOW, 0) : step]
            assert found.limits(step)[0] == pytest.approx(known.mean() + 3 * known.std(), rel=1e-12)
            assert found.limits(step)[1] == pytest.approx(2.0)
        found.note(step, Outcome(float(loss), 2.0))
    assert found.limits(LEAST - 1) == NO_LIMITS
    again = Outliers(3.0, json.loads(json.dumps(found.facts(150))))
    assert again.limits(150) == found.limits(150)
    found.note(70, Outcome(1e9, 1e9))  # made again after a loss: it counts once
    assert again.limits(150) == found.limits(150)
    assert Outliers(0.0, found.seen).limits(150) == NO_LIMITS


def test_an_outlier_counts_as_its_limit_and_what_stays_is_let_in():
    found = Outliers(6.0)
    for step in range(LEAST + 8):
        found.note(step, Outcome(5 + step % 2, 1.0))
    most = found.limits(step + 1)[0]
    found.note(step + 1, Outcome(1e9, 1.0))
    assert found.seen[-1][1] == most
    for later in range(step + 2, step + 60):
        if found.limits(later)[0] > 9:
            break
        found.note(later, Outcome(9.0, 1.0))
    else:
        pytest.fail("a loss of 9 is left out for ever")


@pytest.mark.parametrize("precision", ["float32", "bfloat16"])
@pytest.mark.parametrize("in_place", [True, False])
@pytest.mark.parametrize("limits", [(0.1, math.inf), (math.inf, 1e-6)])
def test_a_step_that_is_left_out_changes_nothing(random, limits, in_place, precision):
    parameters, batch = random_parameters(SMALL, random), random_batch(SMALL, random)
    before = {name: value.tobytes() for name, value in parameters.items()}
    optimizer = OptimizerConfig(skip_outliers=6.0, warmup=1)
    with open_scheduler("sync", 1) as scheduler:
        step = TrainingStep(SMALL, (4, 12), (2, 6), optimizer, precision_of(precision), in_place=in_place)
        handles, state = step.submit(scheduler, step.initial(parameters), batch, 10, limits)
        assert not step.outcome(scheduler, handles).made
        assert {name: value.tobytes() for name, value in state.parameters(scheduler).items()} == before
        handles, state = step.submit(scheduler, state, batch, 10)
        assert step.outcome(scheduler, handles).made
        after = {name: value.tobytes() for name, value in state.parameters(scheduler).items()}
        assert not {name for name in before if after[name] == before[name]}


@pytest.fixture(scope="module")
def text(tmp_path_factory):
    return write_text(tmp_path_factory.mktemp("text"))


STRICT = OptimizerConfig(skip_outliers=0.5, warmup=3, learning_rate=1e-6, final_learning_rate=1e-6)
STEPS = LEAST + 12


def skipped_in(run):
    records = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    return [record["step"] for record in records if record.get("skipped")]


def test_the_same_steps_are_left_out_whoever_runs_them_and_after_a_resume(text, tmp_path):
    fit(text, tmp_path / "whole", optimizer=STRICT, steps=STEPS)
    left_out = skipped_in(tmp_path / "whole")
    assert left_out
    assert min(left_out) >= LEAST
    fit(text, tmp_path / "none", optimizer=STRICT, steps=STEPS, dataflow={"barrier": "none", "batch_chunk": 1})
    fit(text, tmp_path / "run", optimizer=STRICT, steps=STEPS, on_step=stopping_at(LEAST + 5))
    daskgpt.fit(resume=tmp_path / "run", quiet=True)
    for other in ("none", "run"):
        assert skipped_in(tmp_path / other) == left_out
        assert losses_of(tmp_path / other) == losses_of(tmp_path / "whole")
        assert tensors_of(tmp_path / other) == tensors_of(tmp_path / "whole")


def test_replicas_leave_out_no_step(text):
    data = daskgpt.DataConfig(data=str(text), batch_size=4, sequence_length=16)
    message = (
        "train: steps are not left out where replicas make steps of their own; got skip_outliers=6.0, local_steps=2."
    )
    with pytest.raises(ValueError, match=re.escape(message)):
        daskgpt.fit(
            daskgpt.preset("tiny"), data, {"skip_outliers": 6}, local={"local_steps": 2, "replicas": 2}, quiet=True
        )
