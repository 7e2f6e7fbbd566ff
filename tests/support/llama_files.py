"""Small random Llamas as other programs write them (Hugging Face's folders, GGUF), and their logits in NumPy."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import numpy as np
from safetensors.numpy import save_file

from daskgpt.formats.encoding import CHARACTERS

Tensors = dict[str, np.ndarray]
FIELDS: dict[str, Any] = {
    "model_type": "llama",
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "hidden_size": 32,
    "head_dim": 8,
    "intermediate_size": 64,
    "vocab_size": 267,
    "max_position_embeddings": 24,
    "rms_norm_eps": 1e-3,
    "hidden_act": "silu",
    "rope_parameters": {"rope_type": "default", "rope_theta": 500.0},
    "tie_word_embeddings": True,
    "attention_bias": False,
    "mlp_bias": False,
}
GGUF_NAMES = {"model.embed_tokens": "token_embd", "model.norm": "output_norm", "lm_head": "output"}
GGUF_NAMES |= {"model.layers": "blk", "input_layernorm": "attn_norm", "post_attention_layernorm": "ffn_norm"}
GGUF_NAMES |= {f"self_attn.{part}_proj": f"attn_{part}" for part in "qkv"} | {"self_attn.o_proj": "attn_output"}
GGUF_NAMES |= {f"mlp.{part}_proj": f"ffn_{part}" for part in ("gate", "up", "down")}
TEMPLATE = "{% for message in messages %}{{ message['content'] }}<|end|>{% endfor %}"


def llama_tensors(fields: Mapping[str, Any] = FIELDS, seed: int = 0) -> Tensors:
    """Return a random model by Hugging Face's names."""
    random, channels, hidden = np.random.default_rng(seed), fields["hidden_size"], fields["intermediate_size"]
    size = fields["head_dim"] or channels // fields["num_attention_heads"]
    rows = {"q": size * fields["num_attention_heads"]} | dict.fromkeys("kv", size * fields["num_key_value_heads"])
    shapes: dict[str, tuple[int, ...]] = {"model.embed_tokens.weight": (fields["vocab_size"], channels)}
    for block in range(fields["num_hidden_layers"]):
        at = f"model.layers.{block}"
        if fields["model_type"] == "qwen3":
            shapes |= {f"{at}.self_attn.{part}_norm.weight": (size,) for part in "qk"}
        shapes |= {f"{at}.{name}_layernorm.weight": (channels,) for name in ("input", "post_attention")}
        linear = {f"self_attn.{part}_proj": (rows[part], channels) for part in "qkv"}
        linear |= {"self_attn.o_proj": (channels, rows["q"]), "mlp.down_proj": (channels, hidden)}
        linear |= {f"mlp.{part}_proj": (hidden, channels) for part in ("gate", "up")}
        for name, shape in linear.items():
            shapes[f"{at}.{name}.weight"] = shape
            always = fields["model_type"] == "qwen2" and name[-6:] in ("q_proj", "k_proj", "v_proj")
            if always or fields["mlp_bias" if "mlp" in name else "attention_bias"]:
                shapes[f"{at}.{name}.bias"] = shape[:1]
    shapes["model.norm.weight"] = (channels,)
    if not fields["tie_word_embeddings"]:
        shapes["lm_head.weight"] = (fields["vocab_size"], channels)
    return {name: random.normal(size=shape).astype("f4") * np.float32(0.3) for name, shape in shapes.items()}


def frequencies_of(rope: Mapping[str, Any], half: int) -> np.ndarray:
    """Return the angle per position of each pair of channels of a head."""
    frequencies = rope["rope_theta"] ** -(np.arange(half) / half)
    if rope["rope_type"] == "default":
        return frequencies
    turns = rope["original_max_position_embeddings"] * frequencies / (2 * np.pi)
    bounds = rope["low_freq_factor"], rope["high_freq_factor"]
    return frequencies * np.interp(turns, bounds, [1 / rope["factor"], 1])


