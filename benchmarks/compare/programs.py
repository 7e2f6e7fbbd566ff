"""Programs that take turns with the same steps: their times and ratios."""

from __future__ import annotations

import math
import textwrap
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import asdict, dataclass, field
from typing import Any

from records import Figure, figures_of

from compare.turns import Turn, disturbed
from daskgpt.config.errors import refusal, require
from daskgpt.config.model import CHOICES
from daskgpt.profiling.measure import Spread, TimedEngine
from daskgpt.profiling.timeline import is_message
from daskgpt.schedulers import machine
from daskgpt.training.job import Job

# Least length of a turn, whose first step finds the caches full of the other's data; and where that is not too long.
TURN_SECONDS, LONGEST_TURN = 0.5, 5.0
# Largest difference of the first losses, in nats: bfloat16 has 8 bits, and logits of some units.
LOSS_TOLERANCE = {"float32": 1e-3, "bfloat16": 5e-2}


@dataclass(frozen=True)
class WorkerTime:
    """Shares of the time of all workers' threads: in kernels, sending and waiting for messages, and the rest."""

    kernels: float
    messages: float
    rest: float

    @classmethod
    def of(cls, steps: TimedEngine, count: int) -> WorkerTime:
        """Of some further steps on a cluster, which are recorded."""
        timeline = steps.timeline(count)
        whole = len(timeline.lanes) * sum(window.end - window.start for window in timeline.windows)
        messages = sum(event.seconds for event in timeline.events if is_message(event.layer))
        kernels = sum(event.seconds for event in timeline.events) - messages
        return cls(kernels / whole, messages / whole, 1 - (kernels + messages) / whole)

    def describe(self) -> str:
        return f"{self.kernels:.1%} kernels, {self.messages:.1%} messages, {self.rest:.1%} between tasks"


@dataclass(frozen=True)
class Programs:
    """What programs took for the same steps.

    names     of the programs, as figures are called
    other     the program beside ours, as it is printed
    turns     those that count; `tried` with those in which other programs ran, where there were enough without
    peaks     bytes of memory, a program each
    losses    the first ones, before any update
    ratios    figure -> two programs, of whose times in each turn it is the ratio
    workers   where the workers' time went, in steps of their own; None without workers
    """

    names: tuple[str, ...]
    other: str
    turns: Sequence[Turn]
    tried: int
    peaks: tuple[int, ...]
    losses: tuple[float, ...]
    ratios: Mapping[str, tuple[str, str]] = field(default_factory=lambda: {"ratio": ("ours", "theirs")})
    workers: WorkerTime | None = None

    def step(self, name: str) -> Spread:
        """Mean seconds a step of each turn."""
        return Spread.of(turn.means[self.names.index(name)] for turn in self.turns)

    def ratio(self, one: str, other: str) -> Spread:
        """Of one program's mean step to the other's in the same turn: below 1 if it is faster."""
        return Spread.of(a / b for a, b in zip(self.step(one).values, self.step(other).values))

    def longest(self, name: str) -> float:
        """The longest step over the median of all."""
        index = self.names.index(name)
        steps = Spread.of(seconds for turn in self.turns for seconds in turn.seconds[index])
        return max(steps.values) / steps.median

    @property
    def counts(self) -> dict[str, int]:
        """Steps of a turn, turns that met other programs, and turns that were left out for that."""
        # Workers that share a batch make several steps at once, and have one time for them.
        steps = max(map(len, self.turns[0].seconds))
        left_out = self.tried - len(self.turns)
        return {"steps_a_turn": steps, "disturbed_turns": disturbed(self.turns), "left_out_turns": left_out}

    def figures(self) -> dict[str, Figure]:
        """For a record of measurements."""
        shares = asdict(self.workers) if self.workers else {}
        return {
            **figures_of({name: self.step(name) for name in self.names}, "ms", 1e3),
            **figures_of({name: self.ratio(*pair) for name, pair in self.ratios.items()}, ""),
            **{f"{name}_longest": Figure.single(self.longest(name), "") for name in self.names},
            **{f"{name}_peak": Figure.single(peak / 1e9, "GB") for name, peak in zip(self.names, self.peaks)},
            **{f"{name}_first_loss": Figure.single(loss, "nats") for name, loss in zip(self.names, self.losses)},
            **{f"workers_{name}": Figure.single(share, "") for name, share in shares.items()},
        }

    def describe(self) -> str:
        """For a person to read."""
        counts = self.counts
        lines = [f"{len(self.turns)} turns of {counts['steps_a_turn']} steps each; theirs: {self.other}"]
        if counts["left_out_turns"]:
            lines.append(f"{counts['left_out_turns']} more turns left out, in which other programs ran")
        if counts["disturbed_turns"]:
            ran = f"other programs ran in {counts['disturbed_turns']} of these turns"
            lines.append(f"WARNING: {ran}: the ratios say little")
        lines.append(f"{'':17} {'ms a step':>10} {'quartiles':>19} {'longest':>8} {'peak GB':>8} {'first loss':>11}")
        for name, peak, loss in zip(self.names, self.peaks, self.losses):
            low, middle, high = (f"{value * 1e3:,.1f}" for value in self.step(name).quartiles)
            row = f"{name:17} {middle:>10} {f'{low} .. {high}':>19} {self.longest(name):8.2f}"
            lines.append(f"{row} {peak / 1e9:8.2f} {loss:11.5f}")
        for pair in self.ratios.values():
            lines.append(f"{' / '.join(pair):17} {self.ratio(*pair).text('', 3):>30}   of a turn's times")
        if self.workers:
            lines.append(textwrap.fill(f"workers' time: {self.workers.describe()}", 80, subsequent_indent=" " * 4))
        return "\n".join(lines)


