"""TABLE 1: the 16 parameter tensors of GPT-2, from which initial values, counts, decay and file layouts derive.

Read it with `tensors` for a configuration, which decides the number of blocks and the rows that exist.
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np

from daskgpt.config.errors import refusal, require
from daskgpt.config.model import GPT2Config
from daskgpt.model.rows import Table


@dataclass(frozen=True)
class Parameter:
    """One row of the table.

    name      GPT-2's published name; `{block}` stands for the block's number
    axes      one word per axis: V padded vocabulary, P positions, C channels, 3C queries with keys and values, 4C
              hidden; or a function of the configuration
    initial   "one", "zero", "normal" (std 0.02), or "residual" (std 0.02 / sqrt(2 L)) if the output is added to x
    multiplied   whether activations are multiplied by it (positions are only added)
    exists       whether a model of this configuration has it
    """

    name: str
    axes: tuple[str | Callable[[GPT2Config], int], ...]
    initial: str
    multiplied: bool = False
    exists: Callable[[GPT2Config], bool] = lambda config: True

    @property
    def per_block(self) -> bool:
        """True if every block has one."""
        return "{block}" in self.name

    @property
    def is_matrix(self) -> bool:
        """True if `--decay matrices` decays it."""
        return len(self.axes) == 2

    @property
    def maps(self) -> int:
        """Number of linear maps of the channels in it, one below the other: queries, keys and values."""
        return 3 if self.axes[0] == "3C" and self.is_matrix else 1

    @property
    def is_conv1d(self) -> bool:
        """True if Hugging Face's GPT-2 files hold its transpose (in, out)."""
        return self.is_matrix and self.per_block

    def shape(self, config: GPT2Config) -> tuple[int, ...]:
        """Return the shape in a model of this size; matrices are (out, in)."""
        sizes = {"V": config.padded_vocabulary, "P": config.positions, "C": config.channels}
        return tuple(
            int(axis[:-1] or 1) * sizes[axis[-1]] if isinstance(axis, str) else axis(config) for axis in self.axes
        )


def _has_mean(config: GPT2Config) -> bool:
    """Return whether normalization subtracts the mean and adds a bias."""
    return config.norm == "layernorm"


# The order is that of llm.c's files.
PARAMETERS: tuple[Parameter, ...] = (
    Parameter("wte.weight", ("V", "C"), "normal", multiplied=True),
    Parameter("wpe.weight", ("P", "C"), "normal"),
    Parameter("h.{block}.ln_1.weight", ("C",), "one"),
    Parameter("h.{block}.ln_1.bias", ("C",), "zero", exists=_has_mean),
    Parameter("h.{block}.attn.c_attn.weight", ("3C", "C"), "normal", multiplied=True),
    Parameter("h.{block}.attn.c_attn.bias", ("3C",), "zero"),
    Parameter("h.{block}.attn.c_proj.weight", ("C", "C"), "residual", multiplied=True),
    Parameter("h.{block}.attn.c_proj.bias", ("C",), "zero"),
    Parameter("h.{block}.ln_2.weight", ("C",), "one"),
    Parameter("h.{block}.ln_2.bias", ("C",), "zero", exists=_has_mean),
    Parameter("h.{block}.mlp.c_fc.weight", ("4C", "C"), "normal", multiplied=True),
    Parameter("h.{block}.mlp.c_fc.bias", ("4C",), "zero"),
    Parameter("h.{block}.mlp.c_proj.weight", ("C", "4C"), "residual", multiplied=True),
    Parameter("h.{block}.mlp.c_proj.bias", ("C",), "zero"),
    Parameter("ln_f.weight", ("C",), "one"),
    Parameter("ln_f.bias", ("C",), "zero", exists=_has_mean),
)
ROWS = Table(lambda: {f"PARAMETERS[{row.name!r}]": row for row in PARAMETERS})


@dataclass(frozen=True)
class Tensor:
    """One tensor of a model: a row of the table in one block, or outside the blocks.

    block   number of its transformer block, None outside
    """

    name: str
    row: Parameter
    block: int | None
    shape: tuple[int, ...]

    def decayed(self, rule: str) -> bool:
        """Return whether weight decay applies to it.

        `matrices` decays the 2-D tensors (nanoGPT, llm.c's CUDA program), `all` every tensor (llm.c's C program).
        """
        return rule == "all" or self.row.is_matrix


def tensors(config: GPT2Config) -> dict[str, Tensor]:
    """Return every tensor of the model by its full name, in the table's order, blocks in turn."""
    found = {}
    for row in PARAMETERS:
        if not row.exists(config):
            continue
        for block in range(config.blocks) if row.per_block else (None,):
            name = row.name.format(block=block)
            found[name] = Tensor(name, row, block, row.shape(config))
    return found


def parameter_shapes(config: GPT2Config) -> dict[str, tuple[int, ...]]:
    """Return the shape of every tensor by its full name."""
    return {name: tensor.shape for name, tensor in tensors(config).items()}


def block_of(where: str) -> int | None:
    """Return the number of the transformer block in the published name of a tensor or a place."""
    first, _, rest = where.partition(".")
    return int(rest.partition(".")[0]) if first == "h" else None


def parameter_count(config: GPT2Config, *, multiplied: bool = False) -> int:
    """Return the number of trained values, without the padding of the vocabulary (124,439,808 for gpt2).

    multiplied   count only tensors that activations are multiplied by
    """
    padding = (config.padded_vocabulary - config.vocabulary) * config.channels
    return value_count(config, multiplied=multiplied) - padding


