"""What is said about llm.c files that cannot be read or written: the whole text of every error."""

from __future__ import annotations

import os
import re
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from llmc_samples import CONFIG, DEBUG_STATE, MODEL, SMALL, small_debug_state, small_parameters

from daskgpt.formats.llmc import read_debug_state, read_model, write_debug_state, write_model

NEWER = "Write the file again with a newer llm.c (train_gpt2.py): the layout differs."


def fails(error: type[Exception], text: str) -> Any:
    """The whole message must be this text."""
    return pytest.raises(error, match=f"^{re.escape(text)}$")


def changed(source: Path, target: Path, numbers: dict[int, int], size: int | None = None) -> Path:
    """A copy of a file with other header numbers, cut or lengthened to `size` bytes."""
    data = bytearray(source.read_bytes())
    for index, number in numbers.items():
        data[4 * index : 4 * index + 4] = number.to_bytes(4, "little", signed=True)
    size = len(data) if size is None else size
    target.write_bytes(bytes(data[:size]) + bytes(max(0, size - len(data))))
    return target


# Reading


@pytest.mark.parametrize(
    ("read", "where"), [(read_model, "read_model"), (lambda path: read_debug_state(path, CONFIG), "read_debug_state")]
)
def test_no_such_file(tmp_path: Path, read: Callable[[Path], Any], where: str) -> None:
    for path in (tmp_path / "absent.bin", tmp_path):
        text = f"{where}: the file must exist; got path={path}. Check the spelling and the folder."
        with fails(FileNotFoundError, text):
            read(path)


@pytest.mark.parametrize(
    ("magic", "advice"),
    [
        (20240327, "It is an llm.c debug state: read it with read_debug_state."),
        (20240520, "It is an llm.c token file."),
        (20240328, "It is an llm.c tokenizer."),
        (20240522, "It is an llm.c evaluation set."),
        (20240527, "It is an llm.c train state: give the model file beside it."),
        (7, "It is no llm.c file."),
    ],
)
def test_another_kind_of_file_is_no_model(tmp_path: Path, magic: int, advice: str) -> None:
    path = changed(MODEL, tmp_path / "model.bin", {0: magic})
    text = f"read_model: the file must be an llm.c model (magic 20240326); got path={path}, magic={magic}. {advice}"
    with fails(ValueError, text):
        read_model(path)


def test_a_debug_state_given_as_a_model_and_the_other_way_round() -> None:
    advice = "It is an llm.c debug state: read it with read_debug_state."
    with pytest.raises(ValueError, match=re.escape(f"magic=20240327. {advice}")):
        read_model(DEBUG_STATE)
    text = (
        f"read_debug_state: the file must be an llm.c debug state (magic 20240327); got path={MODEL}, magic=20240326."
    )
    with fails(ValueError, f"{text} It is an llm.c model: read it with read_model."):
        read_debug_state(MODEL, CONFIG)


@pytest.mark.parametrize("size", [0, 3, 1023])
def test_shorter_than_a_header(tmp_path: Path, size: int) -> None:
    path = changed(MODEL, tmp_path / "model.bin", {}, size)
    text = f"the file must begin with a header of 1024 bytes; got path={path}, bytes={size}. "
    text += "It is no llm.c file, or was cut short."
    with fails(ValueError, f"read_model: {text}"):
        read_model(path)
    with fails(ValueError, f"read_debug_state: {text}"):
        read_debug_state(path, CONFIG)


@pytest.mark.parametrize("version", [0, 1, 2, 4, 6, -3])
def test_other_versions_of_a_model(tmp_path: Path, version: int) -> None:
    path = changed(MODEL, tmp_path / "model.bin", {1: version})
    text = "read_model: the version must be 3 (float32) or 5 (bfloat16)"
    with fails(ValueError, f"{text}; got path={path}, version={version}. {NEWER}"):
        read_model(path)


@pytest.mark.parametrize("version", [1, 3])
def test_other_versions_of_a_debug_state(tmp_path: Path, version: int) -> None:
    path = changed(DEBUG_STATE, tmp_path / "state.bin", {1: version})
    with fails(ValueError, f"read_debug_state: the version must be 2; got path={path}, version={version}. {NEWER}"):
        read_debug_state(path, CONFIG)


