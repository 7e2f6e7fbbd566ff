"""Models as safetensors: Hugging Face's folders of GPT-2, Llama and Qwen, and this program's own files.

Hugging Face's folders have config.json, and optional files of a tokenizer. This program's own file has its
configuration as metadata.
"""

from __future__ import annotations

import json
import re
import zlib
from collections import ChainMap
from collections.abc import Mapping
from dataclasses import asdict, dataclass, replace
from functools import lru_cache
from pathlib import Path
from typing import Any

import numpy as np

from daskgpt import __version__
from daskgpt.config.errors import refusing, require, short
from daskgpt.config.files import appearing, digest_of_file, write_file
from daskgpt.config.model import ModelConfig
from daskgpt.config.settings import require_allowed
from daskgpt.formats import safetensors
from daskgpt.formats.encoding import is_learned, know, known_encoding
from daskgpt.formats.layouts import (
    FAMILIES,
    FOREIGN,
    GPT2,
    LLAMA,
    ROPE_SCALING,
    explicit,
    family_of,
    open_tensors,
    parts_of,
    published_shapes,
)
from daskgpt.formats.safetensors import ENDING, ENTRY, INDEX_ENDING, TensorFiles
from daskgpt.formats.stored_model import ADVICE, READABLE, FilePath, StoredModel, config_from, held, read_json
from daskgpt.formats.tokenizer_folder import encoding_in
from daskgpt.model.parameters import trained_tensors

CONFIG, GENERATION = "config.json", "generation_config.json"
MODEL, INDEX = f"model{ENDING}", f"model{INDEX_ENDING}"
READ, WRITE = "read_huggingface", "write_huggingface"


@dataclass(frozen=True)
class Fields:
    """Fields of config.json for a type of models.

    model    class of transformers
    sizes    whole numbers, and their names in ModelConfig
    numbers  the same for numbers that may be missing or null
    meant    fields that change the computation, with the values that this program supports; the first one is the
             default of a file without the field
    """

    model: str
    sizes: dict[str, str]
    numbers: dict[str, str]
    meant: Mapping[str, tuple[object, ...]]


_GPT2_SIZES = {"n_layer": "blocks", "n_head": "heads", "n_embd": "channels"}
_GPT2_SIZES |= {"vocab_size": "vocabulary", "n_positions": "positions"}
# `reorder_and_upcast_attn` is not among them: it requires attention's scores in float32, as they are here.
_GPT2_MEANT: dict[str, tuple[object, ...]] = {
    "activation_function": ("gelu_new", "gelu_pytorch_tanh"),
    "layer_norm_epsilon": (1e-5,),
    "scale_attn_weights": (True,),
    "scale_attn_by_inverse_layer_idx": (False,),
    "add_cross_attention": (False,),
    "tie_word_embeddings": (True,),
    "pruned_heads": ({}, None),
    "quantization_config": (None,),
}
_LLAMA_SIZES = {"num_hidden_layers": "blocks", "num_attention_heads": "heads", "hidden_size": "channels"}
_LLAMA_SIZES |= {"vocab_size": "vocabulary", "max_position_embeddings": "positions", "intermediate_size": "hidden"}
_LLAMA_NUMBERS = {"num_key_value_heads": "kv_heads", "head_dim": "head_size"}
_LLAMA_NUMBERS |= {"rope_theta": "rope_theta", "rms_norm_eps": "norm_eps"}
LLAMA3 = "llama3"  # a kind of rotary positions, with these numbers
_SCALING = {"factor": "rope_factor", "low_freq_factor": "rope_low", "high_freq_factor": "rope_high"}
_SCALING |= {"original_max_position_embeddings": "rope_positions"}
_ROTARY_MEANT: dict[str, tuple[object, ...]] = {
    "hidden_act": ("silu", "swish"),
    "tie_word_embeddings": (False, True),
    "rope_type": ("default", LLAMA3),
    "type": ("default", LLAMA3),  # the same in older files
    "partial_rotary_factor": (1.0, 1),
    "quantization_config": (None,),
}
_LLAMA_MEANT = _ROTARY_MEANT | {"attention_bias": (False, True), "mlp_bias": (False, True)}
_LLAMA_MEANT |= {"rope_interleaved": (False,), "sliding_window": (None,), "num_local_experts": (None,)}
_QWEN3_MEANT = _ROTARY_MEANT | {"use_sliding_window": (False,), "attention_bias": (False,)}
QWEN2 = "qwen2"  # a Llama with biases of queries, keys and values
QWEN3 = "qwen3"  # a Llama with normalized queries and keys
FIELDS = {
    GPT2: Fields("GPT2LMHeadModel", _GPT2_SIZES, {"n_inner": "hidden"}, _GPT2_MEANT),
    LLAMA: Fields("LlamaForCausalLM", _LLAMA_SIZES, _LLAMA_NUMBERS, _LLAMA_MEANT),
    QWEN2: Fields("Qwen2ForCausalLM", _LLAMA_SIZES, _LLAMA_NUMBERS, _ROTARY_MEANT | {"use_sliding_window": (False,)}),
    QWEN3: Fields("Qwen3ForCausalLM", _LLAMA_SIZES, _LLAMA_NUMBERS, _QWEN3_MEANT),
}
LLAMA_EPSILON = 1e-6  # of a file without the field
# Tensors that follow from the configuration, which older files hold for each block: triangles of ones, frequencies.
MASK = re.compile(r"h\.\d+\.attn\.(masked_)?bias|model\.layers\.\d+\.self_attn\.rotary_emb\.inv_freq")
HEAD = "lm_head.weight"
DAMAGED = "The folder holds another kind of model, or is damaged: copy it again."