def llama_logits(tensors: Tensors, tokens: Iterable[int], fields: Mapping[str, Any] = FIELDS) -> np.ndarray:
    """Return the scores after each token of a text, in float64."""
    p = {name: values.astype("f8") for name, values in tensors.items()}
    x = p["model.embed_tokens.weight"][list(tokens)]
    heads, positions = fields["num_attention_heads"], np.arange(len(x))

    def linear(at: str, y: np.ndarray) -> np.ndarray:
        return y @ p[f"{at}.weight"].T + p.get(f"{at}.bias", 0.0)

    def norm(at: str, y: np.ndarray) -> np.ndarray:
        if f"{at}.weight" not in p:  # of queries and keys
            return y
        return y / np.sqrt((y * y).mean(-1, keepdims=True) + fields["rms_norm_eps"]) * p[f"{at}.weight"]

    def turned(y: np.ndarray) -> np.ndarray:
        half = y.shape[-1] // 2
        angles = positions[:, None] * frequencies_of(fields["rope_parameters"], half)
        z = (y[..., :half] + 1j * y[..., half:]) * np.exp(1j * angles)[:, None]
        return np.concatenate([z.real, z.imag], -1)

    for block in range(fields["num_hidden_layers"]):
        at = f"model.layers.{block}"
        y = norm(f"{at}.input_layernorm", x)
        q = norm(f"{at}.self_attn.q_norm", linear(f"{at}.self_attn.q_proj", y).reshape(len(x), heads, -1))
        k, v = (
            linear(f"{at}.self_attn.{part}_proj", y).reshape(len(x), fields["num_key_value_heads"], -1) for part in "kv"
        )
        k, v = (np.repeat(part, heads // part.shape[1], 1) for part in (turned(norm(f"{at}.self_attn.k_norm", k)), v))
        scores = np.einsum("qhd,khd->hqk", turned(q), k) / np.sqrt(q.shape[-1])
        scores[:, positions[:, None] < positions] = -np.inf
        weights = np.exp(scores - scores.max(-1, keepdims=True))
        weights /= weights.sum(-1, keepdims=True)
        x = x + linear(f"{at}.self_attn.o_proj", np.einsum("hqk,khd->qhd", weights, v).reshape(len(x), -1))
        y = norm(f"{at}.post_attention_layernorm", x)
        gate = linear(f"{at}.mlp.gate_proj", y)
        x = x + linear(f"{at}.mlp.down_proj", gate / (1 + np.exp(-gate)) * linear(f"{at}.mlp.up_proj", y))
    head = p["model.embed_tokens.weight" if fields["tie_word_embeddings"] else "lm_head.weight"]
    return norm("model.norm", x) @ head.T


def write_folder(folder: Path, tensors: Tensors, fields: Mapping[str, Any] = FIELDS) -> Path:
    """Write a folder as transformers does."""
    folder.mkdir(exist_ok=True)
    (folder / "config.json").write_text(json.dumps(fields))
    save_file(tensors, folder / "model.safetensors", {"format": "pt"})
    return folder


def gguf_name(name: str) -> str:
    """Return llama.cpp's name of a tensor."""
    for theirs, ours in GGUF_NAMES.items():
        name = name.replace(theirs, ours)
    return name


def write_gguf_llama(
    path: Path, tensors: Tensors, kind: str = "F32", fields: Mapping[str, Any] = FIELDS, **entries: Any
) -> Tensors:
    """Write a GGUF file by the library, and return the values that it holds, by Hugging Face's names.

    kind      number format of the matrices
    entries   further entries, with __ in place of a dot, or other values; None leaves one out
    """
    import gguf

    settings = {"block_count": fields["num_hidden_layers"], "context_length": fields["max_position_embeddings"]}
    settings |= {"embedding_length": fields["hidden_size"], "feed_forward_length": fields["intermediate_size"]}
    settings |= {"attention.head_count": fields["num_attention_heads"], "rope.freq_base": 500.0}
    settings |= {"attention.head_count_kv": fields["num_key_value_heads"]}
    settings |= {"attention.layer_norm_rms_epsilon": fields["rms_norm_eps"], "attention.key_length": 8}
    settings |= {name.replace("__", "."): value for name, value in entries.items()}
    writer = gguf.GGUFWriter(path, "llama")
    _add_tokenizer(writer, fields["vocab_size"])
    for name, value in settings.items():
        key = name if "." in name and name.split(".")[0] in ("general", "tokenizer") else f"llama.{name}"
        if isinstance(value, str):
            writer.add_string(key, value)
        elif value is not None:
            (writer.add_float32 if isinstance(value, float) else writer.add_uint32)(key, value)
    rope, half = fields["rope_parameters"], fields["head_dim"] // 2
    if rope["rope_type"] == "llama3":
        plain = frequencies_of(rope | {"rope_type": "default"}, half)
        writer.add_tensor("rope_freqs.weight", (plain / frequencies_of(rope, half)).astype("f4"))
    held = {}
    for name, values in tensors.items():
        number_format = gguf.GGMLQuantizationType[kind if values.ndim == 2 else "F32"]
        heads = {"q_proj": "num_attention_heads", "k_proj": "num_key_value_heads"}.get(name.split(".")[-2])
        rows = values if heads is None else in_pairs(values, fields[heads])
        data = _in_format(rows, number_format)
        writer.add_tensor(gguf_name(name), data, raw_dtype=number_format)
        back = gguf.quants.dequantize(data, number_format).reshape(rows.shape)
        held[name] = back if heads is None else in_halves(back, fields[heads])
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return held


def _in_format(rows: np.ndarray, number_format: Any) -> np.ndarray:
    """Return rows in a number format; random numbers if the library cannot write it."""
    import gguf

    try:
        return gguf.quants.quantize(rows, number_format)
    except NotImplementedError:
        size = gguf.quant_shape_to_byte_shape(rows.shape, number_format)
        return np.random.default_rng(rows.size).integers(0, 0x3C, size, np.uint8)  # finite as float16 factors


def in_pairs(values: np.ndarray, heads: int) -> np.ndarray:
    """Return rows in llama.cpp's order: those that are turned together are neighbors."""
    size = len(values) // heads
    order = [head * size + part * size // 2 + i for head in range(heads) for i in range(size // 2) for part in (0, 1)]
    return values[order]


def in_halves(values: np.ndarray, heads: int) -> np.ndarray:
    """Undo `in_pairs`."""
    size = len(values) // heads
    order = [head * size + 2 * i + part for head in range(heads) for part in (0, 1) for i in range(size // 2)]
    return values[order]


def _add_tokenizer(writer: Any, size: int) -> None:
    """Byte-level BPE that splits digits: special tokens first, bytes in another order than their own, merges."""
    tokens = ["<|text|>", "<|end|>", "<tag>", *(CHARACTERS[byte] for byte in range(255, -1, -1))]
    tokens += ["th", "the", "Ġthe", "12", "1a"]
    tokens += [f"[unused{n}]" for n in range(len(tokens), size)]
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre("smollm")
    writer.add_token_list(tokens)
    writer.add_token_types([3, 3, 4] + [1] * 261 + [5] * (size - 264))
    writer.add_token_merges(["t h", "th e", "Ġ the", "1 2", "1 a"])
    writer.add_bos_token_id(0)
    writer.add_eos_token_id(1)
    writer.add_chat_template(TEMPLATE)
