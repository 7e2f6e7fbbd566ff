"""The run's own model file: the same bits come back, and a file that is not whole or not its own is refused."""

from __future__ import annotations

import json
import os
import re
import tracemalloc
from dataclasses import asdict, replace

import numpy as np
import pytest
from llmc_samples import CONFIG, MODEL, SMALL, small_parameters
from safetensors import safe_open

import daskgpt
from daskgpt.config.model import GPT2Config
from daskgpt.formats.models import read_model_file
from daskgpt.formats.run_model import StoredModel, read_run_model, write_run_model
from daskgpt.model.parameters import initial_parameters, parameter_shapes, value_count

ALONE = "It was written by another program: a GPT-2 of Hugging Face's is read as a folder, with its config.json."
FOREIGN = "It was written by another program, or is damaged: give a file that daskgpt wrote."


RMS = replace(SMALL, norm="rmsnorm")


def assert_same_bits(first, second):
    assert list(first) == list(second)
    for name, values in first.items():
        assert values.dtype == second[name].dtype == np.float32
        assert values.shape == second[name].shape
        assert second[name].flags.c_contiguous, name
        assert second[name].flags.writeable, name
        assert values.tobytes() == second[name].tobytes(), name


def unpadded():
    """A model whose rows of padding are 0, as training leaves them, and numbers of every kind."""
    parameters = small_parameters()
    parameters["wte.weight"][SMALL.vocabulary :] = 0
    parameters["wpe.weight"][0] = [-0.0, np.inf, np.nan, 1e-42]
    return parameters


@pytest.fixture
def path(tmp_path):
    write_run_model(tmp_path / "model.safetensors", StoredModel(SMALL, unpadded(), "bytes", 4))
    return tmp_path / "model.safetensors"


def parts(path):
    """Header and tensors of a file."""
    data = path.read_bytes()
    end = 8 + int.from_bytes(data[:8], "little")
    return json.loads(data[8:end]), data[end:]


def rewrite(path, header, tensors):
    text = json.dumps(header).encode()
    path.write_bytes(len(text).to_bytes(8, "little") + text + tensors)


def edit(path, **changes):
    """The file with another entry of the metadata, and no checksum of it."""
    header, tensors = parts(path)
    known = json.loads(header["__metadata__"]["daskgpt"])
    del known["check"]
    for name, value in changes.items():
        (known["model"] if name in known["model"] or name not in known else known)[name] = value
    header["__metadata__"]["daskgpt"] = json.dumps(known)
    rewrite(path, header, tensors)


def refuses(path, rule, got, advice=FOREIGN):
    text = f"read_run_model: {rule}; got path={path}{got} {advice}"
    with pytest.raises(ValueError, match=f"^{re.escape(text)}$"):
        read_run_model(path)


# What is written


def test_the_same_bits_and_the_configuration_come_back(path):
    model = read_run_model(path)
    assert (model.config, model.encoding, model.sequence_length) == (SMALL, "bytes", 4)
    assert_same_bits(unpadded(), model.parameters)


def test_names_and_layout_are_hugging_faces(path):
    own = unpadded()
    with safe_open(path, framework="numpy") as file:
        assert set(file.keys()) == set(parameter_shapes(SMALL))
        assert file.metadata()["format"] == "pt"  # else transformers refuses the file
        for name in file.keys():  # noqa: SIM118
            matrix = own[name].ndim == 2 and name.startswith("h.")
            expected = own[name].T if matrix else own[name][: SMALL.vocabulary] if name == "wte.weight" else own[name]
            np.testing.assert_array_equal(file.get_tensor(name), expected, err_msg=name)
    assert path.stat().st_size % 4 == 0
    assert int.from_bytes(path.read_bytes()[:8], "little") % 8 == 0


def test_the_metadata_says_what_the_model_is(path):
    known = json.loads(parts(path)[0]["__metadata__"]["daskgpt"])
    assert known["model"] == {
        "blocks": 2, "heads": 2, "channels": 4, "vocabulary": 5, "padded_vocabulary": 8, "positions": 6,
        "norm": "layernorm",
    }  # fmt: skip
    assert known["model"].keys() == asdict(SMALL).keys()
    assert (known["version"], known["daskgpt"]) == (1, daskgpt.__version__)
    assert (known["encoding"], known["sequence_length"]) == ("bytes", 4)
    assert "(in, out)" in known["layout"]


@pytest.mark.parametrize("value", [-0.0, 3.0, np.nan])
def test_padding_that_is_not_zero_is_kept(tmp_path, value):
    parameters = unpadded()
    parameters["wte.weight"][-1, 1] = value
    daskgpt.save(tmp_path / "model.safetensors", SMALL, parameters)
    assert parts(tmp_path / "model.safetensors")[0]["wte.weight"]["shape"] == [8, 4]
    assert_same_bits(parameters, daskgpt.load(tmp_path / "model.safetensors")[1])