# This program's own file.
CHECK = "check"  # a part of the entry: a checksum of the others, since nothing else reveals a flipped bit there
LEARNED = "vocabulary"  # a part of the entry, if the vocabulary was learned: the content of its file
VERSION = 1
BASE = f"base{ENDING}"  # the model that a run's adapters adapt
ADAPTED = "base"  # a part of the entry, if the model has adapters: the SHA-256 of BASE
READ_OWN, WRITE_OWN = "read_run_model", "write_run_model"
ALONE = "Another program wrote it: a model of Hugging Face is read as a folder with config.json."


def is_huggingface(path: Path) -> bool:
    """Return whether a path is a folder of a Hugging Face model, or a file of the model in one."""
    if path.is_dir():
        return (path / CONFIG).is_file()
    return path.name == CONFIG or (path.name in (MODEL, INDEX) and path.with_name(CONFIG).is_file())


def open_huggingface(path: FilePath) -> StoredModel:
    """Open a GPT-2, Llama, Qwen2 or Qwen3 of Hugging Face. No tensor is read.

    path     the folder, or a file in it

    Dtype    float32, float16 and bfloat16 in the files
    Errors   FileNotFoundError if the folder has no config.json or no model.safetensors and no index of one; ValueError
             for a configuration that this program cannot express, with the field, and for tensors that are missing,
             unknown, duplicated, or of another shape or dtype
    Source   transformers, GPT2Config and GPT2LMHeadModel, and those of Llama, Qwen2 and Qwen3
    """
    path = Path(path)
    folder = path if path.is_dir() else path.parent
    family, config = _config_of(folder / CONFIG)
    file = safetensors.tensor_path(folder)
    rule = f"the folder must hold {MODEL}, or {INDEX}"
    require(file.is_file(), READ, rule, {"path": folder}, ADVICE, FileNotFoundError)
    files, encoding, length = TensorFiles(file, READ), "", 0
    if ENTRY in files.metadata:  # this program has written the file
        stored_config, encoding, length, _ = read_metadata(file, files.metadata)
        stored_config = replace(stored_config.shortest(), padded_vocabulary=0)  # config.json has none
        rule = f"{CONFIG} and the file's own metadata must describe one model"
        require(stored_config == config, READ, rule, {"path": file, "metadata": stored_config, CONFIG: config}, DAMAGED)
    stored: dict[str, Any] = {}
    for name, tensor in files.items():
        bare = _bare(name, family)
        if not MASK.fullmatch(bare):
            got = {"path": file, "tensor": short(bare)}
            require(bare not in stored, READ, "every tensor must occur once", got, DAMAGED)
            stored[bare] = tensor
    if config.head == "tied":
        stored.pop(HEAD, None)  # as transformers does, whatever it holds
    parameters = open_tensors(file, stored, config, READ, lambda tensor: parts_of(config, tensor, family))
    dtypes = ", ".join(sorted({READABLE[tensor.dtype] for tensor in stored.values()}))
    listed = dict.fromkeys((folder / CONFIG, file, *files.files))
    encoding = encoding or encoding_in(folder)
    return StoredModel(config, parameters, encoding, length, "Hugging Face", dtypes, tuple(listed))


