"""The dials of the dataflow as a study shows them: their names, the order of their values, and colours."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any


@dataclass(frozen=True)
class Look:
    """How one value of a dial is shown.

    label    in a figure
    words    in a sentence
    colour   of its bars and lines
    """

    label: str
    words: str
    colour: str


@dataclass(frozen=True)
class Dial:
    """One dial.

    kind     of its values, int or str
    words    what a value counts or names
    colour   of values that have none of their own
    looks    of its values, in their order; empty for numbers
    """

    kind: type
    words: str
    colour: str
    looks: Mapping[str, Look] = field(default_factory=dict)

    def order(self, value: Any) -> tuple[int, Any]:
        """A sort key: the table's order, then that of the values themselves."""
        names = list(self.looks)
        return names.index(value) if value in names else len(names), value


TEAL, BLUE = "#00798c", "#30638e"
# Of every dial of `grid.Point`, in its order.
DIALS: dict[str, Dial] = {
    "threads": Dial(int, "threads", BLUE),
    "scheduler": Dial(
        str,
        "scheduler",
        BLUE,
        {name: Look(name, f"scheduler {name}", BLUE) for name in ("sync", "threads", "local")},
    ),
    "barrier": Dial(
        str,
        "barrier",
        TEAL,
        {
            "layer": Look("layer (fork-join)", "fork-join (barrier layer)", "#d1495b"),
            "phase": Look("phase", "barrier phase", "#edae49"),
            "step": Look("step (tasks)", "tasks (barrier step)", TEAL),
            "none": Look("none (barrier-free)", "barrier-free (barrier none)", "#5e3c99"),
        },
    ),
    "batch_chunk": Dial(int, "sequences in a chunk", TEAL),
    "sequence_chunk": Dial(int, "tokens of each in a chunk", TEAL),
    "grain": Dial(
        str,
        "grain",
        TEAL,
        {name: Look(name, f"grain {name}", TEAL) for name in ("kernel", "segment", "block", "chunk", "auto")},
    ),
}
BARRIERS = DIALS["barrier"].looks
# Lines of one figure that are no dial's: phases of a step, and the slicings of a batch.
PHASES = {"forward": "#4269d0", "backward": "#ff725c", "update": "#3ca951"}
TOTAL = {"total": "#303030"}
SLICINGS = ("#4269d0", "#ff725c", "#3ca951", "#303030")
MARKERS = "o^sD"