class OnWorkers(TimedEngine):
    """Steps on a cluster, of whose memory that of its workers counts."""

    def peak(self) -> int:
        return sum(self.scheduler.everywhere(machine.peak_memory))


class Apart:
    """A program that is in memory for its own turns only: it is opened for each, warms up, runs and is closed.

    Large models that train beside each other, though one waits while another one runs, may leave a machine so little
    memory that its system looks for some in every step.

    losses   of the newest turn, with those of warming up
    """

    def __init__(self, opened: Callable[[], AbstractContextManager[Any]], warmup: int) -> None:
        """warmup   steps of a turn before those that are timed"""
        self.opened, self.warmup = opened, warmup
        self.losses: list[float] = []
        self.most, self.used = 0, dict[tuple[str, int], float]()

    def run(self, count: int) -> list[float]:
        with self.opened() as side:
            side.run(self.warmup)
            side.reset_peak()
            seconds = side.run(count)
            self.losses = list(side.losses)
            self.most = max(self.most, side.peak())
            self.used |= side.cpu()
        return seconds

    def peak(self) -> int:
        return self.most

    def cpu(self) -> Mapping[tuple[str, int], float]:
        """Of its processes when they were last seen: most of them have ended."""
        return self.used


def steps_of_a_turn(faster: float, slower: float) -> int:
    """How many steps make a turn, from the seconds that one takes in the fastest and in the slowest program."""
    return max(1, min(math.ceil(TURN_SECONDS / faster), int(LONGEST_TURN / slower)))


def warm_up(sides: Sequence[Any], warmup: int) -> int:
    """Let all take some steps before peaks count; return how many steps make a turn of theirs."""
    fastest = [min(side.run(warmup)) for side in sides]
    for side in sides:
        side.reset_peak()
    return steps_of_a_turn(min(fastest), max(fastest))


def require_published(job: Job) -> None:
    """Errors   ValueError for layers from outside or another optimizer than AdamW: others cannot train it"""
    rule, advice = "other programs must be able to train the same", "Leave this choice out."
    choices = {name: getattr(job.config, name) for name in CHOICES}
    others = {name: row for name, row in choices.items() if ":" in row}
    if job.optimizer.optimizer != "adamw":
        others["optimizer"] = job.optimizer.optimizer
    require(not others, "against", rule, others, advice)


def check_losses(first: tuple[float, float], precision: str) -> None:
    """Errors   RuntimeError if two losses of the same model and tokens differ by more than the precision explains"""
    ours, theirs = first
    allowed = LOSS_TOLERANCE[precision]
    if not abs(ours - theirs) <= allowed:
        rule = f"both programs must find the same first loss, to {allowed:g}"
        got = f"daskgpt={ours:.6f}, theirs={theirs:.6f}"
        advice = "One of them computes another model; their files differ."
        raise refusal(RuntimeError, "against", rule, got, advice)