@pytest.mark.parametrize("layout", ["transposed", "strided"])
def test_arrays_that_are_not_contiguous_are_written_right(tmp_path, layout):
    own = unpadded()
    given = {
        "transposed": {name: np.ascontiguousarray(values.T).T for name, values in own.items()},
        "strided": {name: np.repeat(values, 2, axis=-1)[..., ::2] for name, values in own.items()},
    }[layout]
    write_run_model(tmp_path / "model.safetensors", StoredModel(SMALL, given))
    assert_same_bits(own, read_run_model(tmp_path / "model.safetensors").parameters)


def test_a_golden_model_goes_through_every_format(tmp_path):
    config, parameters = daskgpt.load(MODEL)
    assert config == CONFIG
    daskgpt.save(tmp_path / "own.safetensors", config, parameters)
    daskgpt.save(tmp_path / "back.bin", *daskgpt.load(tmp_path / "own.safetensors"))
    assert (tmp_path / "back.bin").read_bytes() == MODEL.read_bytes()


def test_tensors_are_streamed(tmp_path):
    config = GPT2Config(blocks=16, heads=2, channels=128, vocabulary=64, positions=64)
    parameters = initial_parameters(config, seed=0)
    size = sum(values.nbytes for values in parameters.values())

    def peak(work, *arguments):
        tracemalloc.start()
        work(*arguments)
        found = tracemalloc.get_traced_memory()[1]
        tracemalloc.stop()
        return found

    # One tensor is less than a fortieth of all.
    assert peak(write_run_model, tmp_path / "m.safetensors", StoredModel(config, parameters)) < 0.2 * size
    assert peak(read_run_model, tmp_path / "m.safetensors") < 1.2 * size


def test_what_is_wrong_is_not_written(tmp_path):
    target = tmp_path / "model.safetensors"
    target.write_bytes(b"the model of yesterday")
    parameters = unpadded()
    wide = parameters | {"wpe.weight": parameters["wpe.weight"].astype(np.float64)}
    with pytest.raises(TypeError, match=r"^write_run_model: wpe.weight must be float32; got dtype=float64\. "):
        daskgpt.save(target, SMALL, wide)
    with pytest.raises(ValueError, match="ln_f.bias, which is missing"):
        daskgpt.save(target, SMALL, {name: parameters[name] for name in parameters if name != "ln_f.bias"})
    with pytest.raises(FileNotFoundError, match="write_run_model: the folder must exist"):
        daskgpt.save(tmp_path / "absent" / "model.safetensors", SMALL, parameters)
    for name in ("model", "model.pt", "model.safetensors.bak"):
        with pytest.raises(ValueError, match=r"^save: the ending must be \.safetensors or \.bin \(llm\.c\); got path="):
            daskgpt.save(tmp_path / name, SMALL, parameters)
    assert os.listdir(tmp_path) == ["model.safetensors"]
    assert target.read_bytes() == b"the model of yesterday"


def test_llmc_refuses_what_its_header_cannot_express(tmp_path):
    parameters = initial_parameters(RMS, seed=1)
    text = "write_model: llm.c's header has no norm, which must be layernorm; got norm=rmsnorm. "
    text += "Write a .safetensors file, which holds every configuration."
    with pytest.raises(ValueError, match=f"^{re.escape(text)}$"):
        daskgpt.save(tmp_path / "model.bin", RMS, parameters)
    assert os.listdir(tmp_path) == []
    daskgpt.save(tmp_path / "model.safetensors", RMS, parameters)
    config, found = daskgpt.load(tmp_path / "model.safetensors")
    assert config == RMS
    assert_same_bits(parameters, found)


# Which format a file has


@pytest.mark.parametrize("name", ["own.bin", "own", "own.safetensors"])
def test_a_format_is_told_by_its_content(path, tmp_path, name):
    path.rename(tmp_path / name)
    assert read_model_file(tmp_path / name).encoding == "bytes"
    (tmp_path / name).write_bytes(MODEL.read_bytes())
    assert read_model_file(tmp_path / name).config == CONFIG


def test_no_such_file(tmp_path):
    for name, where in (("a.safetensors", "read_run_model"), ("a.bin", "read_model")):
        with pytest.raises(FileNotFoundError, match=f"^{where}: the file must exist; got path={tmp_path / name}"):
            daskgpt.load(tmp_path / name)
    text = f"load: the folder must hold a checkpoint, or be Hugging Face's; got path={tmp_path}. "
    with pytest.raises(FileNotFoundError, match=f"^{re.escape(text)}"):
        daskgpt.load(tmp_path)


