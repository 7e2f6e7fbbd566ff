"""The order of a sum over the batch: chunks of sequences and tokens, the chains of the groups, and the tree of totals.

The order of calls and the places where totals meet are those of `graph.sum_order` and `kernels.totals`.
"""

from __future__ import annotations

from daskgpt.graph.sum_order import Groups, SumOrder
from drawing.svg import FAINT, FRAME, INK, Picture

SEQUENCES, TOKENS, GROUPS = (3, 5), (4, 4, 4), 4
CELL, LEFT, TOP, TREE = (92, 34), 62, 58, 46
FILLS = ("#dbe5fb", "#dff1e0", "#fdeccb", "#ece0f8")


def batch_sums() -> str:
    """The picture, as SVG."""
    order = SumOrder.of(SEQUENCES, TOKENS, at_once=1, groups=Groups(GROUPS))
    picture = Picture("The order of a sum over the batch")
    picture.words(LEFT, 18, f"{sum(SEQUENCES)} sequences of {sum(TOKENS)} tokens", size=13, bold=True)
    picture.words(LEFT, 36, f"{len(SEQUENCES)} x {len(TOKENS)} chunks; numbers: order of the kernel's calls", size=10.5)
    _calls(picture, order)
    _chunks(picture)
    _tree(picture, order)
    return picture.text()


def _calls(picture: Picture, order: SumOrder) -> None:
    """A cell for what one call of the kernel sums, in the order of the calls, colored by group."""
    begins = [sum(SEQUENCES[:b]) for b in range(len(SEQUENCES))]
    number = 0
    for piece, chunks in enumerate(order.pieces):
        for cut in order.cuts(piece):
            for b, t in chunks:
                x, y = LEFT + t * CELL[0], TOP + (begins[b] + cut.first) * CELL[1]
                height = (cut.last - cut.first) * CELL[1]
                number += 1
                picture.box(x + 3, y + 3, CELL[0] - 6, height - 6, fill=FILLS[cut.group])
                picture.words(x + CELL[0] / 2, y + height / 2 + 4, str(number), anchor="middle")


def _chunks(picture: Picture) -> None:
    """Frames around chunks, with their coordinates."""
    for b, sequences in enumerate(SEQUENCES):
        y, height = TOP + sum(SEQUENCES[:b]) * CELL[1], sequences * CELL[1]
        picture.words(LEFT - 10, y + height / 2 + 4, f"b{b}", anchor="end", fill=FAINT)
        for t in range(len(TOKENS)):
            picture.box(LEFT + t * CELL[0], y, CELL[0], height, stroke=FRAME)
            if b == 0:
                picture.words(LEFT + (t + 0.5) * CELL[0], TOP - 6, f"t{t}", anchor="middle", fill=FAINT)


def _tree(picture: Picture, order: SumOrder) -> None:
    """The groups' totals, and where they meet: a binary counter, whose levels are columns."""
    x = LEFT + len(TOKENS) * CELL[0] + 20
    waiting: list[tuple[float, float]] = []
    for group in range(order.groups.count):
        y = TOP + (group + 0.5) * order.of_group * CELL[1]
        picture.box(x, y - 12, 78, 24, fill=FILLS[group], stroke=FRAME)
        picture.words(x + 39, y + 4, f"group {group}", anchor="middle")
        assert len(waiting) == order.level(group)
        waiting.append((x + 78, y))
        for _ in range(order.additions(group)):
            (right, low), (left, high) = waiting.pop(), waiting.pop()
            end, middle = max(left, right) + TREE, (high + low) / 2
            picture.path(f"M{left:g} {high:g}H{end:g}V{low:g}H{right:g}", stroke=INK, width=1.3)
            picture.box(end - 9, middle - 9, 18, 18, fill="#ffffff", stroke=INK, radius=9)
            picture.words(end, middle + 4, "+", size=13, anchor="middle", bold=True)
            waiting.append((end + 9, middle))
    ((right, middle),) = waiting
    picture.path(f"M{right:g} {middle:g}h{TREE}", stroke=INK, width=1.3)
    picture.words(right + TREE + 6, middle + 4, "the gradient", bold=True)
    picture.width += 80  # of these words
