"""Hugging Face's GPT-2: a folder with config.json, the tensors as safetensors, and perhaps files of a tokenizer."""

from __future__ import annotations

import json
import os
import re
from collections.abc import Mapping
from dataclasses import fields, replace
from pathlib import Path
from typing import Any

import numpy as np

from daskgpt import __version__
from daskgpt.config.errors import refusal, require
from daskgpt.config.files import appearing, replacing
from daskgpt.config.model import GPT2Config
from daskgpt.formats.gpt2_tokenizer import read_tokenizer
from daskgpt.formats.opened import OpenedModel
from daskgpt.formats.published import READABLE, published_shapes, same_bits, view_published
from daskgpt.formats.run_model import ENTRY, metadata_of, named_tensors, said_of
from daskgpt.formats.safetensors_files import (
    ENDING,
    INDEX_ENDING,
    SHARD_BYTES,
    TensorFiles,
    read_json,
    short,
    write_tensor_files,
)
from daskgpt.formats.vocabulary_file import know_vocabulary, written_vocabulary
from daskgpt.model.parameters import Tensor, tensors

CONFIG, GENERATION = "config.json", "generation_config.json"
MODEL, INDEX = f"model{ENDING}", f"model{INDEX_ENDING}"
PICKLED = ("pytorch_model.bin", "pytorch_model.bin.index.json")
READ, WRITE = "read_huggingface", "write_huggingface"

# Fields of config.json that say how large the model is, and what GPT2Config calls them.
SIZES = {
    "n_layer": "blocks",
    "n_head": "heads",
    "n_embd": "channels",
    "vocab_size": "vocabulary",
    "n_positions": "positions",
}
# Fields that change what a model computes, with the values that mean what this program computes; the first of them is
# what a file without the field means. `reorder_and_upcast_attn` is not among them: it asks for attention's scores in
# float32, which they are here.
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
DAMAGED = "The folder is of another kind of model, or damaged: copy it again."


def is_huggingface(path: Path) -> bool:
    """Whether a path is such a folder, or the model's file in one."""
    if path.is_dir():
        return (path / CONFIG).is_file()
    return path.name == CONFIG or (path.name in (MODEL, INDEX) and path.with_name(CONFIG).is_file())


def open_huggingface(path: str | os.PathLike[str]) -> OpenedModel:
    """A GPT-2 of Hugging Face's, none of whose tensors is read yet, but for an output layer, which must be wte.weight.

    path     the folder, or a file in it

    Dtype    float32, float16 and bfloat16 in the files
    Errors   FileNotFoundError where the folder has no config.json or no model.safetensors and no index of one;
             ValueError for a configuration that this program cannot express, with the field, and for tensors that are
             missing, unknown, twice there, or of another shape or dtype
    Source   transformers, GPT2Config and GPT2LMHeadModel
    """
    path = Path(path)
    folder = path if path.is_dir() else path.parent
    config = _config_of(folder / CONFIG)
    files = TensorFiles(_model_in(folder), READ)
    encoding, length = _said(files, config)
    encoding = encoding or encoding_in(folder)
    stored = _names(files, config)
    for name, tensor in tensors(config).items():
        _check(files, stored[name], published_shapes(config, tensor)[0])
    if HEAD in stored:
        _check_head(files, stored)
    dtypes = sorted({READABLE[files.dtype(stored[name])] for name in stored})

    def read(tensor: Tensor) -> np.ndarray:
        name = stored[tensor.name]
        return view_published(tensor, files.read(name), files.dtype(name))

    listed = [folder / CONFIG, *([files.path] if files.path.name == INDEX else []), *files.files]
    return OpenedModel(config, listed, "Hugging Face", ", ".join(dtypes), read, encoding, length)


def encoding_in(folder: Path) -> str:
    """Return the name of the encoding that a folder's tokenizer is, known from here on; "" where there is none.

    Errors   ValueError for a tokenizer of another kind than GPT-2's
    """
    found = read_tokenizer(folder)
    return know_vocabulary(written_vocabulary(*found), str(folder)) if found else ""


