"""What ran when: kernel calls of some steps, recorded, summed up, and written as a trace and as a page."""

from daskgpt.profiling.timeline.events import Event, Timeline, Window, color_of, is_message
from daskgpt.profiling.timeline.files import is_bare, write_picture, write_side_by_side, write_timeline
from daskgpt.profiling.timeline.recorder import StepRecorder, TimelineCallback, TimelineConfig, recorder_of
from daskgpt.profiling.timeline.summary import Summary, describe_summary, summarise

__all__ = [
    "Event",
    "StepRecorder",
    "Summary",
    "Timeline",
    "TimelineCallback",
    "TimelineConfig",
    "Window",
    "color_of",
    "describe_summary",
    "is_bare",
    "is_message",
    "recorder_of",
    "summarise",
    "write_picture",
    "write_side_by_side",
    "write_timeline",
]
