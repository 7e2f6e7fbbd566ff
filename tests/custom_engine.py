"""An engine from outside of the package: it runs the tasks of a step in a plain loop, without any scheduler of Dask."""

from collections.abc import Sequence
from dataclasses import replace

from daskgpt.data.dataset import Batch
from daskgpt.graph.fuse import in_order
from daskgpt.graph.nodes import with_leaves
from daskgpt.model.step import Outcome
from daskgpt.training.engine import LocalEngine


class LoopEngine(LocalEngine):
    """Sequential code: one task after the other, in Dask's order."""

    def run(self, batches: Sequence[Batch], steps: int) -> list[Outcome]:
        outcomes = []
        for inputs in self.inputs(batches, steps):
            run = self.step.submission([inputs], self.current.packs)
            graph, results = with_leaves(run.graph, run.leaves), {}
            for key in in_order(graph):
                results[key] = graph[key](results)
            outcomes.append(Outcome.of(self.step.output([results[key] for key in self.step.output_keys])))
            self.current = replace(self.current, step=self.made + 1)
        return outcomes