def _model_in(folder: Path) -> Path:
    """The file of tensors, or the index of several. Where there are both, transformers takes the file too."""
    found = [folder / name for name in (MODEL, INDEX) if (folder / name).is_file()]
    if found:
        return found[0]
    pickled = [name for name in PICKLED if (folder / name).is_file()]
    rule = f"the folder must hold {MODEL}, or {INDEX}"
    advice = f"There is no model beside {CONFIG}: copy the folder again."
    if pickled:
        advice = (
            f"{pickled[0]} holds pickled Python objects, which are not read here: let transformers write the model "
        )
        advice += "with save_pretrained, as `python -m daskgpt.convert --help` says."
    raise refusal(FileNotFoundError, READ, rule, {"path": folder}, advice)


def _config_of(path: Path) -> GPT2Config:
    """What config.json says, where this program can express it."""
    known = read_json(path, READ, CONFIG)
    rule, advice = "model_type must be gpt2", "Other models are not known here."
    require(known.get("model_type") == "gpt2", READ, rule, _got(path, known, "model_type"), advice)
    for name in SIZES:
        value = known.get(name)
        right = type(value) is int and 1 <= value < 2**31
        require(right, READ, f"{name} must be a whole number from 1 on", _got(path, known, name), DAMAGED)
    hidden = 4 * known["n_embd"]
    for name, values in (MEANT | {"n_inner": (None, hidden)}).items():
        value = known.get(name, values[0])
        right = any(type(value) is type(one) and value == one for one in values)
        rule = f"{name} must be {' or '.join(_json(one) for one in values)}"
        require(right, READ, rule, _got(path, known, name), "This program's GPT-2 has no other.")
    try:
        return GPT2Config(**{own: known[name] for name, own in SIZES.items()})
    except ValueError as error:
        rule = f"{CONFIG} must describe a GPT-2"
        raise refusal(ValueError, READ, rule, {"path": path}, str(error)) from error


def _json(value: Any) -> str:
    return value if isinstance(value, str) else json.dumps(value)


def _got(path: Path, known: Mapping[str, Any], name: str) -> dict[str, Any]:
    return {"path": path, name: short(_json(known[name])) if name in known else "missing"}


def _said(files: TensorFiles, config: GPT2Config) -> tuple[str, int]:
    """Encoding and sequence length, where this program has written the file."""
    if ENTRY not in files.metadata:
        return "", 0
    own, encoding, length = said_of(files.path, files.metadata)
    for f in fields(GPT2Config):
        said, meant = getattr(own, f.name), getattr(config, f.name)
        if f.name == "padded_vocabulary":  # config.json has none
            said = meant = 0
        rule, advice = f"{CONFIG} and the file's own metadata must describe one model", DAMAGED
        got = {"path": files.path, f.name: f"{said} in the metadata, {meant} in {CONFIG}"}
        require(said == meant, READ, rule, got, advice)
    return encoding, length


def _names(files: TensorFiles, config: GPT2Config) -> dict[str, str]:
    """Names of tensors in the files by those of the table, and that of an output layer."""
    stored: dict[str, str] = {}
    for name in files.names:
        bare = name.removeprefix(PREFIX)
        if MASK.fullmatch(bare):
            continue
        rule, got = "every tensor must be there once", {"path": files.path, "tensor": short(bare)}
        require(bare not in stored, READ, rule, got, DAMAGED)
        stored[bare] = name
    # Compared before there is a table of tensors, whose length is what config.json says.
    got = {"path": files.path, "n_layer": config.blocks, "tensors": len(stored)}
    require(config.blocks <= len(stored), READ, "every block must have its tensors", got, DAMAGED)
    expected = tensors(config).keys()
    for kind, wrong in (("missing", expected - stored.keys()), ("unknown", stored.keys() - expected - {HEAD})):
        got = {"path": files.path, kind: f"{short(min(wrong, default=''))} ({len(wrong)} in all)"}
        require(not wrong, READ, f"the tensors must be those of the GPT-2 in {CONFIG}", got, DAMAGED)
    return stored


