"""Hugging Face's side of a comparison: a process in which transformers writes with the same GPT-2, its cache on."""

from __future__ import annotations

import importlib.util
from contextlib import ExitStack
from typing import Any

from daskgpt.config.errors import refusal, require
from daskgpt.config.model import GPT2Config
from daskgpt.config.run import OptimizerConfig
from daskgpt.instruments.compare.messages import Cpu, Peak, ResetPeak, Start, TorchOptions, Write
from daskgpt.instruments.compare.torch_process import TorchProcess

MODULE = "daskgpt.instruments.compare.transformers_gpt2"


def require_transformers() -> None:
    """Errors   RuntimeError where transformers or PyTorch is not installed"""
    missing = [name for name in ("transformers", "torch") if importlib.util.find_spec(name) is None]
    if missing:
        rule, advice = "--against transformers needs it and PyTorch", "Install it: pip install 'daskgpt[test-peers]'."
        raise refusal(RuntimeError, "bench", rule, f"{missing[0]}=not installed", advice)


class TransformersSide:
    """A `compare.turns.Side` in another process: each turn writes tokens after the same prompt, the likeliest ones."""

    def __init__(self, config: GPT2Config, seed: int, threads: int, prompt: list[int]) -> None:
        rule, advice = "transformers must have this model", "Leave --norm out, or compare nothing."
        require(config.norm == "layernorm", "bench", rule, {"norm": config.norm}, advice)
        self.start = Start(config, OptimizerConfig(), seed, threads, TorchOptions())
        self.prompt, self.losses = prompt, list[float]()
        self.written: list[int] = []
        self.name = ""
        self._running = ExitStack()

    def __enter__(self) -> TransformersSide:
        with ExitStack() as running:
            self.process = running.enter_context(TorchProcess(module=MODULE))
            self.process.tell(self.start)
            self.name = self.process.hear()
            self._running = running.pop_all()
        return self

    def __exit__(self, *error: Any) -> None:
        self._running.__exit__(*error)

    def run(self, count: int) -> list[float]:
        """Mean seconds of a token; the prompt, of a few tokens, is read with the first one."""
        seconds, self.written = self._asked(Write(self.prompt, count))
        return [seconds / count]

    def compare(self, ours: list[int]) -> None:
        """Errors   RuntimeError unless both programs begin with the same token; later ones may be near ties"""
        rule, got = (
            "both programs must write the same first token",
            {"daskgpt": ours[0], "transformers": self.written[0]},
        )
        advice = "One of them computes another model."
        require(ours[0] == self.written[0], "bench", rule, got, advice, RuntimeError)

    def reset_peak(self) -> None:
        self._asked(ResetPeak())

    def peak(self) -> int:
        return int(self._asked(Peak()))

    def cpu(self) -> dict[tuple[str, int], float]:
        found: dict[tuple[str, int], float] = self._asked(Cpu())
        return found

    def _asked(self, message: Any) -> Any:
        self.process.tell(message)
        return self.process.hear()