def _bare(name: str, family: str) -> str:
    """Return the name of a tensor as models with a head have it, which may lack the name of the module around it."""
    if family == GPT2:
        return name.removeprefix("transformer.")
    return name if name.startswith(("model.", HEAD)) else f"model.{name}"


def _config_of(path: Path) -> tuple[str, ModelConfig]:
    """Return the family and the configuration in config.json, if this program can express it."""
    settings = read_json(path, READ, CONFIG)

    def check(name: str, right: bool, rule: str, advice: str) -> None:
        value = short(_json(settings[name])) if name in settings else "missing"
        require(right, READ, f"{name} must be {rule}", {"path": path, name: value}, advice)

    model_type = str(settings.get("model_type"))
    check("model_type", model_type in FIELDS, " or ".join(FIELDS), "Other models are not supported.")
    family, kind = GPT2 if model_type == GPT2 else LLAMA, FIELDS[model_type]
    for name in kind.sizes:
        size = settings.get(name)
        check(name, type(size) is int and 1 <= size < 2**31, "a whole number from 1 on", DAMAGED)
    rope: Any = {}
    for name in ("rope_parameters", "rope_scaling"):  # newer and older files; transformers takes the last one
        rope = settings.get(name) or rope
        check(name, isinstance(rope, dict), "an object", DAMAGED)
    turned = {name for name in rope if name not in settings or name.startswith("rope_") or name in _SCALING}
    settings |= {name: rope[name] for name in turned}
    for name, values in kind.meant.items():
        value = settings.get(name, values[0])
        right = any(type(value) is type(one) and value == one for one in values)
        check(name, right, " or ".join(map(_json, values)), "Other values are not supported.")
    names = kind.sizes | kind.numbers
    if family == LLAMA and settings.get("rope_type", settings.get("type")) == LLAMA3:
        for name in _SCALING:
            check(name, type(settings.get(name)) in (int, float), "a number", DAMAGED)
        names |= _SCALING
    made = {field: settings[name] for name, field in names.items() if settings.get(name) is not None}
    if family == LLAMA:
        with_bias, same = settings.get("attention_bias", False), "the same as attention_bias"
        check("mlp_bias", settings.get("mlp_bias", False) == with_bias, same, "Other values are not supported.")
        bias = "qkv" if model_type == QWEN2 else "all" if with_bias else "none"
        choices = {"bias": bias, "head": "tied" if settings.get("tie_word_embeddings", False) else "untied"}
        choices["qk_norm"] = "rmsnorm" if model_type == QWEN3 else "none"
        made = {"norm_eps": LLAMA_EPSILON} | FAMILIES[LLAMA][1] | choices | made
    return family, config_from(made, path, READ, f"{CONFIG} must describe a model")


def _json(value: object) -> str:
    return value if isinstance(value, str) else json.dumps(value)


def write_huggingface(
    folder: FilePath,
    model: StoredModel,
    tokenizer: Mapping[str, bytes],
    *,
    end_of_text: int | None = None,
    bos: int | None = None,
) -> None:
    """Write a folder that transformers reads; it appears under its name only when it is complete.

    folder        does not exist yet, or is empty
    tokenizer     files to add to the model, by name
    end_of_text   id of the token, None if unknown
    bos           id of the token that begins a text, None if there is none: end-of-text separates texts then

    Layout   model.safetensors as `write_run_model` writes it, without rows of padding; float32
    Cost     memory of the largest tensor, if it is not float32 in `model`
    Errors   ValueError if the folder exists already, and for a configuration that config.json cannot express;
             FileNotFoundError if its parent is missing; OSError if the system refuses
    Source   transformers, GPT2Config, LlamaConfig, Qwen2Config and Qwen3Config
    """
    family = family_in_folder(model.config, WRITE)
    model = replace(model, config=replace(model.config, padded_vocabulary=model.config.vocabulary))
    ids: dict[str, object] = {"bos_token_id": end_of_text if bos is None else bos, "eos_token_id": end_of_text}
    with appearing(folder, WRITE) as inside:
        write_run_model(inside / MODEL, model, family)
        texts = {
            CONFIG: json_text(_fields(model.config, family) | ids),
            GENERATION: json_text(ids | {"_from_model_config": True}),
        }
        for name, content in (texts | dict(tokenizer)).items():
            write_file(inside / name, content, WRITE)


