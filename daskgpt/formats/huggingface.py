"""Hugging Face's folders: models of GPT-2, Llama and Qwen, tokenizers, and adapters of its library `peft`."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
from tokenizers import Tokenizer

from daskgpt import __version__
from daskgpt.config.errors import require, short
from daskgpt.config.files import appearing, expanded, write_file
from daskgpt.config.model import ModelConfig
from daskgpt.formats import encoding as encodings
from daskgpt.formats.safetensors import (
    ENDING,
    ENTRY,
    INDEX_ENDING,
    MODEL,
    TensorFiles,
    read_metadata,
    tensor_path,
    write_run_model,
    write_tensor_file,
)
from daskgpt.formats.stored_model import (
    ADVICE,
    DTYPES,
    FAMILIES,
    GPT2,
    LLAMA,
    StoredModel,
    config_from,
    explicit,
    family_of,
    open_tensors,
    parts_of,
    read_json,
)
from daskgpt.model.parameters import LORA_A, LORA_B, tensors

CONFIG = "config.json"
ADAPTER_CONFIG, ADAPTERS = "adapter_config.json", f"adapter_model{ENDING}"
READ, WRITE = "read_huggingface", "write_huggingface"
TOKENIZER, SETTINGS, TEMPLATE = "tokenizer.json", "tokenizer_config.json", "chat_template.jinja"
SPECIALS = "special_tokens_map.json"  # says more than the settings in folders of transformers before 4.34
# Files of tokenizers in other forms.
SENTENCEPIECE = ("tokenizer.model", "spiece.model", "sentencepiece.bpe.model")
OTHER_TOKENIZERS = ("merges.txt", *SENTENCEPIECE, "vocab.txt", "tekken.json")
LISTED = ("additional_special_tokens", "extra_special_tokens")  # settings that list further tokens


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
    "is_causal": (True,),
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
    "is_causal": (True,),
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


def open_huggingface(folder: Path) -> StoredModel:
    """Open a folder of Hugging Face with a GPT-2, Llama, Qwen2 or Qwen3. No tensor is read but an output layer that
    must equal the embedding.

    Dtype    float32, float16 and bfloat16 in the files
    Errors   FileNotFoundError if the folder has no config.json or no model.safetensors and no index of one; ValueError
             for a configuration that this program cannot express, with the field, and for tensors that are missing,
             unknown, duplicated, or of another shape or dtype
    Source   transformers, GPT2Config and GPT2LMHeadModel, and those of Llama, Qwen2 and Qwen3
    """
    family, config = _config_of(folder / CONFIG)
    file = tensor_path(folder)
    rule = f"the folder must hold {MODEL}, or model{INDEX_ENDING}"
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
    if config.head == "tied" and HEAD in stored:  # the table may be stored under either name, or under both
        head = stored.pop(HEAD)
        table = stored.setdefault("wte.weight" if family == GPT2 else "model.embed_tokens.weight", head)
        rule, got = f"{HEAD} must equal the embedding, to which {CONFIG} ties it", {"path": file}
        advice = DAMAGED if family == GPT2 else "If it is a layer of its own, say tie_word_embeddings: false."
        require(head.equals(table), READ, rule, got, advice)
    parameters = open_tensors(file, stored, config, READ, lambda tensor: parts_of(config, tensor, family))
    dtypes = ", ".join(sorted({DTYPES[tensor.dtype][0] for tensor in stored.values()}))
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


def write_huggingface(folder: Path, model: StoredModel, encoding: encodings.Encoding | None = None) -> None:
    """Write a folder that transformers reads; it appears under its name only when it is complete.

    folder     does not exist yet, or is empty
    encoding   written as its tokenizer; without one, the folder has none, and names no end-of-text

    Layout   model.safetensors as `write_run_model` writes it, without rows of padding; float32
    Cost     memory of the largest tensor, if it is not float32 in `model`
    Errors   ValueError if the folder exists already, and for a configuration that config.json cannot express;
             FileNotFoundError if its parent is missing; OSError if the system refuses
    Source   transformers, GPT2Config, LlamaConfig, Qwen2Config and Qwen3Config
    """
    family = family_in_folder(model.config, WRITE)
    model = replace(model, config=replace(model.config, padded_vocabulary=model.config.vocabulary))
    fields, files = _fields(model.config) | {"bos_token_id": None, "eos_token_id": None}, {}
    if encoding:  # where no token begins a text, end-of-text separates texts
        end = encoding.eot_token
        fields |= {"bos_token_id": encoding.specials.get(encoding.bos_token, end), "eos_token_id": end}
        files = tokenizer_files(encoding, model.config.positions)
    files[CONFIG] = _json_file(fields)
    with appearing(folder, WRITE) as inside:
        write_run_model(inside / MODEL, model, family)
        for name, content in files.items():
            write_file(inside / name, content, WRITE)


def family_in_folder(config: ModelConfig, where: str) -> str:
    """Return the family of a model whose folder can be written.

    Errors   as of `family_of`; ValueError for a Llama with heads that do not divide its channels
    """
    kind, got = _model_type(config), {"heads": config.heads, "channels": config.channels}
    rule = "heads of a Llama must divide channels, or transformers refuses it"
    require(kind != LLAMA or config.channels % config.heads == 0, where, rule, got, "Write .safetensors instead.")
    return family_of(replace(config, qk_norm="none") if kind == QWEN3 else config, where, CONFIG)


def _model_type(config: ModelConfig) -> str:
    if config.position != "rotary":
        return GPT2
    if config.qk_norm != "none" and config.bias == "none":
        return QWEN3
    return QWEN2 if config.bias == "qkv" else LLAMA


def _fields(config: ModelConfig) -> dict[str, object]:
    model_type = _model_type(config)
    kind, settings = FIELDS[model_type], explicit(config)
    sizes = {name: settings[field] for name, field in (kind.sizes | kind.numbers).items()}
    meant = {name: values[0] for name, values in kind.meant.items() if values[0] not in ({}, None)}
    # Dropout belongs to a run, not to its model.
    others: dict[str, object] = {"attn_pdrop": 0.0, "embd_pdrop": 0.0, "resid_pdrop": 0.0}
    if model_type != GPT2:
        rope = {"rope_type": meant.pop("rope_type"), "rope_theta": config.rope_theta}
        scaled = any(settings[field] != getattr(ModelConfig, field) for field in _SCALING.values())
        if scaled:
            rope |= {"rope_type": LLAMA3} | {name: settings[field] for name, field in _SCALING.items()}
        others = {"rope_parameters": rope, "rope_scaling": rope if scaled else None, "attention_dropout": 0.0}
        others |= {"tie_word_embeddings": config.head == "tied"}
        others |= {name: config.bias == "all" for name in ("attention_bias", "mlp_bias") if name in meant}
        del meant["type"]
    names = {"architectures": [kind.model], "model_type": model_type, "dtype": "float32", "torch_dtype": "float32"}
    return names | sizes | meant | others | {"use_cache": True, "daskgpt_version": __version__}


def _json_file(content: Mapping[str, object]) -> bytes:
    return json.dumps(content, indent=2, sort_keys=True).encode() + b"\n"


# Tokenizers


def encoding_in(folder: Path) -> str:
    """Read the tokenizer of a folder, and return the name of its encoding; "" without one.

    Errors   ValueError naming the part that is not byte-level BPE, or a file that is damaged; for tokens that
             tokenizer.json lacks, which transformers would add; if no token ends a text
    Source   transformers, PreTrainedTokenizerBase._from_pretrained
    """
    if not (folder / TOKENIZER).is_file():
        others = [name for name in OTHER_TOKENIZERS if (folder / name).is_file()]
        rule, advice = f"a folder's tokenizer must be {TOKENIZER}", f"transformers writes it. {encodings.OTHERS}"
        require(not others, encodings.WHERE, rule, {"path": folder, "files": ", ".join(others)}, advice)
        return ""
    with encodings.whole_files(folder):
        library = Tokenizer.from_str(json.dumps(_read(folder / TOKENIZER)))
        settings = _read(folder / SETTINGS) if (folder / SETTINGS).is_file() else {}
        if "added_tokens_decoder" not in settings and (folder / SPECIALS).is_file():
            settings |= _read(folder / SPECIALS)
        template = _template_in(folder, settings.get("chat_template"))
        eos, bos = (_content(settings.get(name) or "") for name in ("eos_token", "bos_token"))
        added = [*settings.get("added_tokens_decoder", {}).values()]
        for name in LISTED:
            more = settings.get(name) or []
            added += more.values() if isinstance(more, dict) else more
        ids = library.get_vocab()
        missing = ", ".join(name for name in (eos, bos, *map(_content, added)) if name and name not in ids)
    rule = f"{TOKENIZER} must have every token that the folder's other files name"
    got = {"path": folder, "missing": short(missing)}
    require(not missing, encodings.WHERE, rule, got, "Save the tokenizer again with transformers.")
    end = eos or encodings.END_OF_TEXT
    got = {"path": folder, "eos_token": "missing"}
    require(end in ids, encodings.WHERE, "a token must end a text", got, f"Name it in {SETTINGS}: eos_token.")
    recognized = {token.content for token in library.get_added_tokens_decoder().values()}
    library.add_special_tokens([name for name in (eos, bos) if name and name not in recognized])
    library.no_truncation()
    library.no_padding()
    return encodings.know_library(library, end, str(folder), chat_template=template, bos_token=bos)


def encoding_named(name: str) -> str:
    """Return the name of an encoding that is given by name, by the file of a vocabulary, or by the folder of a Hugging
    Face tokenizer, which is read. One that is to be learned keeps its name.

    Errors   ValueError for anything else, or a file without a vocabulary; as of `formats.encoding.vocabulary_size`
    """
    path = expanded(name)
    if name not in encodings.NAMED and name not in encodings.KNOWN and path.exists():
        folder = path.parent if path.name == TOKENIZER else path
        return (encoding_in(folder) if folder.is_dir() else "") or encodings.read_vocabulary(path)
    encodings.vocabulary_size(name)
    return name


def _read(path: Path) -> dict[str, Any]:
    return read_json(path, encodings.WHERE, path.name, encodings.SIZE_LIMIT)


def _content(token: str | Mapping[str, Any]) -> str:
    return token if isinstance(token, str) else token["content"]


def tokenizer_files(encoding: encodings.Encoding, positions: int) -> dict[str, bytes]:
    """Return the files of a tokenizer by name: tokenizer.json and tokenizer_config.json.

    positions   longest sequence of the model [tokens]
    """
    end = next(iter(encoding.specials))
    settings: dict[str, object] = {"bos_token": encoding.bos_token or None, "eos_token": end, "unk_token": end}
    settings |= {"model_max_length": positions, "tokenizer_class": "PreTrainedTokenizerFast"}
    if encoding.chat_template:
        settings["chat_template"] = encoding.chat_template
    return {TOKENIZER: encoding.library.to_str().encode(), SETTINGS: json.dumps(settings).encode()}


def _template_in(folder: Path, said: Any) -> str:
    """Return a folder's chat template: that of its own file, or what the settings say; of several, `default`."""
    if (folder / TEMPLATE).is_file():
        return (folder / TEMPLATE).read_text(encoding="utf-8")
    if isinstance(said, list):
        said = {template["name"]: template["template"] for template in said}.get("default")
    return said if isinstance(said, str) else ""