def _check(files: TensorFiles, name: str, shape: tuple[int, ...]) -> None:
    path, dtype, found = files.path, files.dtype(name), files.shape(name)
    require(found == shape, READ, f"{name} must have shape {shape} in a file", {"path": path, "shape": found}, DAMAGED)
    rule = f"{name} must be {', '.join(READABLE.values())} ({', '.join(READABLE)})"
    require(dtype in READABLE, READ, rule, {"path": path, "dtype": short(dtype)}, "Convert it to float32 first.")


def _check_head(files: TensorFiles, stored: dict[str, str]) -> None:
    """An output layer of its own must be the embedding all the same: this program has one table for both."""
    head, table = stored.pop(HEAD), stored["wte.weight"]
    _check(files, head, files.shape(table))
    same = files.dtype(head) == files.dtype(table) and same_bits(files.read(head), files.read(table))
    rule = f"{head} must be {table} again, value for value: this program's output layer is the embedding"
    require(same, READ, rule, {"path": files.path, head: "another"}, "A model with two tables is not known here.")


def write_huggingface(
    folder: str | os.PathLike[str],
    model: OpenedModel,
    tokenizer: Mapping[str, bytes],
    *,
    end_of_text: int | None = None,
    shard_bytes: int = SHARD_BYTES,
) -> None:
    """Write a folder that transformers reads; it appears under its name only when it is whole.

    folder        is not there yet, or is empty
    tokenizer     files to put beside the model, by name
    end_of_text   its id, None where that is not known

    Layout   model.safetensors as of write_run_model, without rows of padding; float32
    Cost     the largest tensor, where it is not float32 in model
    Errors   ValueError where the folder is there already, and for a configuration that config.json cannot express;
             FileNotFoundError where the folder to put it in is missing; OSError where the system refuses
    Source   transformers, GPT2Config
    """
    for f in fields(model.config):
        value = getattr(model.config, f.name)
        known = f.name in (*SIZES.values(), "padded_vocabulary") or value == f.default
        rule = f"{CONFIG} has no {f.name}, which must be {f.default}"
        advice = "Write a .safetensors file, which holds every configuration."
        require(known, WRITE, rule, {f.name: value}, advice)
    config = replace(model.config, padded_vocabulary=model.config.vocabulary)
    metadata = metadata_of(config, model.encoding, model.sequence_length)
    ids = {"bos_token_id": end_of_text, "eos_token_id": end_of_text}
    generation = {"_from_model_config": True, **ids}
    with appearing(folder, WRITE) as inside:
        write_tensor_files(inside, named_tensors(config, model.read), metadata, where=WRITE, shard_bytes=shard_bytes)
        texts = {CONFIG: _text(_fields(config) | ids), GENERATION: _text(generation)}
        for name, content in (texts | dict(tokenizer)).items():
            with replacing(inside / name, WRITE) as file:
                file.write(content)


def _fields(config: GPT2Config) -> dict[str, Any]:
    sizes = {name: getattr(config, own) for name, own in SIZES.items()}
    meant = {name: values[0] for name, values in MEANT.items() if values[0] not in ({}, None)}
    # Dropout belongs to a run, not to its model; initial values have this standard deviation.
    others = {"attn_pdrop": 0.0, "embd_pdrop": 0.0, "resid_pdrop": 0.0, "initializer_range": 0.02, "n_inner": None}
    names = {"architectures": ["GPT2LMHeadModel"], "model_type": "gpt2", "dtype": "float32", "torch_dtype": "float32"}
    return names | sizes | meant | others | {"use_cache": True, "daskgpt_version": __version__}


def _text(known: Mapping[str, Any]) -> bytes:
    return json.dumps(known, indent=2, sort_keys=True).encode() + b"\n"
