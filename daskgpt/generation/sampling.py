"""Text from a model, a token at a time."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence

import numpy as np

from daskgpt.config.errors import require
from daskgpt.config.model import GPT2Config
from daskgpt.model.parameters import check_parameters
from daskgpt.schedulers.addresses import open_scheduler
from daskgpt.training.inference import Inference
from daskgpt.training.step import State

CONTEXT_STEP = 64  # tokens; graphs are recorded for multiples of it, attention never looks at what follows


def sample(
    config: GPT2Config,
    parameters: Mapping[str, np.ndarray],
    prompt: Sequence[int],
    count: int,
    *,
    context: int = 0,
    temperature: float = 1.0,
    top_k: int = 0,
    seed: int = 0,
) -> Iterator[int]:
    """The next `count` token ids after the prompt, one by one, each computed when it is asked for.

    prompt       token ids, at least one
    context      how many tokens the model looks back, 0 = its positions; a model knows the positions it was trained on
    temperature  0 takes the likeliest token, 1 the model's own probabilities
    top_k        choose among so many likeliest tokens only, 0 = all
    seed         of the choices: the same seed gives the same tokens

    Dtype        parameters float32
    Errors       at once: ValueError for an empty prompt, a token outside the vocabulary, a negative number, parameters
                 that are not of this configuration; TypeError for a prompt that is text
    Cost         a whole forward pass a token over at most `positions` tokens; keys and values are not kept. Computed
                 by Dask's synchronous scheduler, which is opened with the first token and closed with the last one, or
                 when the iterator is closed; in between, BLAS has one thread.
    """
    text, advice = isinstance(prompt, str | bytes), "Encode it: list(b'text') for bytes."
    require(not text, "sample", "the prompt must be token ids", {"prompt": type(prompt).__name__}, advice, TypeError)
    prompt = [int(token) for token in prompt]
    numbers = {"count": count, "context": context, "temperature": temperature, "top_k": top_k, "seed": seed}
    _check(config, prompt, numbers)
    check_parameters(config, parameters)
    return _tokens(config, parameters, prompt, count, context, temperature, top_k, seed)


def _tokens(
    config: GPT2Config,
    parameters: Mapping[str, np.ndarray],
    prompt: list[int],
    count: int,
    context: int,
    temperature: float,
    top_k: int,
    seed: int,
) -> Iterator[int]:
    random = np.random.default_rng(seed)
    state = State.of_weights(config, parameters)
    passes: dict[int, Inference] = {}
    tokens = list(prompt)
    context = min(context or config.positions, config.positions)
    with open_scheduler("sync") as scheduler:
        for _ in range(count):
            recent = tokens[-context:]
            length = min(-(-len(recent) // CONTEXT_STEP) * CONTEXT_STEP, config.positions)
            if length not in passes:
                shape = (1, length)
                passes[length] = Inference(config, shape, shape, state.layout, ("activations",), grain="chunk")
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


def _check(config: GPT2Config, prompt: list[int], numbers: Mapping[str, float]) -> None:
    require(len(prompt) > 0, "sample", "the prompt must have a token", {"prompt": prompt}, "Give some text.")
    least, largest = min(prompt), max(prompt)
    got = {"least": least, "largest": largest, "vocabulary": config.vocabulary}
    rule, advice = "tokens must lie in the vocabulary", "Use the encoding that the model was trained with."
    require(least >= 0 and largest < config.vocabulary, "sample", rule, got, advice)
    for name, value in numbers.items():
        require(value >= 0, "sample", f"{name} must not be negative", {name: value}, "Give 0 or more.")
