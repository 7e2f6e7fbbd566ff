"""Hugging Face's GPT-2: a folder with config.json, the tensors as safetensors, and optional files of a tokenizer."""

from __future__ import annotations

import json
import os
import re
from collections.abc import Mapping
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import numpy as np

from daskgpt import __version__
from daskgpt.config.errors import refusal, require
from daskgpt.config.files import appearing, replacing
from daskgpt.config.model import GPT2Config
from daskgpt.formats.run_model import ENTRY, metadata_of, named_tensors, open_tensors, read_metadata
from daskgpt.formats.safetensors import ENDING, INDEX_ENDING, SHARD_BYTES, StoredTensor, TensorFiles, write_tensor_files
from daskgpt.formats.stored_model import READABLE, StoredModel, read_json, require_default_settings, short
from daskgpt.formats.vocabulary import encoding_in

CONFIG, GENERATION = "config.json", "generation_config.json"
MODEL, INDEX = f"model{ENDING}", f"model{INDEX_ENDING}"
PICKLED = ("pytorch_model.bin", "pytorch_model.bin.index.json")
READ, WRITE = "read_huggingface", "write_huggingface"

# Fields of config.json with the sizes of the model, and their names in GPT2Config.
SIZES = {"n_layer": "blocks", "n_head": "heads", "n_embd": "channels"}
SIZES |= {"vocab_size": "vocabulary", "n_positions": "positions"}
# Fields that change the computation of a model, with the values that this program supports; the first one is the
# default of a file without the field. `reorder_and_upcast_attn` is not among them: it requires attention's scores in
# float32, as they are here.
MEANT: dict[str, tuple[Any, ...]] = {
    "activation_function": ("gelu_new", "gelu_pytorch_tanh"),
    "layer_norm_epsilon": (1e-5,),
    "scale_attn_weights": (True,),
    "scale_attn_by_inverse_layer_idx": (False,),
    "add_cross_attention": (False,),
    "tie_word_embeddings": (True,),
    "pruned_heads": ({}, None),
    "quantization_config": (None,),
}
# Triangles of ones that older files hold for each block.
MASK = re.compile(r"h\.\d+\.attn\.(masked_)?bias")
HEAD, PREFIX = "lm_head.weight", "transformer."
DAMAGED = "The folder holds another kind of model, or is damaged: copy it again."


def is_huggingface(path: Path) -> bool:
    """Return whether a path is such a folder, or the model's file in one."""
    if path.is_dir():
        return (path / CONFIG).is_file()
    return path.name == CONFIG or (path.name in (MODEL, INDEX) and path.with_name(CONFIG).is_file())


def open_huggingface(path: str | os.PathLike[str]) -> StoredModel:
    """Open a GPT-2 of Hugging Face. No tensor is read except an output layer, which must equal wte.weight.

    path     the folder, or a file in it

    Dtype    float32, float16 and bfloat16 in the files
    Errors   FileNotFoundError if the folder has no config.json or no model.safetensors and no index of one; ValueError
             for a configuration that this program cannot express, with the field, and for tensors that are missing,
             unknown, duplicated, or of another shape or dtype
    Source   transformers, GPT2Config and GPT2LMHeadModel
    """
    path = Path(path)
    folder = path if path.is_dir() else path.parent
    config = _config_of(folder / CONFIG)
    files = TensorFiles(_model_in(folder), READ)
    encoding, length = "", 0
    if ENTRY in files.metadata:  # this program has written the file
        own, encoding, length = read_metadata(files.path, files.metadata)
        # config.json has no padding.
        said, meant = (asdict(one) | {"padded_vocabulary": 0} for one in (own, config))
        wrong = {n: f"{said[n]} in the metadata, {meant[n]} in {CONFIG}" for n in said if said[n] != meant[n]}
        rule, got = f"{CONFIG} and the file's own metadata must describe one model", {"path": files.path, **wrong}
        require(not wrong, READ, rule, got, DAMAGED)
    stored: dict[str, StoredTensor] = {}
    for name, tensor in files.items():
        bare = name.removeprefix(PREFIX)
        if not MASK.fullmatch(bare):
            rule, got = "every tensor must occur once", {"path": files.path, "tensor": short(bare)}
            require(bare not in stored, READ, rule, got, DAMAGED)
            stored[bare] = tensor
    head = stored.pop(HEAD, None)
    parameters = open_tensors(files.path, stored, config, READ)
    if head:  # this program has one table for both
        table = stored["wte.weight"]
        same = head.dtype == table.dtype and np.array_equal(head.read(), table.read())
        rule = f"{HEAD} must equal wte.weight, value for value: this program's output layer is the embedding"
        require(same, READ, rule, {"path": files.path, HEAD: "another"}, "A model with two tables is not supported.")
    dtypes = ", ".join(sorted({READABLE[tensor.dtype] for tensor in stored.values()}))
    listed = (folder / CONFIG, *([files.path] if files.path.name == INDEX else []), *files.files)
    encoding = encoding or encoding_in(folder)
    return StoredModel(config, parameters, encoding, length, "Hugging Face", dtypes, listed)


