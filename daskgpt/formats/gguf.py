"""GGUF, llama.cpp's files: a GPT-2 or a Llama with its tokenizer in one file, read and written.

The library `gguf` writes the header and knows llama.cpp's names and number formats. The values follow in pieces. Its
own reader is not used: it takes seconds for the tokens of a vocabulary, and looks for values beyond the end of a
damaged file.
"""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Mapping
from dataclasses import replace
from functools import cache
from math import prod
from pathlib import Path
from typing import Any

import numpy as np
from tokenizers import AddedToken

from daskgpt.config.errors import refusing, require, require_package, short
from daskgpt.config.files import replacing
from daskgpt.config.model import ModelConfig
from daskgpt.formats import encoding as encodings
from daskgpt.formats.stored_model import (
    FAMILIES,
    GPT2,
    LLAMA,
    Part,
    StoredModel,
    StoredTensor,
    config_from,
    explicit,
    family_of,
    held,
    mapped,
    open_tensors,
    parts_of,
    pieces,
)
from daskgpt.kernels.rotary import angles_of
from daskgpt.model.parameters import Tensor, tensors

READ, WRITE = "read_gguf", "write_gguf"
MAGIC, VERSIONS = b"GGUF", (2, 3)
# Dtypes of the values of entries, by the numbers of their kinds.
_NUMBERS = {0: "u1", 1: "i1", 2: "<u2", 3: "<i2", 4: "<u4", 5: "<i4", 6: "<f4", 7: "?", 10: "<u8", 11: "<i8", 12: "<f8"}
_TEXT, _ARRAY = 8, 9
_ALIGNMENT = "general.alignment"
# Dtypes of the matrices that are written, with the library's names.
DTYPES = {"float32": "F32", "float16": "F16", "bfloat16": "BF16", "q8_0": "Q8_0"}
FLOAT32 = np.dtype(np.float32)

# Entries, after the family's name, and the settings that they are.
_SIZES = {"block_count": "blocks", "context_length": "positions", "embedding_length": "channels"}
_SIZES |= {"feed_forward_length": "hidden", "attention.head_count": "heads"}
ENTRIES: dict[str, dict[str, str]] = {
    GPT2: _SIZES | {"attention.layer_norm_epsilon": "norm_eps"},
    LLAMA: _SIZES | {"attention.layer_norm_rms_epsilon": "norm_eps"},
}
# Those that a Llama may lack, and the size of a head where it is written again.
OPTIONAL = {"attention.head_count_kv": "kv_heads", "attention.key_length": "head_size", "rope.freq_base": "rope_theta"}
HEAD_SIZES = ("attention.value_length", "rope.dimension_count")
# Entries that change the computation of a model, with the only values that are supported.
MEANT = {"expert_count": 0, "attention.sliding_window": 0, "attention.causal": True, "rope.scaling.type": "none"}
MEANT |= {"rope.scaling.factor": 1.0, "rope.scale_linear": 1.0}  # a factor without a type is one of linear scaling
EMBEDDING, HEAD = "token_embd.weight", "output.weight"
DIVISORS = "rope_freqs.weight"  # what each angle of rotary positions is divided by
TOKENIZER, TEMPLATE = "tokenizer.ggml.", "tokenizer.chat_template"
OTHERS = "Other models are not supported."


def open_gguf(path: Path) -> StoredModel:
    """Open a GPT-2 or a Llama of llama.cpp. No tensor is read.

    Dtype    those of DTYPES and BLOCKS in the file
    Errors   RuntimeError if the library gguf is missing; ValueError for a damaged file, a model that this program
             cannot express, with the entry, and for tensors that are missing, unknown or of another shape
    Source   llama.cpp, its reader of both families
    """
    entries, stored = open_gguf_file(path)
    family, config = _config_of(path, entries, stored)
    dtypes = ", ".join(sorted({tensor.dtype for tensor in stored.values()}))
    parameters = open_tensors(path, stored, config, READ, _layout(config, family))
    encoding = _encoding_in(path, entries)
    return StoredModel(config, parameters, encoding, 0, "GGUF", dtypes, (path,))


