"""Text from a model, a token at a time."""

from __future__ import annotations

from collections.abc import Iterator, Mapping

import numpy as np

from daskgpt.config.errors import require
from daskgpt.config.model import GPT2Config
from daskgpt.schedulers.protocol import Scheduler
from daskgpt.training.inference import Inference
from daskgpt.training.step import State

CONTEXT_STEP = 64  # tokens; graphs are recorded for multiples of it, attention never looks at what follows


def sample(
    config: GPT2Config,
    parameters: Mapping[str, np.ndarray],
    scheduler: Scheduler,
    prompt: list[int],
    count: int,
    *,
    context: int = 0,
    temperature: float = 1.0,
    top_k: int = 0,
    seed: int = 0,
) -> Iterator[int]:
    """The next `count` tokens after the prompt, one by one.

    context      how many tokens the model looks back, 0 = its positions; a model knows the positions it was trained on
    temperature  0 takes the likeliest token
    top_k        choose among so many likeliest tokens only, 0 = all

    Errors       ValueError for an empty prompt, a token outside the vocabulary, a negative temperature or top_k
    Cost         a whole forward pass a token over at most `positions` tokens; keys and values are not kept
    """
    _check(config, prompt, temperature, top_k)
    random = np.random.default_rng(seed)
    state = State.of_weights(config, parameters)
    passes: dict[int, Inference] = {}
    tokens = list(prompt)
    context = min(context or config.positions, config.positions)
    for _ in range(count):
        recent = tokens[-context:]
        length = min(-(-len(recent) // CONTEXT_STEP) * CONTEXT_STEP, config.positions)
        if length not in passes:
            passes[length] = Inference(config, (1, length), (1, length), state.layout, ("activations",), grain="chunk")
        padded = np.zeros((1, length), np.int32)
        padded[0, : len(recent)] = recent
        x = passes[length](scheduler, state, padded)["activations"][0, len(recent) - 1]
        logits = parameters["wte.weight"][: config.vocabulary] @ x
        tokens.append(_choose(logits.astype(np.float64), temperature, top_k, random))
        yield tokens[-1]


def _choose(logits: np.ndarray, temperature: float, top_k: int, random: np.random.Generator) -> int:
    if temperature == 0:
        return int(logits.argmax())
    if 0 < top_k < logits.size:
        least = np.partition(logits, -top_k)[-top_k]
        logits = np.where(logits >= least, logits, -np.inf)
    p = np.exp((logits - logits.max()) / temperature)
    return int(random.choice(p.size, p=p / p.sum()))


def _check(config: GPT2Config, prompt: list[int], temperature: float, top_k: int) -> None:
    require(len(prompt) > 0, "sample", "the prompt must have a token", {"prompt": prompt}, "Give some text.")
    require(
        min(prompt) >= 0 and max(prompt) < config.vocabulary,
        "sample",
        "tokens must lie in the vocabulary",
        {"largest": max(prompt), "vocabulary": config.vocabulary},
        "Use the encoding that the model was trained with.",
    )
    for name, value in {"temperature": temperature, "top_k": top_k}.items():
        require(value >= 0, "sample", f"{name} must not be negative", {name: value}, "Give 0 or more.")