def value_count(config: GPT2Config, *, multiplied: bool = False) -> int:
    """Return the number of values in all tensors, with padding; counted by rows, since a broken file may have any
    size."""
    rows = [row for row in PARAMETERS if row.exists(config) and (row.multiplied or not multiplied)]
    return sum(math.prod(row.shape(config)) * (config.blocks if row.per_block else 1) for row in rows)


def step_operations(config: GPT2Config, batch_size: int, sequence_length: int) -> int:
    """Return the floating-point operations of one step's matrix products; recomputed products count once.

    6 N B T + 6 L C B T (T + 1): a multiplication and an addition for each of the N multiplied values and each token in
    the forward pass, and twice that in the backward pass; and the same for attention's two products, where a token
    attends to (T + 1) / 2 tokens on average.
    """
    tokens = batch_size * sequence_length
    attention = config.blocks * config.channels * (sequence_length + 1)
    return 6 * tokens * (parameter_count(config, multiplied=True) + attention)


class RandomParameters(Mapping[str, np.ndarray]):
    """GPT-2's initial values, each made when it is read: the mapping itself holds only the configuration.

    Every tensor has its own random stream, so none depends on the size or order of others.

    Source   Radford et al. 2019, section 2.3; nanoGPT and llm.c use the same values
    """

    def __init__(self, config: GPT2Config, seed: int, dtype: np.typing.DTypeLike = np.float32) -> None:
        self.config, self.seed, self.dtype = config, seed, np.dtype(dtype)
        self.numbers = {name: number for number, name in enumerate(tensors(config))}

    def __getitem__(self, name: str) -> np.ndarray:
        config, tensor = self.config, tensors(self.config)[name]
        initial = tensor.row.initial
        if initial in ("one", "zero"):
            return np.full(tensor.shape, float(initial == "one"), self.dtype)
        std = 0.02 / math.sqrt(2 * config.blocks) if initial == "residual" else 0.02
        random = np.random.default_rng([self.seed, self.numbers[name]])
        values: np.ndarray = (random.standard_normal(tensor.shape, np.float32) * np.float32(std)).astype(self.dtype)
        if name == "wte.weight":
            values[config.vocabulary :] = 0
        return values

    def __iter__(self) -> Iterator[str]:
        return iter(self.numbers)

    def __len__(self) -> int:
        return len(self.numbers)


def initial_parameters(config: GPT2Config, seed: int, dtype: np.typing.DTypeLike = np.float32) -> dict[str, np.ndarray]:
    """Return all initial values of a model as arrays, by the names of the table: see `RandomParameters`.

    >>> import daskgpt
    >>> parameters = daskgpt.initial_parameters(daskgpt.preset("tiny"), seed=0)
    >>> parameters["wte.weight"].shape, parameters["h.0.attn.c_attn.weight"].shape
    ((257, 128), (384, 128))
    """
    return dict(RandomParameters(config, seed, dtype))


def digest(parameters: Mapping[str, np.ndarray]) -> str:
    """Return the SHA-256 of a model, 64 hexadecimal digits: equal digests mean models that are equal to the last bit.
    Names, dtypes, shapes and values count; the order of the tensors does not.

    >>> import daskgpt
    >>> one, other = (daskgpt.initial_parameters(daskgpt.preset("tiny"), seed) for seed in (0, 1))
    >>> daskgpt.digest(one) == daskgpt.digest(dict(reversed(one.items()))), daskgpt.digest(one) == daskgpt.digest(other)
    (True, False)
    """
    found = hashlib.sha256()
    for name in sorted(parameters):
        values = np.asarray(parameters[name])
        found.update(f"{name} {values.dtype.str} {values.shape}\n".encode())
        found.update(np.ascontiguousarray(values).data.cast("B"))
    return found.hexdigest()


def check_parameters(config: GPT2Config, parameters: Mapping[str, np.ndarray]) -> None:
    """Check that names and shapes are those of the table.

    Errors   ValueError naming the first tensor that is missing, unknown or of another shape; TypeError for anything
             else than a configuration and a mapping of arrays
    """
    where, shapes = "check_parameters", parameter_shapes(check_config("check_parameters", config))
    rule, advice = "parameters must be NumPy arrays by name", "Take them from daskgpt.load or a run's result."
    kind = {"parameters": type(parameters).__name__}
    require(isinstance(parameters, Mapping), where, rule, kind, advice, TypeError)
    for name in [*shapes, *parameters]:
        if name not in parameters or name not in shapes:
            got = f"{name}, which is {'missing' if name not in parameters else 'unknown'}"
            raise refusal(ValueError, where, "names must be the table's", got, "Compare PARAMETERS.")
        value = parameters[name]  # once: each lookup may read a file or fetch
        require(isinstance(value, np.ndarray), where, rule, {name: type(value).__name__}, advice, TypeError)
        shaped, shape = f"{name} must have shape {shapes[name]}", tuple(value.shape)
        require(shape == shapes[name], where, shaped, {"shape": shape}, "Compare the config.")


def check_config(where: str, config: Any) -> GPT2Config:
    """Return a model's configuration.

    Errors   TypeError for anything else, such as the name of a preset
    """
    rule, got = "the configuration must be a GPT2Config", {"config": repr(config)[:40]}
    require(isinstance(config, GPT2Config), where, rule, got, "Give daskgpt.preset(name).", TypeError)
    found: GPT2Config = config
    return found


def check_dtypes(where: str, arrays: Mapping[str, np.ndarray], dtype: type[np.generic]) -> None:
    """Check that every array has this dtype.

    Errors   TypeError naming the first that has another
    """
    for name, values in arrays.items():
        if values.dtype != dtype:
            needed = np.dtype(dtype).name
            rule, advice = f"{name} must be {needed}", f"Convert it with .astype(np.{needed})."
            raise refusal(TypeError, where, rule, {"dtype": values.dtype}, advice)