# What is refused


@pytest.mark.parametrize("size", [0, 1, 8, 9, 500, -4, -1])
def test_a_truncated_file(path, size):
    path.write_bytes(path.read_bytes()[:size])
    whole = f"got path={path}, bytes={path.stat().st_size} (Error while deserializing header: "
    with pytest.raises(ValueError, match="^read_run_model: the file must be a whole safetensors file; ") as error:
        daskgpt.load(path)
    assert whole in str(error.value)
    assert str(error.value).endswith("). It is of another kind, or damaged: write it again.")


@pytest.mark.parametrize(
    "damage",
    [
        lambda data: data + b"\0" * 4,
        lambda data: b"\xff" * 8 + data[8:],
        lambda data: (2**40).to_bytes(8, "little") + data[8:],
        lambda data: data.replace(b'"F32"', b'"F99"', 1),
        lambda data: data.replace(b'"data_offsets":[0,80]', b'"data_offsets":[8,80]', 1),
        lambda data: data.replace(b"wpe", b"wp\xff", 1),
        lambda data: (150_000).to_bytes(8, "little") + b'{"a":' * 30_000,
        lambda data: b"PK\3\4" + bytes(1000),
    ],
)
def test_a_header_that_makes_no_sense(path, damage):
    data = path.read_bytes()
    path.write_bytes(damage(data))
    assert path.read_bytes() != data
    with pytest.raises(ValueError, match="^read_run_model: the file must be a whole safetensors file; ") as error:
        daskgpt.load(path)
    assert "\n" not in str(error.value)
    assert len(str(error.value)) < 500


def test_metadata_that_is_missing_or_no_configuration(path):
    header, tensors = parts(path)
    entry = "the metadata must have an entry daskgpt with the model's configuration"
    for metadata, entries in (({"format": "pt"}, "format"), ({}, "none")):
        rewrite(path, header | {"__metadata__": metadata}, tensors)
        refuses(path, entry, f", entries={entries}.", ALONE)
    del header["__metadata__"]
    rewrite(path, header, tensors)
    refuses(path, entry, ", entries=none.", ALONE)
    kinds = "the metadata's daskgpt must have version (int), model (dict), encoding (str), sequence_length (int)"
    for text, rule, got in (
        ("no JSON", "the metadata's entry daskgpt must be JSON", " (JSONDecodeError)."),
        ("[" * 100_000, "the metadata's entry daskgpt must be JSON", " (RecursionError)."),
        ("9" * 5000, "the metadata's entry daskgpt must be JSON", " (ValueError)."),
        ("[]", kinds, ", daskgpt=list."),
        ("null", kinds, ", daskgpt=NoneType."),
        ("{}", kinds, ", daskgpt.version=missing."),
        ('{"version": 1, "model": 3, "encoding": "", "sequence_length": 0}', kinds, ", daskgpt.model=3."),
    ):
        rewrite(path, header | {"__metadata__": {"daskgpt": text}}, tensors)
        refuses(path, rule, got)


@pytest.mark.parametrize(
    ("changes", "rule", "got", "advice"),
    [
        (
            {"version": 2},
            "the version must be 1",
            ", version=2.",
            "Read it with the daskgpt that wrote it, or a newer one.",
        ),
        (
            {"rotations": 3, "turns": 1},
            "the model must have no setting that is unknown here",
            ", model=rotations, turns.",
            "A newer daskgpt wrote it: read it with that.",
        ),
        (
            {"blocks": 10**12},
            "every block must have its tensors",
            ", blocks=1000000000000, tensors=28.",
            FOREIGN,
        ),
        ({"blocks": 10**400}, "the metadata must describe a GPT-2", f", blocks=1{'0' * 36}....", FOREIGN),
        ({"padded_vocabulary": 0}, "the metadata must describe a GPT-2", ", padded_vocabulary=0.", FOREIGN),
        (
            {"heads": 3},
            "the metadata must describe a GPT-2",
            ".",
            "GPT2Config: channels must be a multiple of heads; got channels=4, heads=3. Try heads=4.",
        ),
        (
            {"channels": 2**61 - 1, "heads": 2**60},
            "the metadata must describe a GPT-2",
            ".",
            f"GPT2Config: channels must be a multiple of heads; got channels={2**61 - 1}, heads={2**60}. Try heads=1.",
        ),
        (
            {"norm": "batchnorm"},
            "the metadata must describe a GPT-2",
            ".",
            "GPT2Config: norm must be known; got norm=batchnorm. Did you mean layernorm?",
        ),
        (
            {"norm": "rmsnorm"},
            "the tensors must be those of the model in the metadata",
            ", unknown=h.0.ln_1.bias (5 in all).",
            FOREIGN,
        ),
        (
            {"sequence_length": 7},
            "the sequence length must lie between 0 and the model's positions (6)",
            ", sequence_length=7.",
            FOREIGN,
        ),
        (
            {"blocks": 3},
            "the tensors must be those of the model in the metadata",
            ", missing=h.2.attn.c_attn.bias (12 in all).",
            FOREIGN,
        ),
        (
            {"blocks": 1},
            "the tensors must be those of the model in the metadata",
            ", unknown=h.1.attn.c_attn.bias (12 in all).",
            FOREIGN,
        ),
        ({"positions": 2**50}, f"wpe.weight must have shape {(2**50, 4)} in a file", ", shape=(6, 4).", FOREIGN),
        (
            {"padded_vocabulary": 7, "vocabulary": 6},
            "wte.weight must have shape (6, 4) or (7, 4) in a file",
            ", shape=(5, 4).",
            FOREIGN,
        ),
    ],
)
def test_a_configuration_that_is_not_the_tensors(path, changes, rule, got, advice):
    edit(path, **changes)
    refuses(path, rule, got, advice)