@pytest.mark.parametrize(("version", "expected"), [(3, 748_800), (5, 374_912)])
@pytest.mark.parametrize("missing", [1, 4, 300_000])
def test_truncated_model(tmp_path: Path, version: int, expected: int, missing: int) -> None:
    size = expected - missing
    path = changed(MODEL, tmp_path / "model.bin", {1: version}, size)
    text = f"read_model: the file must have {expected} bytes, by its header; got path={path}, bytes={size}."
    with fails(ValueError, f"{text} The file is truncated: copy or write it again."):
        read_model(path)


def test_bytes_after_the_last_tensor(tmp_path: Path) -> None:
    path = changed(MODEL, tmp_path / "model.bin", {}, 748_807)
    text = f"read_model: the file must have 748800 bytes, by its header; got path={path}, bytes=748807."
    with fails(ValueError, f"{text} 7 bytes follow the last tensor: copy or write it again."):
        read_model(path)


@pytest.mark.parametrize(
    ("size", "problem"), [(1_010_400, "The file is truncated"), (1_010_440, "4 bytes follow the last tensor")]
)
def test_debug_state_of_another_size(tmp_path: Path, size: int, problem: str) -> None:
    path = changed(DEBUG_STATE, tmp_path / "state.bin", {}, size)
    text = f"read_debug_state: the file must have 1010436 bytes, by its header; got path={path}, bytes={size}. "
    text += f"{problem}: copy or write it again. Or give the config of the debug state's own model."
    with fails(ValueError, text):
        read_debug_state(path, CONFIG)


def test_debug_state_of_another_model() -> None:
    with pytest.raises(ValueError, match=r"truncated.* Or give the config of the debug state's own model\.$"):
        read_debug_state(DEBUG_STATE, replace(CONFIG, channels=128))


@pytest.mark.parametrize(
    ("numbers", "reason"),
    [
        ({5: 5}, "GPT2Config: channels must be a multiple of heads; got channels=64, heads=5. Try heads=4."),
        ({4: 0}, "GPT2Config: blocks must be at least 1; got blocks=0. Give 1 or more."),
        ({2: -64}, "GPT2Config: positions must be at least 1; got positions=-64. Give 1 or more."),
        (
            {7: 508},
            "GPT2Config: padded_vocabulary must be at least vocabulary; got padded_vocabulary=508, vocabulary=509. "
            "Use 0 for no padding.",
        ),
    ],
)
def test_header_that_describes_no_model(tmp_path: Path, numbers: dict[int, int], reason: str) -> None:
    path = changed(MODEL, tmp_path / "model.bin", numbers)
    with fails(ValueError, f"read_model: the header must describe a GPT-2; got path={path}. {reason}"):
        read_model(path)


def test_header_without_a_padded_vocabulary(tmp_path: Path) -> None:
    path = changed(MODEL, tmp_path / "model.bin", {7: 0})
    text = f"read_model: the header must describe a GPT-2; got path={path}, padded_vocabulary=0. Write the file again."
    with fails(ValueError, text):
        read_model(path)


@pytest.mark.parametrize(("B", "T"), [(0, 32), (-4, 32), (4, 0), (4, 65)])
def test_debug_state_whose_batch_makes_no_sense(tmp_path: Path, B: int, T: int) -> None:
    path = changed(DEBUG_STATE, tmp_path / "state.bin", {2: B, 3: T})
    text = "read_debug_state: B must be at least 1 and T from 1 to the model's positions (64); "
    text += f"got path={path}, B={B}, T={T}. Give the config of the debug state's own model."
    with fails(ValueError, text):
        read_debug_state(path, CONFIG)


# Writing: each error leaves nothing behind


def write_fails(folder: Path, error: type[Exception], text: str, write: Callable[[Path], None]) -> None:
    with fails(error, text):
        write(folder / "file.bin")
    assert os.listdir(folder) == []


def test_unknown_version_is_not_written(tmp_path: Path) -> None:
    text = "write_model: the version must be 3 (float32) or 5 (bfloat16); got version=4. "
    text += "Use 3 where llm.c's C program is to read the file."
    write_fails(tmp_path, ValueError, text, lambda path: write_model(path, SMALL, small_parameters(), version=4))


