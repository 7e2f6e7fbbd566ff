"""Several timelines on one page, one under the other on one time scale, so that what is longer looks longer."""

from __future__ import annotations

from collections.abc import Mapping
from html import escape
from typing import Any

from bokeh.embed import file_html
from bokeh.layouts import column
from bokeh.models import Div
from bokeh.resources import INLINE

from daskgpt.instruments.timeline.events import Timeline
from daskgpt.instruments.timeline.page import HELP, lanes_of, time_axis
from daskgpt.instruments.timeline.summary import summarise


def page_of_several(timelines: Mapping[str, Timeline], title: str) -> str:
    """The HTML: the lanes of each timeline under its name and numbers. Zooming, moving and hiding act on all of them.

    Errors   ValueError where one has no events
    """
    axis = time_axis(list(timelines.values()))
    plots = [lanes_of(timeline, axis, "", legend=number == 0) for number, timeline in enumerate(timelines.values())]
    for plot in plots[1:]:
        _hide_together(plots[0], plot)
    plots[-1].xaxis.axis_label = "time (ms), the same for all"
    parts: list[Any] = [_text(f"<h2 style='margin: 4px 0'>{escape(title)}</h2>{HELP}")]
    for plot, (name, timeline) in zip(plots, timelines.items()):
        parts += [_text(f"<b>{escape(name)}</b>: {escape(in_brief(timeline))}"), plot]
    return str(file_html(column(*parts, sizing_mode="stretch_width"), INLINE, title))


def in_brief(timeline: Timeline) -> str:
    """A timeline in one line."""
    found = summarise(timeline)
    return (
        f"{found.wall * 1e3 / found.steps:,.2f} ms a step; kernels run {found.kernel_share:.0%} of the threads' time; "
        f"two or more layers at once {found.overlap:.0%}, steps {found.steps_overlap:.0%}"
    )


def _text(html: str) -> Div:
    """Above a plot, not its title: it wraps where the page is narrow."""
    return Div(text=f"<div style='font-size: 14px'>{html}</div>", sizing_mode="stretch_width")


def _hide_together(first: Any, other: Any) -> None:
    """What the legend of the first plot hides is hidden in the other as well."""
    for renderer in other.renderers:
        own = [candidate for candidate in first.renderers if candidate.name and candidate.name == renderer.name]
        if own:
            own[0].js_link("visible", renderer, "visible")
