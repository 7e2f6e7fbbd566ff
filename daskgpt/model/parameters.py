"""TABLE 1: the parameter tensors of a model (16 for GPT-2), from which initial values, counts and layouts derive.

Read it with `tensors` for a configuration, which decides the number of blocks and the rows that exist.
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Any, cast

import numpy as np

from daskgpt.config.errors import refusal, require, whole_number
from daskgpt.config.model import ModelConfig
from daskgpt.kernels.float32.blas import gemm_address, multiply
from daskgpt.model.layers import chosen


@dataclass(frozen=True)
class Parameter:
    """One row of the table.

    name      GPT-2's published name; `{block}` stands for the block's number
    axes      one word per axis: V padded vocabulary, P positions, C channels, A channels of all heads, D those of one,
              QKV queries with keys and values, H hidden, I input of the activation, R rank of adapters
    initial   "one", "zero", "normal" (std 0.02), or "residual" (std 0.02 / sqrt(2 L)) if the output is added to x
    multiplied   returns whether a model multiplies activations by it (positions are only added)
    exists       returns whether a model has it
    """

    name: str
    axes: tuple[str, ...]
    initial: str
    multiplied: Callable[[ModelConfig], bool] = lambda config: False
    exists: Callable[[ModelConfig], bool] = lambda config: True

    @property
    def per_block(self) -> bool:
        """True if every block has one."""
        return "{block}" in self.name

    @property
    def is_matrix(self) -> bool:
        """True if `--decay matrices` decays it."""
        return len(self.axes) == 2

    @property
    def is_conv1d(self) -> bool:
        """True if Hugging Face's GPT-2 files hold its transpose (in, out)."""
        return self.is_matrix and self.per_block

    @property
    def is_adapter(self) -> bool:
        """True if it adapts a linear layer, whose own tensors then stay as they are."""
        return "R" in self.axes

    def shape(self, config: ModelConfig) -> tuple[int, ...]:
        """Return the shape in a model of this size; matrices are (out, in)."""
        size, hidden = config.head_channels, config.hidden_channels
        sizes = {"V": config.padded_vocabulary, "P": config.positions, "C": config.channels, "H": hidden}
        sizes |= {"D": size, "A": config.heads * size, "QKV": (config.heads + 2 * config.key_heads) * size}
        sizes |= {"I": chosen(config, "activation").widens * hidden if "I" in self.axes else 0, "R": config.lora}
        return tuple(sizes[axis] for axis in self.axes)


def _always(config: ModelConfig) -> bool:
    return True


def _is_tied(config: ModelConfig) -> bool:
    return config.head == "tied"


def _norm_has_bias(config: ModelConfig) -> bool:
    return "bias" in chosen(config, "norm").forward.arguments.split()


def _heads_are_normalized(config: ModelConfig) -> bool:
    return config.qk_norm != "none"


def _all_have_bias(config: ModelConfig) -> bool:
    return config.bias == "all"


def _has_adapters(config: ModelConfig) -> bool:
    return config.lora > 0


