"""Merged tasks on their way to workers: pickled once, not once a step, and unpickled once where they run.

A step has the programs of the step before: thousands of small objects. Pickled as parts of its graph they would take
client and scheduler of a small model about as long as all else that these do for a step.
"""

from __future__ import annotations

from copy import copy
from functools import lru_cache
from typing import Any
from weakref import WeakKeyDictionary

from distributed.protocol import pickle

from daskgpt.graph.nodes import GraphNode, combined
from daskgpt.graph.program import Program

KNOWN = 1024  # programs that a worker keeps; it runs some 60 in a step, and other ones where workers have come or gone


class SentProgram:
    """A program as it is sent, as part of one of several runs: the scheduler hands it on as it came."""

    def __init__(self, pickled: bytes, run: int) -> None:
        self.pickled, self.run = pickled, run

    def __call__(self, *results: Any) -> Any:
        program = copy(_program_of(self.pickled))
        program.run = self.run
        return program(*results)


class SentPrograms:
    """The programs that a client sends again and again."""

    def __init__(self) -> None:
        self.pickled: WeakKeyDictionary[Program, bytes] = WeakKeyDictionary()

    def in_run(self, node: GraphNode, run: int) -> GraphNode:
        """A merged task as part of one of several runs, ready to be sent; other nodes (data, barriers) as they are."""
        program = getattr(node, "func", None)
        if not isinstance(program, Program):
            return node
        if program not in self.pickled:
            self.pickled[program] = pickle.dumps(program)
        return combined(node.key, SentProgram(self.pickled[program], run), node.args)


@lru_cache(KNOWN)
def _program_of(pickled: bytes) -> Program:
    program: Program = pickle.loads(pickled)
    return program
