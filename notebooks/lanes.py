"""Pictures of timelines, for the notebooks, which import this module from their folder."""

from __future__ import annotations

from collections.abc import Mapping

import matplotlib.pyplot as plt
from matplotlib.patches import Patch

from daskgpt.profiling.timeline import Timeline, color_of


def lanes(timelines: Mapping[str, Timeline]) -> None:
    """Draw a lane per thread, with a bar per kernel call, of timelines by name on one time scale.

    Colors are those of layers: bright forward, dark backward. Grey is time without a kernel.
    """
    rows = [(name, timeline, lane) for name, timeline in timelines.items() for lane in range(len(timeline.lanes))]
    _, axes = plt.subplots(figsize=(7, 1.3 + 0.35 * len(rows)), layout="constrained")
    for place, (_, timeline, lane) in enumerate(rows):
        events = [event for event in timeline.events if event.lane == lane]
        axes.broken_barh([(0, 1e3 * timeline.windows[-1].end)], (place - 0.4, 0.8), color="#eef0f3")
        spans = [(1e3 * event.start, 1e3 * event.seconds) for event in events]
        axes.broken_barh(spans, (place - 0.4, 0.8), facecolors=[color_of(event.kind) for event in events])
    names = [", ".join(filter(None, (name, timeline.lanes[lane].name))) for name, timeline, lane in rows]
    axes.set_yticks(range(len(rows)), names, fontsize=8)
    axes.set_xlabel("ms")
    axes.invert_yaxis()
    layers = sorted({event.layer for timeline in timelines.values() for event in timeline.events})
    patches = [Patch(color=color_of(layer), label=layer) for layer in layers]
    axes.figure.legend(handles=patches, loc="outside lower center", ncols=6, fontsize=7, frameon=False)
    plt.show()