def _model_in(folder: Path) -> Path:
    """Return the file of tensors, or the index of several. If both exist, the file is used, as by transformers."""
    for name in (MODEL, INDEX):
        if (folder / name).is_file():
            return folder / name
    pickled = any((folder / name).is_file() for name in PICKLED)
    advice = "`python -m daskgpt.convert --help` shows how to convert pytorch_model.bin, which is not opened here."
    advice = advice if pickled else f"There is no model beside {CONFIG}: copy the folder again."
    rule = f"the folder must hold {MODEL}, or {INDEX}"
    raise refusal(FileNotFoundError, READ, rule, {"path": folder}, advice)


def _config_of(path: Path) -> GPT2Config:
    """Return the configuration in config.json, if this program can express it."""
    known = read_json(path, READ, CONFIG)

    def check(name: str, right: bool, rule: str, advice: str) -> None:
        value = short(_json(known[name])) if name in known else "missing"
        require(right, READ, f"{name} must be {rule}", {"path": path, name: value}, advice)

    check("model_type", known.get("model_type") == "gpt2", "gpt2", "Other models are not supported.")
    for name in SIZES:
        size = known.get(name)
        check(name, type(size) is int and 1 <= size < 2**31, "a whole number from 1 on", DAMAGED)
    for name, values in (MEANT | {"n_inner": (None, 4 * known["n_embd"])}).items():
        value = known.get(name, values[0])
        right = any(type(value) is type(one) and value == one for one in values)
        check(name, right, " or ".join(map(_json, values)), "Other values are not supported.")
    try:
        return GPT2Config(**{own: known[name] for name, own in SIZES.items()})
    except ValueError as error:
        rule = f"{CONFIG} must describe a GPT-2"
        raise refusal(ValueError, READ, rule, {"path": path}, str(error)) from error


def _json(value: Any) -> str:
    return value if isinstance(value, str) else json.dumps(value)


def write_huggingface(
    folder: str | os.PathLike[str],
    model: StoredModel,
    tokenizer: Mapping[str, bytes],
    *,
    end_of_text: int | None = None,
    shard_bytes: int = SHARD_BYTES,
) -> None:
    """Write a folder that transformers reads; it appears under its name only when it is complete.

    folder        does not exist yet, or is empty
    tokenizer     files to add to the model, by name
    end_of_text   id of the token, None if unknown

    Layout   model.safetensors as of write_run_model, without rows of padding; float32
    Cost     the largest tensor, where it is not float32 in model
    Errors   ValueError if the folder exists already, and for a configuration that config.json cannot express;
             FileNotFoundError if its parent is missing; OSError if the system refuses
    Source   transformers, GPT2Config
    """
    model.check(WRITE)
    require_default_settings(model.config, {*SIZES.values(), "padded_vocabulary"}, WRITE, CONFIG)
    model = replace(model, config=replace(model.config, padded_vocabulary=model.config.vocabulary))
    tensors, metadata = named_tensors(model), metadata_of(model)
    ids = {"bos_token_id": end_of_text, "eos_token_id": end_of_text}
    with appearing(folder, WRITE) as inside:
        write_tensor_files(inside, tensors, metadata, where=WRITE, shard_bytes=shard_bytes)
        texts = {CONFIG: _text(_fields(model.config) | ids), GENERATION: _text({"_from_model_config": True} | ids)}
        for name, content in (texts | dict(tokenizer)).items():
            with replacing(inside / name, WRITE) as file:
                file.write(content)


def _fields(config: GPT2Config) -> dict[str, Any]:
    sizes = {name: getattr(config, own) for name, own in SIZES.items()}
    meant = {name: values[0] for name, values in MEANT.items() if values[0] not in ({}, None)}
    # Dropout belongs to a run, not to its model; 0.02 is the standard deviation of initial values.
    others = {"attn_pdrop": 0.0, "embd_pdrop": 0.0, "resid_pdrop": 0.0, "initializer_range": 0.02, "n_inner": None}
    names = {"architectures": ["GPT2LMHeadModel"], "model_type": "gpt2", "dtype": "float32", "torch_dtype": "float32"}
    return names | sizes | meant | others | {"use_cache": True, "daskgpt_version": __version__}


def _text(known: Mapping[str, Any]) -> bytes:
    return json.dumps(known, indent=2, sort_keys=True).encode() + b"\n"