def _config_of(path: Path, entries: Mapping[str, Any], stored: dict[str, StoredTensor]) -> tuple[str, ModelConfig]:
    """Return the family and the configuration of a file; an output layer that equals the embedding is left out."""

    def check(name: str, right: bool, rule: str) -> None:
        got = {"path": path, name: short(entries.get(name, "missing"))}
        require(right, READ, f"{name} must be {rule}", got, OTHERS)

    family = str(entries.get("general.architecture"))
    check("general.architecture", family in (GPT2, LLAMA), f"{GPT2} or {LLAMA}")
    for name, value in MEANT.items():
        check(f"{family}.{name}", entries.get(f"{family}.{name}", value) == value, str(value))
    made: dict[str, Any] = dict(FAMILIES[family][1])
    for key, field in (ENTRIES[family] | (OPTIONAL if family == LLAMA else {})).items():
        value = entries.get(name := f"{family}.{key}")
        check(name, type(value) in (int, float) or (key in OPTIONAL and value is None), "a number")
        if value is not None:  # of a float32, the shortest number that means it
            made[field] = float(str(np.float32(value))) if isinstance(value, float) else value
    shape = stored[EMBEDDING].shape if EMBEDDING in stored else ()
    require(len(shape) == 2, READ, f"{EMBEDDING} must be a matrix", {"path": path, "shape": shape}, OTHERS)
    table, head = stored[EMBEDDING], stored.get(HEAD)
    if head and head.equals(table):
        del stored[HEAD]
    made |= {"vocabulary": shape[0], "head": "untied" if HEAD in stored else "tied"}
    if family == LLAMA:
        names = {"all": "blk.0.attn_output.bias", "qkv": "blk.0.attn_q.bias"}
        made["bias"] = next((bias for bias, name in names.items() if name in stored), "none")
    divisors = np.ones(1, np.float32)
    if DIVISORS in stored:
        rule, got = f"{DIVISORS} must be F32", {"path": path, "dtype": stored[DIVISORS].dtype}
        require(stored[DIVISORS].dtype == "F32", READ, rule, got, OTHERS)
        divisors = stored.pop(DIVISORS).read()
    made["rope_factor"] = float(divisors.max(initial=0.0))
    config = config_from(made, path, READ, "the file must describe a model")
    if config.rope_factor > 1:
        expected = _divisors_of(config)
        same = divisors.shape == expected.shape and np.allclose(divisors, expected, rtol=1e-4)
        rule, got = f"{DIVISORS} must be those of Llama 3", {"path": path, "largest": config.rope_factor}
        require(same, READ, rule, got, OTHERS)
    for name in (f"{family}.{key}" for key in HEAD_SIZES):
        check(name, entries.get(name, config.head_channels) == config.head_channels, f"{config.head_channels}")
    return family, config


