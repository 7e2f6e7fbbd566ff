"""What a timeline shows over time besides its events: memory, and how many layers run at once."""

from __future__ import annotations

from itertools import groupby

from daskgpt.instruments.timeline.events import Timeline, different_at_once

Curve = list[tuple[float, int]]


def live_bytes(timeline: Timeline) -> Curve:
    """Bytes of activations and gradients that are still to be read: (time, bytes from then on).

    A kernel's result counts from its end to the end of its last reader in the same step. Parameters and moments, which
    are there all the time, do not count; nor what a kernel needs while it runs.
    """
    ends = {(event.step, event.key): event.end for event in timeline.events}
    changes: list[tuple[float, int]] = []
    for event in timeline.events:
        readers = timeline.readers.get(event.key, ()) if event.phase != "update" else ()
        last = max((ends.get((event.step, key), event.end) for key in readers), default=event.end)
        if last > event.end and event.bytes:
            changes += [(event.end, event.bytes), (last, -event.bytes)]
    return _summed(changes)


def layers_at_once(timeline: Timeline) -> Curve:
    """How many different layers (of the network, forward and backward apart, all updates as one) run at once."""
    return different_at_once([(event.start, event.end, event.stage) for event in timeline.events])


def _summed(changes: list[tuple[float, int]]) -> Curve:
    total, curve = 0, []
    for time, own in groupby(sorted(changes), key=lambda change: change[0]):
        total += sum(change for _, change in own)
        curve.append((time, total))
    return curve
