"""The files of timelines."""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from pathlib import Path

from daskgpt.config.errors import refusal, require
from daskgpt.config.files import replacing
from daskgpt.instruments.timeline.events import Timeline
from daskgpt.instruments.timeline.trace import trace_of

SUFFIXES = (".json", ".html")


def timeline_paths(path: str | Path) -> tuple[Path, Path]:
    """FILE.json and FILE.html, whether FILE is given with one of these endings or without."""
    path = Path(path)
    base = path.with_suffix("") if path.suffix in SUFFIXES else path
    trace, page = (base.with_name(base.name + suffix) for suffix in SUFFIXES)
    return trace, page


def is_bare(path: str) -> bool:
    """Whether a path is a name alone, without a folder: such a timeline goes into the folder of its run."""
    return path == Path(path).name and path != ".."


def check_timeline_path(path: str | Path) -> None:
    """Find out that a timeline cannot be written before anything runs; a bare name can, in the new folder of a run.

    Errors   ValueError where the path names a folder, a file stands where its folder should, or nothing can be written
    """
    if is_bare(str(path)):
        return
    folder = Path(path).absolute().parent
    if Path(path).is_dir() or not folder.is_dir() or any(file.is_dir() for file in timeline_paths(path)):
        rule = "the path must be that of a file in a folder that is there"
        raise refusal(ValueError, "timeline", rule, {"timeline": path}, f"Make {folder} first, or give another.")
    advice = f"Nothing can be written in {folder}: give another path."
    require(os.access(folder, os.W_OK), "timeline", "the folder must be writable", {"timeline": path}, advice)


def write_timeline(timeline: Timeline, path: str | Path) -> tuple[Path, Path]:
    """Write FILE.json, for Chrome's about:tracing and Perfetto, and FILE.html, for any browser; return both paths."""
    from daskgpt.instruments.timeline.page import page_of  # Bokeh is loaded when it is needed

    trace, page = timeline_paths(path)
    trace.parent.mkdir(parents=True, exist_ok=True)
    for path, text in ((trace, json.dumps(trace_of(timeline))), (page, page_of(timeline))):
        with replacing(path, "timeline") as file:
            file.write(text.encode())
    return trace, page


def write_side_by_side(timelines: Mapping[str, Timeline], page: Path, title: str) -> Path:
    """Write one page of several timelines, by name, on one time scale; return its path."""
    from daskgpt.instruments.timeline.side_by_side import page_of_several

    with replacing(page, "timelines") as file:
        file.write(page_of_several(timelines, title).encode())
    return page


def write_picture(timelines: Mapping[str, Timeline], path: Path) -> Path:
    """Write several timelines, by name, as one SVG, on one time scale; return its path."""
    from daskgpt.instruments.timeline.strips import svg_one_under_the_other

    with replacing(path, "timelines") as file:
        file.write(svg_one_under_the_other(timelines).encode())
    return path
