"""Which grain a run's steps have: what the flag says, or what the kernel times of the first step lead to."""

from __future__ import annotations

from collections.abc import Iterable, Mapping

from daskgpt.graph.grain import GRAINS
from daskgpt.graph.nodes import Key
from daskgpt.graph.spans import Span
from daskgpt.training.grouping import groups_of
from daskgpt.training.step import TrainingStep

# Mean seconds of a task from which on little is lost between tasks: each costs the threaded scheduler 0.1 to 0.2 ms,
# most are shorter than the mean, and a thread may wait for the last one. (gpt2, 4 x 64 tokens, on two cores: 6 % of
# the threads' time with tasks of 18 ms, 2.5 % with 100 ms.)
LONG_ENOUGH = 25e-3
# Tasks of single kernels are for looking at: merging those of one chunk costs no parallelism, and separate ones are
# ordered so that about a quarter more memory is held.
MERGED_GRAINS = GRAINS[GRAINS.index("segment") :]
# Where Dask's scheduler schedules each task, one costs 2 to 4 ms, whatever it does.
SCHEDULED = "block"


class GrainChoice:
    """The choice of one run.

    first   the grain of its first step
    open    whether that step is still to be measured; no step overlaps with it then
    """

    def __init__(self, grain: str, barrier: str, in_place: bool) -> None:
        self.first, self.open = grain, False
        if grain != "auto":
            return
        if barrier == "layer":
            # Fork-join means a wait after each layer, which a task of several layers would hide.
            self.first = "kernel"
        elif in_place:
            self.first, self.open = MERGED_GRAINS[0], True
        else:
            # The packs of a cluster's state follow the grain: it is there from the start.
            self.first = SCHEDULED

    def settle(self, step: TrainingStep, spans: Iterable[Span], threads: int) -> str:
        """Give the step the finest merged grain whose tasks last long enough; say what was found.

        spans   of the kernel calls of one step

        Where there are more threads than chunks, updates have to run beside the backward pass: no chunk is one task.
        """
        self.open = False
        means = mean_seconds(step, spans, MERGED_GRAINS if step.chunks >= threads else MERGED_GRAINS[:-1])
        enough = [grain for grain, mean in means.items() if mean >= LONG_ENOUGH]
        step.set_grain(enough[0] if enough else list(means)[-1])
        return (
            f"{step.grain}, tasks of {means[step.grain] * 1e3:.1f} ms ("
            + ", ".join(f"{grain} {mean * 1e3:.1f}" for grain, mean in means.items())
            + ")"
        )


def mean_seconds(step: TrainingStep, spans: Iterable[Span], grains: Iterable[str]) -> Mapping[str, float]:
    """Grain -> mean seconds of a task, from kernel times."""
    seconds: dict[Key, float] = {}
    for span in spans:
        seconds[span.key] = seconds.get(span.key, 0.0) + span.end - span.start
    means: dict[str, float] = {}
    for grain in grains:
        group_of = groups_of(step.recorded.unmerged, grain, updates=True, apart=step.apart)
        means[grain] = sum(seconds.values(), 0.0) / len({group_of(key) or key for key in seconds})
    return means