@pytest.mark.parametrize("value", [2.0, "2", True, None, [2]])
def test_a_size_of_another_kind(path, value):
    edit(path, blocks=value)
    names = ("blocks", "heads", "channels", "vocabulary", "padded_vocabulary", "positions")
    with pytest.raises(ValueError, match=r"^read_run_model: the metadata's model must have blocks \(int\), ") as error:
        read_run_model(path)
    assert all(f"{name} (int)" in str(error.value) for name in names)
    assert str(error.value).endswith(f"; got path={path}, model.blocks={value!s}. {FOREIGN}")


@pytest.mark.parametrize(("dtype", "size"), [("F16", 2), ("BF16", 2), ("F64", 8), ("I32", 4)])
def test_another_dtype(path, dtype, size):
    header, tensors = parts(path)
    header["ln_f.bias"]["dtype"] = dtype
    header["ln_f.bias"]["shape"] = [16 // size]
    rewrite(path, header, tensors)
    refuses(path, "ln_f.bias must be float32 (F32)", f", dtype={dtype}.", "Convert the file to float32 first.")


def test_matrices_that_are_not_transposed(path):
    header, tensors = parts(path)
    header["h.0.attn.c_attn.weight"]["shape"].reverse()
    rewrite(path, header, tensors)
    refuses(path, "h.0.attn.c_attn.weight must have shape (4, 12) in a file", ", shape=(12, 4).")


def test_a_flipped_bit_of_the_metadata(path):
    path.write_bytes(path.read_bytes().replace(b'\\"heads\\": 2', b'\\"heads\\": 1'))
    rule = "the metadata's daskgpt must be what was written, by its checksum"
    with pytest.raises(
        ValueError, match=f"^read_run_model: {re.escape(rule)}; got path={re.escape(str(path))}, check="
    ):
        read_run_model(path)


def test_a_setting_that_came_later_means_its_default(path):
    header, tensors = parts(path)
    known = json.loads(header["__metadata__"]["daskgpt"])
    del known["model"]["norm"], known["check"]
    header["__metadata__"]["daskgpt"] = json.dumps(known)
    rewrite(path, header, tensors)
    assert read_run_model(path).config == SMALL


def test_values_are_counted_as_the_tensors_hold_them():
    for config in (SMALL, RMS, CONFIG):
        assert value_count(config) == sum(np.prod(shape) for shape in parameter_shapes(config).values())


def test_an_encoding_that_is_unknown(path):
    edit(path, encoding="runes")
    text = f"load: the file's encoding must be one of bytes, gpt2; got path={path}, encoding=runes. "
    with pytest.raises(ValueError, match=f"^{re.escape(text)}"):
        daskgpt.load(path)


def test_llmc_headers_of_absurd_sizes_end_at_once(tmp_path):
    for number, value in ((4, 2**31 - 1), (6, 2**31 - 4), (3, 2**31 - 1)):
        data = bytearray(MODEL.read_bytes())
        data[4 * number : 4 * number + 4] = value.to_bytes(4, "little")
        data[4 * 7 : 4 * 8] = (2**31 - 1).to_bytes(4, "little")
        path = tmp_path / "absurd.bin"
        path.write_bytes(data)
        tracemalloc.start()
        with pytest.raises(ValueError, match=r"^read_model: the file must have \d+ bytes, by its header; .* truncated"):
            daskgpt.load(path)
        assert tracemalloc.get_traced_memory()[1] < 10e6
        tracemalloc.stop()