# The order is that of llm.c's files.
PARAMETERS: tuple[Parameter, ...] = (
    Parameter("wte.weight", ("V", "C"), "normal", multiplied=_is_tied),
    Parameter("wpe.weight", ("P", "C"), "normal", exists=lambda config: config.position == "learned"),
    Parameter("h.{block}.ln_1.weight", ("C",), "one"),
    Parameter("h.{block}.ln_1.bias", ("C",), "zero", exists=_norm_has_bias),
    Parameter("h.{block}.attn.c_attn.weight", ("QKV", "C"), "normal", multiplied=_always),
    Parameter("h.{block}.attn.c_attn.bias", ("QKV",), "zero", exists=lambda config: config.bias != "none"),
    Parameter("h.{block}.attn.q_norm.weight", ("D",), "one", exists=_heads_are_normalized),
    Parameter("h.{block}.attn.k_norm.weight", ("D",), "one", exists=_heads_are_normalized),
    Parameter("h.{block}.attn.c_proj.weight", ("C", "A"), "residual", multiplied=_always),
    Parameter("h.{block}.attn.c_proj.bias", ("C",), "zero", exists=_all_have_bias),
    Parameter("h.{block}.ln_2.weight", ("C",), "one"),
    Parameter("h.{block}.ln_2.bias", ("C",), "zero", exists=_norm_has_bias),
    Parameter("h.{block}.mlp.c_fc.weight", ("I", "C"), "normal", multiplied=_always),
    Parameter("h.{block}.mlp.c_fc.bias", ("I",), "zero", exists=_all_have_bias),
    Parameter("h.{block}.mlp.c_proj.weight", ("C", "H"), "residual", multiplied=_always),
    Parameter("h.{block}.mlp.c_proj.bias", ("C",), "zero", exists=_all_have_bias),
    Parameter("ln_f.weight", ("C",), "one"),
    Parameter("ln_f.bias", ("C",), "zero", exists=_norm_has_bias),
    Parameter("lm_head.weight", ("V", "C"), "normal", multiplied=_always, exists=lambda config: not _is_tied(config)),
)
LORA_A, LORA_B = ".lora_a.weight", ".lora_b.weight"
# An adapted layer multiplies by weight + lora_b lora_a.
PARAMETERS += tuple(
    Parameter(row.name.removesuffix(".weight") + name, axes, initial, multiplied=_always, exists=_has_adapters)
    for row in PARAMETERS
    if row.is_conv1d
    for name, axes, initial in ((LORA_A, ("R", row.axes[1]), "normal"), (LORA_B, (row.axes[0], "R"), "zero"))
)


@dataclass(frozen=True)
class Tensor:
    """One tensor of a model: a row of the table in one block, or outside the blocks.

    block        number of its transformer block, None outside of the blocks
    multiplied   whether activations are multiplied by it
    maps         number of linear maps that it holds, one below the other, such as queries, keys and values
    trained      whether training changes it; of a model with adapters, these alone
    """

    name: str
    row: Parameter
    block: int | None
    shape: tuple[int, ...]
    multiplied: bool = False
    maps: int = 1
    trained: bool = True

    def decayed(self, rule: str) -> bool:
        """Return whether weight decay applies to it.

        `matrices` decays the 2-D tensors (nanoGPT, llm.c's CUDA program), `all` every tensor (llm.c's C program).
        """
        return rule == "all" or self.row.is_matrix


def tensors(config: ModelConfig) -> dict[str, Tensor]:
    """Return every tensor of the model by its full name, in the order of the table, block after block."""
    table = {}
    for row in PARAMETERS:
        if not row.exists(config):
            continue
        for block in range(config.blocks) if row.per_block else (None,):
            name = row.name.format(block=block)
            maps = 3 if row.is_matrix and row.axes[0] == "QKV" and config.key_heads == config.heads else 1
            trained = row.is_adapter or not config.lora
            table[name] = Tensor(name, row, block, row.shape(config), row.multiplied(config), maps, trained)
    return table


def trained_tensors(config: ModelConfig) -> dict[str, Tensor]:
    """Return the tensors that training changes, by their full names."""
    return {name: tensor for name, tensor in tensors(config).items() if tensor.trained}


def parameter_shapes(config: ModelConfig) -> dict[str, tuple[int, ...]]:
    """Return the shape of every tensor by its full name."""
    return {name: tensor.shape for name, tensor in tensors(config).items()}


def parameter_count(config: ModelConfig, *, multiplied: bool = False) -> int:
    """Return the number of values, without the padding of the vocabulary (124,439,808 for gpt2).

    multiplied   count only tensors that activations are multiplied by
    """
    tables = 1 if multiplied or _is_tied(config) else 2
    padding = tables * (config.padded_vocabulary - config.vocabulary) * config.channels
    return value_count(config, multiplied=multiplied) - padding


def value_count(config: ModelConfig, *, multiplied: bool = False, trained: bool = False) -> int:
    """Return the number of values in all tensors, with padding. It is computed per row of the table, since a broken
    file may name any size.

    multiplied, trained   count only tensors that activations are multiplied by, or that training changes
    """
    rows = [row for row in PARAMETERS if row.exists(config) and (not multiplied or row.multiplied(config))]
    rows = [row for row in rows if row.is_adapter or not (trained and config.lora)]
    return sum(math.prod(row.shape(config)) * (config.blocks if row.per_block else 1) for row in rows)