def family_in_folder(config: ModelConfig, where: str) -> str:
    """Return the family of a model whose folder can be written. Errors   as of `family_of`"""
    is_qwen3 = _model_type(config, LLAMA) == QWEN3
    return family_of(replace(config, qk_norm="none") if is_qwen3 else config, where, CONFIG)


def _model_type(config: ModelConfig, family: str) -> str:
    if family == LLAMA and config.qk_norm != "none" and config.bias == "none":
        return QWEN3
    return QWEN2 if family == LLAMA and config.bias == "qkv" else family


def _fields(config: ModelConfig, family: str) -> dict[str, object]:
    model_type = _model_type(config, family)
    kind, settings = FIELDS[model_type], explicit(config)
    sizes = {name: settings[field] for name, field in (kind.sizes | kind.numbers).items()}
    meant = {name: values[0] for name, values in kind.meant.items() if values[0] not in ({}, None)}
    # Dropout belongs to a run, not to its model; 0.02 is the standard deviation of initial values.
    others: dict[str, object] = {"attn_pdrop": 0.0, "embd_pdrop": 0.0, "resid_pdrop": 0.0, "initializer_range": 0.02}
    if family == LLAMA:
        rope = {"rope_type": meant.pop("rope_type"), "rope_theta": config.rope_theta}
        scaled = any(settings[field] != getattr(ModelConfig, field) for field in ROPE_SCALING)
        if scaled:
            rope |= {"rope_type": LLAMA3} | {name: settings[field] for name, field in _SCALING.items()}
        others = {"rope_parameters": rope, "rope_scaling": rope if scaled else None}
        others |= {"attention_dropout": 0.0, "initializer_range": 0.02}
        others |= {"tie_word_embeddings": config.head == "tied"}
        others |= {name: config.bias == "all" for name in ("attention_bias", "mlp_bias") if name in meant}
        del meant["type"]
    names = {"architectures": [kind.model], "model_type": model_type, "dtype": "float32", "torch_dtype": "float32"}
    return names | sizes | meant | others | {"use_cache": True, "daskgpt_version": __version__}


def json_text(content: Mapping[str, object]) -> bytes:
    """Return an object as the JSON files of these folders have it."""
    return json.dumps(content, indent=2, sort_keys=True).encode() + b"\n"


# This program's own file


def write_run_model(path: FilePath, model: StoredModel, family: str = GPT2) -> str:
    """Write a model as one file, which appears under its name only when it is complete and on the disk. Of a model with
    adapters, the file has these alone, and those beside it share BASE, which has the other tensors.

    family   whose names and layout of tensors the file has; GPT-2's can hold every model

    Layout   Hugging Face's, in the table's order; metadata "daskgpt": configuration, encoding with the content of a
             learned one, sequence length, and of adapters the SHA-256 of BASE
    Dtype    float32
    Cost     16 MiB, and a tensor if tensors are read later
    Returns  the SHA-256 of the file
    Errors   TypeError for a tensor of another shape or dtype; FileNotFoundError if the folder is missing
    """
    config, table = model.config, trained_tensors(model.config)
    places = {part.name: (tensor, part) for tensor in table.values() for part in parts_of(config, tensor, family)}

    def view(name: str) -> np.ndarray:
        tensor, part = places[name]
        values = held(tensor.shape, model.parameters[tensor.name])[part.rows]
        if part.transposed:
            return values.T
        # Padding is left out if all of its bits are 0, as training leaves them; another program's values are kept.
        rows = published_shapes(config, tensor, part)[0][0]
        return values if values[rows:].tobytes().strip(b"\0") else values[:rows]

    shapes: dict[str, tuple[int, ...]] = {}
    for name, (tensor, part) in places.items():
        possible = published_shapes(config, tensor, part)
        # Only the shape of the token table depends on its values.
        shapes[name] = possible[0] if len(possible) == 1 else view(name).shape
    entry: dict[str, object] = {"version": VERSION, "daskgpt": __version__, "model": asdict(config)}
    entry |= {"encoding": model.encoding, "sequence_length": model.sequence_length}
    if is_learned(model.encoding):  # no other place has it
        entry[LEARNED] = known_encoding(model.encoding).content
    if config.lora:
        entry[ADAPTED] = model.base
    # transformers reads a file only if its metadata names a library; the layout is the same for all.
    metadata = {"format": "pt", ENTRY: json.dumps(entry | {CHECK: _checksum(entry)})}
    return safetensors.write_tensor_file(path, shapes, view, metadata, where=WRITE_OWN)


