"""Writer of GGUF, llama.cpp's files: a GPT-2 and its tokenizer in one file.

The library `gguf` writes the header and knows llama.cpp's names and number formats. The values follow in pieces.
"""

from __future__ import annotations

import json
import os
from dataclasses import replace
from math import prod
from typing import Any

import numpy as np

from daskgpt.config.errors import require, require_package
from daskgpt.config.files import replacing
from daskgpt.formats.stored_model import FilePath, StoredModel, held, pieces, require_defaults, short
from daskgpt.formats.tokenizer_folder import LibraryEncoding, splitting_of
from daskgpt.formats.vocabulary import Vocabulary, library_of
from daskgpt.model.parameters import tensors

WRITE = "write_gguf"
# Dtypes of the matrices, with the library's names of a file's type and of the numbers.
DTYPES = {"float32": ("ALL_F32", "F32"), "float16": ("MOSTLY_F16", "F16"), "bfloat16": ("MOSTLY_BF16", "BF16")}
DTYPES |= {"q8_0": ("MOSTLY_Q8_0", "Q8_0")}
SIZES = ("blocks", "heads", "channels", "vocabulary", "padded_vocabulary", "positions")
EPSILON = 1e-5  # of layernorm
FLOAT32 = np.dtype(np.float32)


def write_gguf(
    path: FilePath, model: StoredModel, vocabulary: Vocabulary | LibraryEncoding, dtype: str = "float32"
) -> None:
    """Write a file that llama.cpp reads; it appears under its name only when it is complete.

    vocabulary   vocabulary of the model's encoding, which may have fewer ids than the model
    dtype        dtype of the matrices that activations are multiplied by, one of DTYPES; q8_0 has 8 bits per number
                 and a factor per 32 numbers. All other tensors are float32

    Layout   matrices (out, in), no rows of padding, no output layer (llama.cpp takes token_embd.weight)
    Cost     16 MiB, and a tensor if tensors are read later
    Errors   ValueError for a configuration that llama.cpp's gpt2 cannot express, for q8_0 if channels is not a multiple
             of 32, for a token that is not a merge of two earlier ones, and for a tokenizer that llama.cpp does not
             know; RuntimeError if the library gguf is missing; FileNotFoundError if the folder is missing; OSError if
             the system refuses
    Source   llama.cpp, its converter and its reader of gpt2
    """
    require_package("gguf", "gguf", WRITE)
    import gguf

    config = replace(model.config, padded_vocabulary=model.config.vocabulary)
    require_defaults(config, SIZES, WRITE, "llama.cpp's gpt2")
    file_type, *names = DTYPES[dtype]
    matrices, others = (gguf.GGMLQuantizationType[name] for name in (*names, "F32"))
    block = gguf.GGML_QUANT_SIZES[matrices][0]
    rule, got = f"channels must be a multiple of {block} for {dtype}", {"channels": config.channels}
    require(config.channels % block == 0, WRITE, rule, got, "Write float16 instead.")
    table, published = tensors(config), gguf.get_tensor_name_map(gguf.MODEL_ARCH.GPT2, config.blocks)
    kinds = {name: matrices if tensor.multiplied else others for name, tensor in table.items()}
    with replacing(path, WRITE) as file:
        writer = gguf.GGUFWriter(file.name, "gpt2")
        writer.add_block_count(config.blocks)
        writer.add_context_length(config.positions)
        writer.add_embedding_length(config.channels)
        writer.add_feed_forward_length(4 * config.channels)
        writer.add_head_count(config.heads)
        writer.add_layer_norm_eps(EPSILON)
        writer.add_file_type(gguf.LlamaFileType[file_type])
        writer.add_quantization_version(gguf.GGML_QUANT_VERSION)
        _add_vocabulary(writer, vocabulary, config.vocabulary)
        for name, tensor in table.items():
            entry = published.get_name(f"transformer.{name}", (".weight", ".bias"))
            block, size = gguf.GGML_QUANT_SIZES[kinds[name]]
            writer.add_tensor_info(entry, tensor.shape, FLOAT32, prod(tensor.shape) // block * size, kinds[name])
        writer.write_header_to_file()
        writer.write_kv_data_to_file()
        writer.write_ti_data_to_file()
        writer.close()
        file.seek(0, os.SEEK_END)
        for name, tensor in table.items():
            file.write(bytes(-file.tell() % gguf.GGUF_DEFAULT_ALIGNMENT))
            for piece in pieces(held(tensor, model.parameters[name])):
                file.write(gguf.quants.quantize(piece, kinds[name]).data)
        file.write(bytes(-file.tell() % gguf.GGUF_DEFAULT_ALIGNMENT))


def _add_vocabulary(writer: Any, vocabulary: Vocabulary | LibraryEncoding, size: int) -> None:
    """Add the tokenizer, which is byte-level BPE.

    Errors   ValueError if llama.cpp does not know how the tokenizer splits text
    """
    from gguf import TokenType

    library, (end, number) = library_of(vocabulary), next(iter(vocabulary.specials.items()))
    pipeline = json.loads(library.to_str())
    rule, advice = "llama.cpp must know the tokenizer's way of cutting text", "Write another format."
    got = {"pre_tokenizer": short(pipeline["pre_tokenizer"], 80), "normalizer": short(pipeline["normalizer"])}
    require(bool(splitting := splitting_of(pipeline)), WRITE, rule, got, advice)
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
    writer.add_bos_token_id(number)
    writer.add_eos_token_id(number)
    writer.add_add_bos_token(False)