def step_operations(config: ModelConfig, batch_size: int, sequence_length: int) -> int:
    """Return the floating-point operations of one step's matrix products; recomputed products count once.

    6 N B T + 6 L C B T (T + 1): a multiplication and an addition for each of the N multiplied values and each token in
    the forward pass, and twice that in the backward pass, but once for values that are not trained; and the same for
    attention's two products, where a token attends to (T + 1) / 2 tokens on average.
    """
    count = parameter_count(config, multiplied=True)
    kept = count - value_count(config, trained=True) if config.lora else 0
    products = (6 * count - 2 * kept) * batch_size * sequence_length
    return products + attention_operations(config, batch_size, sequence_length)


def attention_operations(config: ModelConfig, batch_size: int, sequence_length: int) -> int:
    """Return those of `step_operations` that are attention's."""
    channels = config.blocks * config.heads * config.head_channels
    return 6 * channels * batch_size * sequence_length * (sequence_length + 1)


class ReadLater(Mapping[str, np.ndarray]):
    """Tensors that are read each time they are looked up.

    names   names in the order of the mapping
    read    returns a tensor by its name, float32 in the shape of the model's table
    """

    def __init__(self, names: Iterable[str], read: Callable[[str], np.ndarray]) -> None:
        self.names, self.read = dict.fromkeys(names), read

    def __getitem__(self, name: str) -> np.ndarray:
        return self.read(name)

    def __contains__(self, name: object) -> bool:
        return name in self.names  # without reading a tensor

    def __iter__(self) -> Iterator[str]:
        return iter(self.names)

    def __len__(self) -> int:
        return len(self.names)


class RandomParameters(ReadLater):
    """GPT-2's initial values. Tensors are generated when they are read; the mapping holds only the configuration.

    Every tensor has its own random stream, of its number in the table: no value depends on what else was read, or when.

    Source   Radford et al. 2019, section 2.3; nanoGPT and llm.c use the same values
    """

    def __init__(self, config: ModelConfig, seed: int, dtype: np.typing.DTypeLike = np.float32) -> None:
        super().__init__(tensors(config), self.generated)
        self.config, self.seed, self.dtype = config, seed, np.dtype(dtype)

    def generated(self, name: str) -> np.ndarray:
        """Return the values of a tensor."""
        config, tensor = self.config, tensors(self.config)[name]
        initial = tensor.row.initial
        if initial in ("one", "zero"):
            return np.full(tensor.shape, float(initial == "one"), self.dtype)
        std = 0.02 / math.sqrt(2 * config.blocks) if initial == "residual" else 0.02
        random = np.random.default_rng([self.seed, list(self.names).index(name)])
        values: np.ndarray = (random.standard_normal(tensor.shape, np.float32) * np.float32(std)).astype(self.dtype)
        if tensor.row.axes[0] == "V":
            values[config.vocabulary :] = 0
        return values


def initial_parameters(
    config: ModelConfig, seed: int, dtype: np.typing.DTypeLike = np.float32
) -> dict[str, np.ndarray]:
    """Return all initial values of a model as arrays, by the names of the table; see `RandomParameters`.

    >>> import daskgpt
    >>> parameters = daskgpt.initial_parameters(daskgpt.preset("tiny"), seed=0)
    >>> parameters["wte.weight"].shape, parameters["h.0.attn.c_attn.weight"].shape
    ((257, 128), (384, 128))
    """
    where = "initial_parameters"
    return dict(RandomParameters(check_config(where, config), whole_number(seed, where, "seed"), dtype))


