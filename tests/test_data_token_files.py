"""llm.c's token files: written and read back, and every way in which one can be wrong."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from command_lines import PATIENCE

from daskgpt.formats.llmc_tokens import read_tokens, write_tokens

TOKENS = np.array([50256, 0, 65535, 7], np.int64)


def test_round_trip(tmp_path: Path):
    write_tokens(tmp_path / "a.bin", TOKENS)
    tokens = read_tokens(tmp_path / "a.bin")
    assert tokens.dtype == np.uint16
    np.testing.assert_array_equal(tokens, TOKENS)
    assert [path.name for path in tmp_path.iterdir()] == ["a.bin"]


def test_layout_of_the_file(tmp_path: Path):
    write_tokens(tmp_path / "a.bin", TOKENS[:2])
    content = (tmp_path / "a.bin").read_bytes()
    assert np.frombuffer(content[:1024], "<i4").tolist() == [20240520, 1, 2] + [0] * 253
    assert content[1024:] == b"\x50\xc4\x00\x00"


def test_tokens_are_mapped_and_read_only(tmp_path: Path):
    write_tokens(tmp_path / "a.bin", TOKENS)
    tokens = read_tokens(str(tmp_path / "a.bin"))
    assert isinstance(tokens.base, np.memmap)
    with pytest.raises(ValueError, match="read-only"):
        tokens[0] = 1


def test_nanogpts_ids_without_a_header(tmp_path: Path):
    for name, tokens in (("train.bin", np.arange(2000) % 777), ("val.bin", TOKENS[:1])):
        (tmp_path / name).write_bytes(tokens.astype("<u2").tobytes())
        found = read_tokens(tmp_path / name)
        assert found.dtype == np.uint16
        assert not found.flags.writeable
        np.testing.assert_array_equal(found, tokens)
    assert read_tokens(str(tmp_path / "*.bin")).size == 2001


def test_ids_of_a_vocabulary_that_is_pickled(tmp_path: Path):
    (tmp_path / "train.bin").write_bytes(TOKENS.astype("<u2").tobytes())
    (tmp_path / "meta.pkl").write_bytes(b"\x80\x04}.")
    text = "read_tokens: ids must be of an encoding that is known here, not of a meta.pkl; "
    text += (
        f"got path={tmp_path / 'train.bin'}, beside=meta.pkl. It holds pickled Python objects, which are not opened: "
    )
    with pytest.raises(ValueError, match=f"^{re.escape(text)}give the text that the ids were made from.$"):
        read_tokens(tmp_path / "train.bin")
    write_tokens(tmp_path / "own.bin", TOKENS)  # llm.c's say by themselves what they are
    assert read_tokens(tmp_path / "own.bin").size == TOKENS.size


def test_a_pickle_is_no_text(tmp_path: Path):
    from daskgpt.data.text import read_text

    (tmp_path / "meta.pkl").write_bytes(b"(dp0\n.")
    text = f"got path={tmp_path / 'meta.pkl'} (.pkl, an ending of pickled Python objects). Give a text, or token files."
    with pytest.raises(ValueError, match=re.escape(text)):
        read_text(str(tmp_path / "meta.pkl"))


def test_glob_puts_files_in_a_row(tmp_path: Path):
    for name in ("part_000002.bin", "part_000001.bin", "other.bin"):
        write_tokens(tmp_path / name, np.array([len(name), int("2" in name)]))
    tokens = read_tokens(str(tmp_path / "part_*.bin"))
    assert tokens.tolist() == [15, 0, 15, 1]
    assert not tokens.flags.writeable


def test_every_second_token_of_a_row(tmp_path: Path):
    write_tokens(tmp_path / "a.bin", TOKENS[::2])
    assert read_tokens(tmp_path / "a.bin").tolist() == [50256, 65535]


def test_a_file_is_replaced(tmp_path: Path):
    write_tokens(tmp_path / "a.bin", TOKENS)
    write_tokens(tmp_path / "a.bin", np.array([1]))
    assert read_tokens(tmp_path / "a.bin").tolist() == [1]


def test_failed_writing_leaves_nothing_behind(tmp_path: Path):
    program = (
        "import resource, signal, sys, numpy as np\nfrom daskgpt.formats.llmc_tokens import write_tokens\n"
        "signal.signal(signal.SIGXFSZ, signal.SIG_IGN)\nresource.setrlimit(resource.RLIMIT_FSIZE, (2000, 2000))\n"
        "write_tokens(sys.argv[1], np.zeros(5000, int))"
    )
    done = subprocess.run(
        [sys.executable, "-c", program, str(tmp_path / "a.bin")], capture_output=True, text=True, timeout=PATIENCE
    )
    assert "OSError: [Errno 27] File too large" in done.stderr
    assert list(tmp_path.iterdir()) == []


def test_a_folder_is_not_written_over(tmp_path: Path):
    target = tmp_path / "a.bin"
    target.mkdir()
    message = f"write_tokens: path must name a file; got path={target}. It is a folder: add a file name."
    with pytest.raises(ValueError, match=re.escape(message)):
        write_tokens(target, TOKENS)
    assert [path.name for path in tmp_path.iterdir()] == ["a.bin"]


@pytest.mark.parametrize(
    ("tokens", "kind", "message"),
    [
        (
            np.zeros((2, 3), int),
            ValueError,
            "write_tokens: tokens must be one row; got shape=(2, 3). Use tokens.reshape(-1).",
        ),
        (
            np.zeros(0, int),
            ValueError,
            "write_tokens: there must be at least one token; got count=0. Give a text that is not empty.",
        ),
        (
            np.zeros(2),
            TypeError,
            "write_tokens: tokens must be integers; got dtype=float64. Convert them first.",
        ),
        (
            np.array([3, -1]),
            ValueError,
            "write_tokens: ids must not be negative; got id=-1. A file holds 2 bytes a token.",
        ),
        (
            np.array([65536]),
            ValueError,
            "write_tokens: ids must fit uint16; got id=65536. A file holds 2 bytes a token.",
        ),
        # One value seen 2³¹ times, so that the test needs no memory.
        (
            np.broadcast_to(np.uint16(7), 2**31),
            ValueError,
            "write_tokens: the count must fit int32; got count=2147483648. Write several files.",
        ),
    ],
)
def test_tokens_that_cannot_be_written(tmp_path: Path, tokens: np.ndarray, kind: type[Exception], message: str):
    with pytest.raises(kind, match=re.escape(message) + "$"):
        write_tokens(tmp_path / "a.bin", tokens)
    assert not list(tmp_path.iterdir())


def test_missing_folder(tmp_path: Path):
    path = tmp_path / "none" / "a.bin"
    message = f"write_tokens: the folder must exist; got path={path}. Make {path.parent} first."
    with pytest.raises(FileNotFoundError, match=re.escape(message) + "$"):
        write_tokens(path, TOKENS)


def header(*numbers: int) -> bytes:
    return np.array([*numbers, *[0] * (256 - len(numbers))], "<i4").tobytes()


NO_MAGIC = "an llm.c token file must begin with 20240520; got path={path}, magic={magic}. "


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b"", "the file must hold token ids; got path={path}, bytes=0. Write it again."),
        (
            header(20240520, 1, 1)[:1023],
            "the file must begin with a header of 1024 bytes; got path={path}, bytes=1023. The file is truncated: ",
        ),
        (
            header(20240326, 3),
            NO_MAGIC.replace("{magic}", "20240326") + "It is an llm.c model: read it with read_model.",
        ),
        (header(20240801, 7, 2), NO_MAGIC.replace("{magic}", "20240801") + "It is an llm.c token file of Llama 3."),
        (
            header(20240521, 1, 1) + b"ab",
            NO_MAGIC.replace("{magic}", "20240521") + "It is damaged: write it again.",
        ),
        (
            b"abc",
            "ids without a header must be 2 bytes each, as nanoGPT writes them; got path={path}, bytes=3. "
            "The file is truncated, or none of token ids.",
        ),
        (
            (100).to_bytes(8, "little") + b"{" + bytes(199),
            "the file must hold token ids; got path={path}, kind=safetensors. It is a model: give token files, or a ",
        ),
        (
            b"PK\3\4",
            "the file must be one that can be read without running what is in it; got path={path} (a zip archive, as "
            "PyTorch writes it, with pickled Python objects). Give the text that the ids were made from.",
        ),
        (
            header(20240520, 2, 1) + b"ab",
            "the version must be 1 (uint16 ids); got path={path}, version=2. Write it again.",
        ),
        (header(20240520, 1, 0), "the file must hold tokens; got path={path}, count=0. Write it again."),
        (header(20240520, 1, -5), "the file must hold tokens; got path={path}, count=-5. Write it again."),
        (
            header(20240520, 1, 3) + b"abcde",
            "3 tokens must make 1030 bytes; got path={path}, bytes=1029. The file is truncated: write it again.",
        ),
        (
            header(20240520, 1, 3) + b"abcdefg",
            "3 tokens must make 1030 bytes; got path={path}, bytes=1031. "
            "Something follows the last token: write it again.",
        ),
    ],
)
def test_files_that_are_not_whole(tmp_path: Path, content: bytes, message: str):
    path = tmp_path / "a.bin"
    path.write_bytes(content)
    with pytest.raises(ValueError, match="^" + re.escape("read_tokens: " + message.replace("{path}", str(path)))):
        read_tokens(path)


@pytest.mark.parametrize(
    ("name", "kind", "message"),
    [
        ("a.bin", FileNotFoundError, "read_tokens: the file must exist; got source={source}. Check the path."),
        (
            "*.bin",
            FileNotFoundError,
            "read_tokens: the glob must match at least one file; got source={source}. "
            "Check the path; ** spans folders.",
        ),
        ("", ValueError, "read_tokens: the source must name a file; got source={source}. Give a file or a glob."),
    ],
)
def test_missing_files(tmp_path: Path, name: str, kind: type[Exception], message: str):
    source = tmp_path / name
    with pytest.raises(kind, match="^" + re.escape(message.format(source=source)) + "$"):
        read_tokens(source)
