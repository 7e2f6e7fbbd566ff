"""What ran when: kernel calls of some steps, recorded, summed up, and written as a trace and as a page."""

from daskgpt.instruments.timeline.events import Event, Timeline, Window
from daskgpt.instruments.timeline.recorder import StepRecorder
from daskgpt.instruments.timeline.summary import Summary, describe_summary, summarise
from daskgpt.instruments.timeline.watcher import TimelineConfig, TimelineWatcher
from daskgpt.instruments.timeline.writing import (
    check_timeline_path,
    timeline_paths,
    write_picture,
    write_side_by_side,
    write_timeline,
)

__all__ = [
    "Event",
    "StepRecorder",
    "Summary",
    "Timeline",
    "TimelineConfig",
    "TimelineWatcher",
    "Window",
    "check_timeline_path",
    "describe_summary",
    "summarise",
    "timeline_paths",
    "write_picture",
    "write_side_by_side",
    "write_timeline",
]