def merged(config: ModelConfig, parameters: Mapping[str, np.ndarray]) -> tuple[ModelConfig, Mapping[str, np.ndarray]]:
    """Return a model without adapters: each adapted weight becomes weight + lora_b lora_a.

    A weight is computed each time it is read; sums have the order of `kernels.float32`, the same on every processor. A
    model without adapters is returned as it is.

    Source   Hu et al. 2021, arXiv:2106.09685
    """
    if not config.lora:
        return config, parameters
    table = tensors(replace(config, lora=0))

    def read(name: str) -> np.ndarray:
        if not table[name].row.is_conv1d:
            return parameters[name]
        a, b = (np.ascontiguousarray(parameters[name.removesuffix(".weight") + part]) for part in (LORA_A, LORA_B))
        total = np.array(parameters[name], order="C")
        multiply(gemm_address(a.dtype), 0, b, a, 1, total)
        return total

    return replace(config, lora=0), ReadLater(table, read)


def digest(parameters: Mapping[str, np.ndarray]) -> str:
    """Return the SHA-256 of a model, 64 hexadecimal digits: equal digests mean models that are equal to the last bit.
    Names, dtypes, shapes and values count; the order of the tensors does not.

    >>> import daskgpt
    >>> one, other = (daskgpt.initial_parameters(daskgpt.preset("tiny"), seed) for seed in (0, 1))
    >>> daskgpt.digest(one) == daskgpt.digest(dict(reversed(one.items()))), daskgpt.digest(one) == daskgpt.digest(other)
    (True, False)
    """
    sha256 = hashlib.sha256()
    for name in sorted(parameters):
        values = np.asarray(parameters[name])
        sha256.update(f"{name} {values.dtype.str} {values.shape}\n".encode())
        sha256.update(np.ascontiguousarray(values).reshape(-1).view(np.uint8).data)
    return sha256.hexdigest()


def check_parameters(
    config: ModelConfig,
    parameters: Mapping[str, Any],
    kinds: tuple[type, ...] = (np.ndarray,),
    dtypes: tuple[str, ...] = ("float32",),
) -> None:
    """Check that names and shapes are those of the table, and kinds and dtypes of the arrays among those allowed.

    Errors   ValueError naming the first tensor that is missing, unknown or of another shape; TypeError for another
             dtype, or if the arguments are not a configuration and a mapping of arrays
    """
    where, shapes = "check_parameters", parameter_shapes(check_config("check_parameters", config))
    by_name, source = "parameters must be NumPy arrays by name", "Take them from daskgpt.load or a run's result."
    kind = {"parameters": type(parameters).__name__}
    require(isinstance(parameters, Mapping), where, by_name, kind, source, TypeError)
    for name in [*shapes, *parameters]:
        if name not in parameters or name not in shapes:
            got = f"{name}, which is {'missing' if name not in parameters else 'unknown'}"
            adapter = name in parameters and str(name).endswith((LORA_A, LORA_B))
            advice = "Leave adapters out: daskgpt.fit begins them at random." if adapter else "Compare PARAMETERS."
            raise refusal(ValueError, where, "names must be the table's", got, advice)
        value = parameters[name]  # once: each lookup may read a file or fetch
        require(isinstance(value, kinds), where, by_name, {name: type(value).__name__}, source, TypeError)
        shaped, shape = f"{name} must have shape {shapes[name]}", tuple(value.shape)
        require(shape == shapes[name], where, shaped, {"shape": shape}, "Compare the config.")
        rule, advice = f"{name} must be {' or '.join(dtypes)}", f"Convert it with .astype(np.{dtypes[0]})."
        require(value.dtype.name in dtypes, where, rule, {"dtype": value.dtype}, advice, TypeError)


def check_config(where: str, config: Any) -> ModelConfig:
    """Return a model's configuration.

    Errors   TypeError for anything else, such as the name of a preset
    """
    rule, got = "the configuration must be a ModelConfig", {"config": repr(config)[:40]}
    require(isinstance(config, ModelConfig), where, rule, got, "Give daskgpt.preset(name).", TypeError)
    return cast(ModelConfig, config)


def check_finite(where: str, arrays: Mapping[str, np.ndarray]) -> None:
    """Check that every number is finite.

    Errors   ValueError naming the first array with one that is not
    """
    for name, values in arrays.items():
        count = values.size - int(np.count_nonzero(np.isfinite(values)))
        rule, advice = f"every number of {name} must be finite", "Training diverged, or a file is damaged: use another."
        require(not count, where, rule, {"not finite": count}, advice)