def _divisors_of(config: ModelConfig) -> np.ndarray:
    """Return what each angle of a head is divided by, float32. Source   llama.cpp, its converter of Llama"""
    divisors: np.ndarray = 1 / angles_of(config.rope, config.head_channels // 2)[1]
    return divisors.astype(np.float32)


def _layout(config: ModelConfig, family: str) -> Callable[[Tensor], list[Part]]:
    """Return what gives the parts of a tensor under their names in a file; there, rows that are turned are in pairs."""
    import gguf

    prefix = "transformer." if family == GPT2 else ""

    @cache
    def published() -> Any:  # made when it is needed: readers compare the number of blocks before
        return gguf.get_tensor_name_map(gguf.MODEL_ARCH[family.upper()], config.blocks)

    def renamed(part: Part) -> Part:
        name = published().get_name(prefix + part.name, (".weight", ".bias"))
        return replace(part, name=name, transposed=False, interleaved=part.turned > 0)

    return lambda tensor: [renamed(part) for part in parts_of(config, tensor, family)]


def _encoding_in(path: Path, entries: Mapping[str, Any]) -> str:
    """Return the name of a file's encoding; "" if it is not byte-level BPE, or splits text in an unknown way.

    Errors   ValueError if it is damaged
    """
    tokenizer = {name.removeprefix(TOKENIZER): value for name, value in entries.items()}
    if tokenizer.get("model") != "gpt2" or tokenizer.get("pre") not in encodings.SPLITTINGS:
        return ""
    from gguf import TokenType

    with encodings.whole_files(path):
        tokens, kinds = tokenizer["tokens"], tokenizer["token_type"]
        rule, got = f"{TOKENIZER}token_type must have a number for each token", {"path": path, "numbers": len(kinds)}
        require(len(kinds) == len(tokens), READ, rule, got, "Copy the file again.")
        ids = {token: i for i, (token, kind) in enumerate(zip(tokens, kinds)) if kind != TokenType.UNUSED}
        pairs = [pair.split(" ") for pair in tokenizer["merges"]]
        merges = [pair for pair in pairs if "".join(pair) in ids]
        special = {token: kinds[i] == TokenType.CONTROL for token, i in ids.items() if kinds[i] != TokenType.NORMAL}
        if not merges and list(ids)[:-1] == [*encodings.named(bytes(range(256)))]:
            return "bytes"
        end, bos = tokens[tokenizer["eos_token_id"]], tokenizer.get("bos_token_id")
        others = {"chat_template": str(entries.get(TEMPLATE, "")), "bos_token": "" if bos is None else tokens[bos]}
        added = [AddedToken(token, special=control, normalized=False) for token, control in special.items()]
        library = encodings.byte_level_bpe(ids, merges, tokenizer["pre"])
        library.add_tokens(added)
    return encodings.know_library(library, end, str(path), **others)


def write_gguf(path: Path, model: StoredModel, encoding: encodings.Encoding, dtype: str = "float32") -> None:
    """Write a file that llama.cpp reads; it appears under its name only when it is complete.

    encoding   the model's, which may have fewer ids than the model
    dtype      dtype of the matrices that activations are multiplied by, one of DTYPES; q8_0 has 8 bits per number
                 and a factor per 32 numbers. All other tensors are float32

    Layout   matrices (out, in), no rows of padding, no output layer if it is the embedding (llama.cpp takes that)
    Cost     16 MiB, and a tensor if tensors are read later
    Errors   ValueError for a configuration that llama.cpp's gpt2 and llama cannot express, for q8_0 if rows of a
             matrix are not a multiple of 32, and for a tokenizer that llama.cpp does not know; RuntimeError if the
             library gguf is missing; FileNotFoundError if the folder is missing; OSError if the system refuses
    Source   llama.cpp, its converter and its reader of both families
    """
    require_package("gguf", "gguf", WRITE)
    import gguf

    config = replace(model.config, padded_vocabulary=model.config.vocabulary)
    family = family_of(config, WRITE, "llama.cpp's file")
    matrices, others = (gguf.GGMLQuantizationType[name] for name in (DTYPES[dtype], "F32"))
    file_type = "ALL_F32" if matrices == others else f"MOSTLY_{DTYPES[dtype]}"
    table, layout = tensors(config), _layout(config, family)
    kinds = {name: matrices if tensor.multiplied else others for name, tensor in table.items()}
    for name, kind in kinds.items():
        (block, _), row = gguf.GGML_QUANT_SIZES[kind], table[name].shape[-1]
        rule, got = f"rows of matrices must be a multiple of {block} for {dtype}", {name: row}
        require(row % block == 0, WRITE, rule, got, "Write float16 instead.")
    with replacing(path, WRITE) as file:
        writer = gguf.GGUFWriter(file.name, family)
        _add_settings(writer, config, family)
        writer.add_file_type(gguf.LlamaFileType[file_type])
        writer.add_quantization_version(gguf.GGML_QUANT_VERSION)
        _add_tokenizer(writer, encoding, config.vocabulary)
        divisors = {DIVISORS: _divisors_of(config)} if config.rope_factor > 1 else {}
        for name, values in divisors.items():
            writer.add_tensor_info(name, values.shape, FLOAT32, values.nbytes, others)
        for name, tensor in table.items():
            for part in layout(tensor):
                size = prod(gguf.quant_shape_to_byte_shape(part.shape, kinds[name]))
                writer.add_tensor_info(part.name, part.shape, FLOAT32, size, kinds[name])
        writer.write_header_to_file()
        writer.write_kv_data_to_file()
        writer.write_ti_data_to_file()
        writer.close()
        file.seek(0, os.SEEK_END)

        def append(values: np.ndarray, kind: Any) -> None:
            file.write(bytes(-file.tell() % gguf.GGUF_DEFAULT_ALIGNMENT))
            with np.errstate(over="ignore", invalid="ignore"):  # a subnormal factor of q8_0, which is written as 0
                for piece in pieces(values):
                    file.write(gguf.quants.quantize(piece, kind).data)

        for values in divisors.values():
            append(values, others)
        # Where float16 rounds to infinity; q8_0 has float16 factors.
        infinite = {"float16": 65520, "q8_0": 127 * 65520}.get(dtype, np.inf)
        for name, tensor in table.items():
            values = held(tensor.shape, model.parameters[name])
            largest = max(values.max(), -values.min()) if tensor.multiplied else 0
            rule, advice = f"every number of {name} must fit {dtype}", "Write bfloat16 or float32 instead."
            require(largest < infinite, WRITE, rule, {"largest": largest}, advice)
            for part in layout(tensor):
                append(part.in_file(values), kinds[name])
        file.write(bytes(-file.tell() % gguf.GGUF_DEFAULT_ALIGNMENT))


def _add_settings(writer: Any, config: ModelConfig, family: str) -> None:
    settings = explicit(config)
    values = {key: settings[field] for key, field in ENTRIES[family].items()}
    if family == LLAMA:
        values |= {key: settings[field] for key, field in OPTIONAL.items()}
        values |= dict.fromkeys(HEAD_SIZES, config.head_channels) | {"vocab_size": config.vocabulary}
    for key, value in values.items():
        (writer.add_float32 if isinstance(value, float) else writer.add_uint32)(f"{family}.{key}", value)


def _add_tokenizer(writer: Any, encoding: encodings.Encoding, size: int) -> None:
    """Add the tokenizer, which is byte-level BPE.

    Errors   ValueError, naming the part, if llama.cpp does not know how the tokenizer splits text
    """
    from gguf import TokenType

    library, end = encoding.library, next(iter(encoding.specials))
    pipeline = json.loads(library.to_str())
    splitting, differing = encodings.splitting_of(pipeline)
    rule, advice = "llama.cpp must know every part of the tokenizer", "Write another format."
    require(not differing, WRITE, rule, {"part": differing}, advice)
    names = {i: name for name, i in library.get_vocab().items()}
    kinds = [TokenType.NORMAL if i in names else TokenType.UNUSED for i in range(size)]
    for token in pipeline["added_tokens"]:
        kinds[token["id"]] = TokenType.CONTROL if token["special"] else TokenType.USER_DEFINED
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre(splitting)
    writer.add_token_list([names.get(i, f"[unused{i}]") for i in range(size)])
    writer.add_token_types(kinds)
    # llama.cpp needs merges, and the library writes no empty list: this merge never applies, as no text becomes `end`.
    merges = [pair if isinstance(pair, str) else " ".join(pair) for pair in pipeline["model"]["merges"]]
    writer.add_token_merges(merges or [f"{end} {end}"])
    if encoding.bos_token:
        writer.add_bos_token_id(library.token_to_id(encoding.bos_token))
    writer.add_eos_token_id(encoding.eot_token)
    writer.add_add_bos_token(False)
    if encoding.chat_template:
        writer.add_chat_template(encoding.chat_template)


# The container: entries of metadata, and tensors in llama.cpp's number formats


class _Header:
    """The beginning of a file, read from its start on. Errors   ValueError at the end of the file"""

    def __init__(self, values: np.ndarray) -> None:
        self.values, self.place = values, 0

    def take(self, size: int) -> bytes:
        if size > len(self.values) - self.place:
            raise ValueError("the file ends early")
        self.place += size
        return self.values[self.place - size : self.place].tobytes()

    def number(self, size: int) -> int:
        return int.from_bytes(self.take(size), "little")

    def text(self) -> str:
        return self.take(self.number(8)).decode()

    def value(self, kind: int) -> Any:
        """Return the value of an entry: a number, a text or a list."""
        if kind == _TEXT:
            return self.text()
        if kind != _ARRAY:
            return self._numbers(kind, 1)[0]
        kind, count = self.number(4), self.number(8)
        return [self.value(kind) for _ in range(count)] if kind in (_TEXT, _ARRAY) else self._numbers(kind, count)

    def _numbers(self, kind: int, count: int) -> list[Any]:
        dtype = np.dtype(_NUMBERS[kind])
        numbers: list[Any] = np.frombuffer(self.take(dtype.itemsize * count), dtype).tolist()
        return numbers


def open_gguf_file(path: Path) -> tuple[dict[str, Any], dict[str, StoredTensor]]:
    """Return the entries of a file, and its tensors by name before they are read.

    Errors   RuntimeError if the library gguf is missing; ValueError for a file that is damaged, or of another version
    """
    require_package("gguf", "gguf", READ)
    rule, got = "the file must be a complete GGUF file", {"path": path, "bytes": path.stat().st_size}
    with refusing((ValueError, KeyError, RecursionError), READ, rule, got, "It is of another kind, or damaged."):
        return _content(mapped(path))


def _content(values: np.ndarray) -> tuple[dict[str, Any], dict[str, StoredTensor]]:
    from gguf import GGML_QUANT_SIZES, GGUF_DEFAULT_ALIGNMENT, GGMLQuantizationType

    header = _Header(values)
    magic, version = header.take(4), header.number(4)
    if magic != MAGIC or version not in VERSIONS:
        raise ValueError(f"version {version}")
    tensor_count, entry_count = header.number(8), header.number(8)
    entries = {}
    for _ in range(entry_count):
        name = header.text()
        entries[name] = header.value(header.number(4))
    alignment = entries.get(_ALIGNMENT, GGUF_DEFAULT_ALIGNMENT)
    if type(alignment) is not int or alignment < 1:
        raise ValueError(f"{_ALIGNMENT} {short(alignment)}")
    places, last, end = [], 0, 0  # of the tensors, without gaps
    for _ in range(tensor_count):
        name, axes = header.text(), header.number(4)
        shape = tuple(header.number(8) for _ in range(axes))[::-1]
        kind = GGMLQuantizationType(header.number(4))
        block, size = GGML_QUANT_SIZES[kind]
        if header.number(8) != end or not shape or shape[-1] % block:
            raise ValueError(f"{name} is not where it must be")
        last = end + prod(shape) // block * size
        places.append((name, shape, kind.name, slice(end, last)))
        end = last + -last % alignment
    begin = header.place + -header.place % alignment
    if not last <= len(values) - begin <= end:
        raise ValueError("the tensors have another size")
    tensors = {}
    for name, shape, kind, place in places:
        tensors[name] = StoredTensor(values[begin:][place], shape, kind)
    if len(tensors) < len(places):
        raise ValueError("two tensors have one name")
    return entries, tensors
