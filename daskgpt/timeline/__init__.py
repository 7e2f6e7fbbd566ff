"""What ran when: kernel calls of some steps, recorded, summed up, and written as a trace and as a page."""

from daskgpt.timeline.events import Event, Timeline, Window
from daskgpt.timeline.files import check_timeline_path, timeline_paths, write_timeline
from daskgpt.timeline.recorder import StepRecorder
from daskgpt.timeline.summary import Summary, describe_summary, summarise

__all__ = [
    "Event",
    "StepRecorder",
    "Summary",
    "Timeline",
    "Window",
    "check_timeline_path",
    "describe_summary",
    "summarise",
    "timeline_paths",
    "write_timeline",
]
