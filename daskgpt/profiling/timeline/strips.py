"""A timeline as strips of color, a strip a lane: small enough for a notebook, whatever the number of kernel calls."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping
from html import escape
from itertools import groupby

from daskgpt.profiling.timeline.events import Timeline, color_of

COLUMNS, LANE, GAP, LETTERS, LINE = 700, 22, 4, 110, 24  # pixels


def svg_strips(timeline: Timeline, *, end: float = 0.0, named: bool = True) -> str:
    """Each lane's time, cut into columns: the color of the layer and pass that took most of a column, or none.

    end     seconds that the whole width stands for, 0 = what the timeline has
    named   whether the names of the lanes stand at the left
    """
    own = max(window.end for window in timeline.windows)
    end, left = end or own, LETTERS if named else 0
    height = len(timeline.lanes) * (LANE + GAP)
    parts = []
    for number, name in enumerate(timeline.lanes):
        top = number * (LANE + GAP)
        parts.append(f'<text x="0" y="{top + 15}" font-size="11">{escape(name)}</text>' if named else "")
        width = COLUMNS * own / end
        parts.append(f'<rect x="{left}" y="{top}" width="{width:.0f}" height="{LANE}" fill="#eef0f3"/>')
        for color, first, count in _runs(_columns(timeline, number, end)):
            place = f'x="{left + first}" y="{top}" width="{count}" height="{LANE}"'
            parts.append(f'<rect {place} fill="{color}"/>')
    size = f'viewBox="0 0 {left + COLUMNS} {height}" width="{left + COLUMNS}" height="{height}"'
    style = 'style="max-width: 100%; height: auto"'
    return f'<svg xmlns="http://www.w3.org/2000/svg" {size} {style}>{"".join(parts)}</svg>'


def svg_one_under_the_other(timelines: Mapping[str, Timeline]) -> str:
    """Several timelines by name as a picture of its own, strips on one time scale, with a legend: what is longer looks
    longer.
    """
    end = max(window.end for timeline in timelines.values() for window in timeline.windows)
    parts, top = ['<rect width="100%" height="100%" fill="white"/>'], LINE
    for name, timeline in timelines.items():
        seconds = sum(window.end - window.start for window in timeline.windows) / len(timeline.steps)
        told = f"{name}: {seconds * 1e3:,.1f} ms a step"
        parts.append(f'<text x="0" y="{top}" font-size="14" font-weight="bold">{escape(told)}</text>')
        parts.append(f'<g transform="translate(0, {top + 2 * GAP})">{svg_strips(timeline, end=end)}</g>')
        top += len(timeline.lanes) * (LANE + GAP) + 3 * GAP + LINE
    x = 0
    for layer in sorted({event.layer for timeline in timelines.values() for event in timeline.events}):
        parts.append(f'<rect x="{x}" y="{top - 10}" width="11" height="11" fill="{color_of(layer, False)}"/>')
        parts.append(f'<text x="{x + 15}" y="{top}" font-size="12">{escape(layer)}</text>')
        x += 30 + 7 * len(layer)
    parts.append(f'<text x="{x}" y="{top}" font-size="12">dark: backward</text>')
    width, height = LETTERS + COLUMNS, top + 2 * GAP
    size = f'viewBox="0 0 {width} {height}" width="{width}" height="{height}"'
    return f'<svg xmlns="http://www.w3.org/2000/svg" {size} font-family="sans-serif">{"".join(parts)}</svg>'


def svg_legend(timeline: Timeline) -> str:
    """The colors of the layers."""
    layers = sorted({event.layer for event in timeline.events})
    square = '<span style="display: inline-block; width: 11px; height: 11px; background: {}"></span> {}'
    return " &nbsp; ".join(square.format(color_of(layer, False), escape(layer)) for layer in layers)


def _columns(timeline: Timeline, lane: int, end: float) -> list[str]:
    """The color of each column, "" where the lane ran no kernel for most of it."""
    taken = [defaultdict[str, float](float) for _ in range(COLUMNS)]
    wide = end / COLUMNS
    for event in timeline.events:
        if event.lane != lane:
            continue
        for column in range(int(event.start / wide), min(int(event.end / wide) + 1, COLUMNS)):
            taken[column][event.color] += min(event.end, (column + 1) * wide) - max(event.start, column * wide)
    return [max(own, key=own.__getitem__) if sum(own.values()) > wide / 2 else "" for own in taken]


def _runs(colors: list[str]) -> list[tuple[str, int, int]]:
    """Color, first column and how many, of columns that follow one another."""
    found, at = [], 0
    for color, group in groupby(colors):
        count = len(list(group))
        found += [(color, at, count)] if color else []
        at += count
    return found