# Adapters


def write_peft(folder: Path, model: StoredModel) -> None:
    """Write the adapters of a model, which were merged; the folder appears under its name only when it is complete.

    Layout   each linear layer of transformers has its own adapter; those of queries, keys and values, and of gate and
             up, have a common A. The scale lora_alpha / r is 1
    Errors   ValueError for a model that Hugging Face's formats cannot express
    Source   peft, LoraConfig and save_pretrained
    """
    where = "write_peft"
    config, family = model.config, family_in_folder(model.config, where)
    prefix = "base_model.model." + ("transformer." if family == GPT2 else "")
    arrays: dict[str, np.ndarray] = {}
    for name, tensor in tensors(config).items():
        for part in parts_of(config, tensor, family) if tensor.row.is_conv1d else ():
            layer, ours = prefix + part.name.removesuffix(".weight"), name.removesuffix(".weight")
            arrays[f"{layer}.lora_A.weight"] = model.adapters[ours + LORA_A]
            arrays[f"{layer}.lora_B.weight"] = model.adapters[ours + LORA_B][part.rows]
    shapes = {name: array.shape for name, array in arrays.items()}
    modules = sorted({name.split(".")[-3] for name in arrays})
    rank = next(iter(shapes.values()))[0]
    settings: dict[str, object] = {"peft_type": "LORA", "task_type": "CAUSAL_LM", "bias": "none"}
    settings |= {"r": rank, "lora_alpha": rank, "lora_dropout": 0.0, "target_modules": modules}
    settings |= {"fan_in_fan_out": family == GPT2, "inference_mode": True, "base_model_name_or_path": None}
    with appearing(folder, where) as inside:
        write_tensor_file(inside / ADAPTERS, shapes, arrays.__getitem__, {"format": "pt"}, where=where)
        write_file(inside / ADAPTER_CONFIG, _json_file(settings), where)