def _checksum(entry: Mapping[str, object]) -> int:
    return zlib.crc32(json.dumps(entry, sort_keys=True).encode())


def open_run_model(path: FilePath) -> StoredModel:
    """Open a model that `write_run_model` wrote. All headers are checked before a tensor is read.

    The tensors that adapters adapt are those of BASE, beside the folder of the file.

    Shapes   those of parameter_shapes; rows of padding that the file leaves out are 0
    Dtype    float32
    Cost     of adapters: reads BASE once in a process
    Errors   FileNotFoundError, also for adapters beside another BASE than theirs; ValueError for a file that is no
             safetensors, truncated, or longer than its header says, for metadata without a configuration, and for
             tensors that are missing, unknown, or of another shape or dtype
    """
    path = Path(path)
    files = TensorFiles(path, READ_OWN)
    config, encoding, length, sha256 = read_metadata(path, files.metadata)
    parameters: Mapping[str, np.ndarray] = open_tensors(
        path, files, config, READ_OWN, lambda tensor: parts_of(config, tensor)
    )
    paths: tuple[Path, ...] = (path,)
    if config.lora:
        places = [folder.parent.parent / BASE for folder in (path.resolve(), path.absolute())]
        file = next(filter(Path.is_file, places), places[0])
        is_there = file.is_file() and file.resolve() != path.resolve()
        rule = "adapters must have the model that they were trained with beside their folder"
        got = {"path": path, "model": f"{file} ({'another one, or damaged' if is_there else 'missing'})"}
        refused = READ_OWN, rule, got, "Copy the whole run folder.", FileNotFoundError
        require(is_there and sha256 in ("", digest_of_base(file)), *refused)  # early files do not name theirs
        base = open_run_model(file)
        require(base.config == replace(config, lora=0), *refused)
        parameters, paths = ChainMap(parameters, base.parameters), (path, *base.files)  # type: ignore[arg-type]
    return StoredModel(config, parameters, encoding, length, "daskgpt", "float32", paths, base=sha256)


def digest_of_base(path: Path) -> str:
    """Return the SHA-256 of a file, which is read again only if it has changed. Errors   OSError"""
    status = path.stat()
    return _digest(path, status.st_ino, status.st_size, status.st_mtime_ns, status.st_ctime_ns)


@lru_cache
def _digest(path: Path, *version: int) -> str:
    return digest_of_file(path)


def read_metadata(path: Path, metadata: Mapping[str, str]) -> tuple[ModelConfig, str, int, str]:
    """Return configuration, encoding, sequence length and, of adapters, the SHA-256 of BASE in the metadata of a file.

    Errors   ValueError if they are missing or changed
    """
    rule = f"the metadata must have an entry {ENTRY} with the model's configuration"
    got: dict[str, object] = {"path": path, "entries": short(", ".join(sorted(metadata)), 80) or "none"}
    require(ENTRY in metadata, READ_OWN, rule, got, ALONE)
    rule = f"the metadata's {ENTRY} must match its checksum"
    errors = (ValueError, RecursionError, AttributeError, TypeError, KeyError)
    with refusing(errors, READ_OWN, rule, {"path": path}, FOREIGN):
        entry = json.loads(metadata[ENTRY])
        check = entry.pop(CHECK)
    require(check == _checksum(entry), READ_OWN, rule, {"path": path, CHECK: short(check)}, FOREIGN)
    rule, advice = f"the version must be {VERSION}", "Read it with the daskgpt that wrote it, or a newer one."
    require(entry["version"] == VERSION, READ_OWN, rule, {"path": path, "version": short(entry["version"])}, advice)
    if LEARNED in entry:
        know(entry[LEARNED], str(path))
    rule = "the metadata must describe a model that is supported"
    with refusing((ValueError, TypeError), READ_OWN, rule, {"path": path}, advice):
        config = ModelConfig(**entry["model"])  # a setting that is newer than the file has its default
        require_allowed(map(str, asdict(config).values()), READ_OWN)
    return config, entry["encoding"], entry["sequence_length"], entry.get(ADAPTED, "")