def test_parameters_of_another_model_are_not_written(tmp_path: Path) -> None:
    parameters = small_parameters()
    state = small_debug_state()
    del parameters["ln_f.bias"], state.gradients["ln_f.bias"]
    text = "check_parameters: names must be the table's; got ln_f.bias, which is missing. Compare PARAMETERS."
    write_fails(tmp_path, ValueError, text, lambda path: write_model(path, SMALL, parameters))
    write_fails(tmp_path, ValueError, text, lambda path: write_debug_state(path, SMALL, state))
    parameters["ln_f.bias"] = state.gradients["ln_f.bias"] = np.zeros(5, np.float32)
    text = "check_parameters: ln_f.bias must have shape (4,); got shape=(5,). Compare the config."
    write_fails(tmp_path, ValueError, text, lambda path: write_model(path, SMALL, parameters))
    write_fails(tmp_path, ValueError, text, lambda path: write_debug_state(path, SMALL, state))


def test_other_dtypes_are_not_written(tmp_path: Path) -> None:
    parameters = small_parameters()
    parameters["wpe.weight"] = parameters["wpe.weight"].astype(np.float64)
    text = "write_model: wpe.weight must be float32; got dtype=float64. Convert it with .astype(np.float32)."
    write_fails(tmp_path, TypeError, text, lambda path: write_model(path, SMALL, parameters))
    state = small_debug_state()
    wide = replace(state, targets=state.targets.astype(np.int64))
    text = "write_debug_state: targets must be int32; got dtype=int64. Convert it with .astype(np.int32)."
    write_fails(tmp_path, TypeError, text, lambda path: write_debug_state(path, SMALL, wide))
    narrow = replace(state, logits=state.logits.astype(np.float16))
    text = "write_debug_state: logits must be float32; got dtype=float16. Convert it with .astype(np.float32)."
    write_fails(tmp_path, TypeError, text, lambda path: write_debug_state(path, SMALL, narrow))


@pytest.mark.parametrize(("name", "shape"), [("tokens", (12,)), ("targets", (3, 5)), ("logits", (3, 4, 8))])
def test_other_shapes_of_a_batch_are_not_written(tmp_path: Path, name: str, shape: tuple[int, ...]) -> None:
    state = small_debug_state()
    other: dict[str, Any] = {name: np.zeros(shape, getattr(state, name).dtype)}
    wrong = replace(state, **other)
    text = "write_debug_state: tokens must be (B, T), targets (B, T) and logits (B, T, V); "
    text += f"got {name}.shape={shape}. The model has V=5."
    write_fails(tmp_path, ValueError, text, lambda path: write_debug_state(path, SMALL, wrong))


@pytest.mark.parametrize(("B", "T"), [(0, 4), (3, 0), (1, 7)])
def test_a_batch_that_the_model_cannot_take_is_not_written(tmp_path: Path, B: int, T: int) -> None:
    tokens = np.zeros((B, T), np.int32)
    logits = np.zeros((B, T, SMALL.vocabulary), np.float32)
    state = replace(small_debug_state(), tokens=tokens, targets=tokens, logits=logits)
    text = "write_debug_state: B must be at least 1 and T from 1 to the model's positions (6); "
    text += f"got path={tmp_path / 'file.bin'}, B={B}, T={T}. Give the config of the debug state's own model."
    write_fails(tmp_path, ValueError, text, lambda path: write_debug_state(path, SMALL, state))


def test_folder_in_place_of_a_file_name(tmp_path: Path) -> None:
    text = f"write_model: path must name a file; got path={tmp_path}. It is a folder: add a file name."
    with fails(ValueError, text):
        write_model(tmp_path, SMALL, small_parameters())
    assert os.listdir(tmp_path) == []


def test_folder_that_does_not_exist(tmp_path: Path) -> None:
    path = tmp_path / "absent" / "model.bin"
    text = f"write_model: the folder must exist; got path={path}. Make {path.parent} first."
    with fails(FileNotFoundError, text):
        write_model(path, SMALL, small_parameters())
    assert os.listdir(tmp_path) == []
