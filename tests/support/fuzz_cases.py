"""Files of every format, and ways to damage them, for the fuzz test and for `python benchmarks/fuzz.py`.

A case is a small set of files with damage drawn by Hypothesis. Reading it must give the original model, or one clear
line, in little memory; or, if a bit was flipped inside the numbers themselves, which cannot be detected, a model that
differs only in numbers.
"""

from __future__ import annotations

import re
import shutil
import tracemalloc
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from hypothesis import strategies as st
from llama_files import llama_tensors, write_gguf_llama
from llmc_samples import SMALL, in_shards, small_parameters, write_tokens

import daskgpt
from daskgpt.formats.encoding import get_encoding
from daskgpt.formats.gguf import write_gguf
from daskgpt.formats.huggingface import write_huggingface
from daskgpt.formats.stored_model import StoredModel
from daskgpt.formats.token_files import read_tokens
from daskgpt.training.checkpoint import write_checkpoint

STEP = "step-00000003"
BYTES = 200e6
LONGEST = 700  # characters of a message, without the path


@dataclass(frozen=True)
class Format:
    """How to write a whole example into a folder, and what reads it.

    damaged   the files that are damaged, one at a time
    read      gives what was read, as arrays and numbers by name
    """

    write: Callable[[Path], None]
    damaged: tuple[str, ...]
    read: Callable[[Path], dict[str, Any]]


def _model(name: str) -> Callable[[Path], dict[str, Any]]:
    def read(folder: Path) -> dict[str, Any]:
        config, parameters = daskgpt.load(folder / name if name else folder)
        return {"config": config} | parameters

    return read


def _write_folder(folder: Path, shard_bytes: int = 0) -> None:
    write_huggingface(folder / "hf", StoredModel(SMALL, small_parameters(), "bytes", 4))
    if shard_bytes:
        in_shards(folder / "hf" / "model.safetensors", shard_bytes)


def _write_checkpoint(folder: Path) -> None:
    parameters = small_parameters()
    moments = {f"m.{name}": values for name, values in parameters.items()}
    shapes = {name: values.shape for name, values in moments.items()}
    write_checkpoint(folder, 3, StoredModel(SMALL, parameters, "bytes"), moments, shapes, {})


def _write_foreign(folder: Path) -> None:
    """A folder as transformers writes it: nothing in the tensors' file says what config.json says."""
    from safetensors.numpy import load_file, save_file

    _write_folder(folder)
    path = folder / "hf" / "model.safetensors"
    save_file(load_file(path), path, {"format": "pt"})


def _write_gguf_gpt2(folder: Path) -> None:
    config = daskgpt.preset("tiny", blocks=1, heads=2, channels=8, vocabulary=257, positions=6)
    model = StoredModel(config, daskgpt.initial_parameters(config, 0), "bytes")
    write_gguf(folder / "m.gguf", model, get_encoding("bytes"))


FORMATS: dict[str, Format] = {
    "daskgpt": Format(
        lambda folder: daskgpt.save(folder / "m.safetensors", SMALL, small_parameters(), encoding="bytes"),
        ("m.safetensors",),
        _model("m.safetensors"),
    ),
    "Hugging Face": Format(_write_foreign, ("hf/config.json", "hf/model.safetensors"), _model("hf")),
    "Hugging Face, shards": Format(
        lambda folder: _write_folder(folder, 800),
        ("hf/config.json", "hf/model.safetensors.index.json", "hf/model-00002-of-00003.safetensors"),
        _model("hf"),
    ),
    "GGUF, GPT-2": Format(_write_gguf_gpt2, ("m.gguf",), _model("m.gguf")),
    "GGUF, Llama": Format(
        lambda folder: write_gguf_llama(folder / "m.gguf", llama_tensors()) and None, ("m.gguf",), _model("m.gguf")
    ),
    "checkpoint": Format(_write_checkpoint, (f"{STEP}/state.json", f"{STEP}/model.safetensors"), _model(STEP)),
    "llm.c, tokens": Format(
        lambda folder: write_tokens(folder / "t.bin", np.arange(600) % 257),
        ("t.bin",),
        lambda folder: {"tokens": read_tokens(folder / "t.bin")},
    ),
    "nanoGPT, tokens": Format(
        lambda folder: (folder / "train.bin").write_bytes((np.arange(600) % 257).astype("<u2").tobytes()) and None,
        ("train.bin",),
        lambda folder: {"tokens": read_tokens(folder / "train.bin")},
    ),
}


class Example:
    """One format's files in a folder, of which one at a time is damaged and then whole again."""

    def __init__(self, name: str, folder: Path) -> None:
        self.format, self.folder = FORMATS[name], folder
        shutil.rmtree(folder, ignore_errors=True)
        folder.mkdir(parents=True)
        self.format.write(folder)
        self.whole = {file: (folder / file).read_bytes() for file in self.format.damaged}
        self.expected = self.format.read(folder)

    def check(self, file: str, content: bytes) -> str:
        """Read with one file's content damaged: "refused", or "read" where what was read is what the file still says.

        Errors   AssertionError otherwise
        """
        path = self.folder / file
        self._put(path, content)
        tracemalloc.start()
        try:
            content_read = self.format.read(self.folder)
        except (ValueError, FileNotFoundError) as error:
            self._check_message(str(error))
            content_read = None
        finally:
            peak = tracemalloc.get_traced_memory()[1]
            tracemalloc.stop()
            self._put(path, self.whole[file])
        assert peak < BYTES, f"{peak} bytes"
        if content_read is None:
            return "refused"
        self._check_values(file, content, content_read)
        return "read"

    def _put(self, path: Path, content: bytes) -> None:
        path.unlink(missing_ok=True)  # a new file: the old one may be mapped still
        path.write_bytes(content)

    def _check_message(self, message: str) -> None:
        """The one form: where, what must hold, the file with what was found, what to do."""
        assert "\n" not in message, message
        where, rule, rest = message.partition(": ")[0], message.partition("; got ")[0], message.partition("; got ")[2]
        assert where.isidentifier(), message
        assert len(rule) > len(where) + 10, message
        assert str(self.folder) in rest, message
        assert ". " in rest, message
        assert len(message) < LONGEST + 2 * len(str(self.folder)), message

    def _check_values(self, file: str, content: bytes, tensors: dict[str, Any]) -> None:
        """All is as it was, but for numbers that were in the damaged bytes, of which nothing tells another value."""
        whole = self.whole[file]
        # Ids alone are whatever bytes there are; what still looks like a header must not be taken for ids.
        bare = file == "train.bin" or (file == "t.bin" and content[32:1024].count(0) < 900)
        if not file.endswith(".json"):
            size, whole_size = _tensor_bytes(file, content), _tensor_bytes(file, whole)
            assert bare or size == whole_size, f"{size} instead of {whole_size} bytes"
        assert tensors.keys() == self.expected.keys()
        touched = sum(a != b for a, b in zip(content, whole, strict=False)) + abs(len(content) - len(whole))
        differing = 0
        for name, values in self.expected.items():
            if name == "config":
                self._check_config(file, tensors[name])
            elif bare:
                continue
            else:
                assert tensors[name].shape == values.shape, name
                changed = tensors[name].view("u1") != values.view("u1")
                differing += int(changed.reshape(*values.shape, -1).any(-1).sum())
        allowed = 0 if file.startswith(STEP) else touched  # a checkpoint has the SHA-256 of its files
        assert differing <= allowed, f"{differing} numbers differ, {touched} bytes do"

    def _check_config(self, file: str, config: Any) -> None:
        # How many heads there are says one number of the file alone, and so what a Llama computes with beside its
        # tensors.
        expected = self.expected["config"]
        free = {"heads"} if file == "hf/config.json" else set()
        if file == "m.gguf":
            free = {"heads"} if expected.position == "learned" else {"positions", "norm_eps", "rope_theta"}
        wrong = {name for name, value in vars(expected).items() if getattr(config, name) != value} - free
        assert not wrong, wrong


NUMBERS = (0, 1, -1, 20240326, 20240522, 2**15, 2**31 - 1, -(2**31))
LENGTHS = (0, 1, 2, 7, 2**22, 2**22 + 1, 100_000_000, 2**31, 2**40, 2**63 - 1, 2**64 - 1)
TEXTS = (
    b"", b"\0", b"{}", b"[]", b"null", b"PK\3\4" + bytes(60), b"\x80\4." + bytes(60), b"[" * 50_000, b'{"a":' * 50_000,
    (50_000).to_bytes(8, "little") + b"{" + b'"a":[' * 10_000, bytes(5000), b"\xff" * 5000, b"GGUF" + bytes(2000),
)  # fmt: skip
WORDS = (b"0", b"-1", b"1e999", b"NaN", b"null", b"true", b"9" * 400, b"9" * 5000, b'"x"', b"[]", b"{}", b"2147483647")


@st.composite
def damaged(draw: st.DrawFn, whole: dict[str, bytes]) -> tuple[str, bytes]:
    """One of the files, and what becomes of it."""
    file = draw(st.sampled_from(sorted(whole)))
    content = whole[file]
    ways = [_cut, _flipped, _flipped, _overwritten, _lengthened, _other, _absurd]
    return file, draw(st.sampled_from(ways))(draw, content)


def _place(draw: st.DrawFn, content: bytes) -> int:
    """A byte, as often one of the first, where headers are."""
    last = len(content) - 1
    return min(last, draw(st.one_of(st.integers(0, 40), st.integers(0, 1500), st.integers(0, last))))


def _cut(draw: st.DrawFn, content: bytes) -> bytes:
    return content[: _place(draw, content)]


def _flipped(draw: st.DrawFn, content: bytes) -> bytes:
    changed = bytearray(content)
    for _ in range(draw(st.integers(1, 3))):
        changed[_place(draw, content)] ^= 1 << draw(st.integers(0, 7))
    return bytes(changed)


def _overwritten(draw: st.DrawFn, content: bytes) -> bytes:
    at, more = _place(draw, content), draw(st.binary(min_size=1, max_size=16))
    return (content[:at] + more + content[at + len(more) :])[: len(content)]


def _lengthened(draw: st.DrawFn, content: bytes) -> bytes:
    return content + draw(st.binary(min_size=1, max_size=9))


def _other(draw: st.DrawFn, content: bytes) -> bytes:
    return draw(st.one_of(st.sampled_from(TEXTS), st.binary(max_size=200)))


def _absurd(draw: st.DrawFn, content: bytes) -> bytes:
    """A number of a header, or of a text, that no such file has."""
    if content[:1] == b"{" or content[8:9] == b"{":
        if content[8:9] == b"{" and draw(st.booleans()):
            return draw(st.sampled_from(LENGTHS)).to_bytes(8, "little") + content[8:]
        end = len(content) if content[:1] == b"{" else 8 + int.from_bytes(content[:8], "little")
        numbers = list(NUMBER.finditer(content, 8 if content[8:9] == b"{" else 0, end))
        match, word = draw(st.sampled_from(numbers)), draw(st.sampled_from(WORDS))
        text = content[: match.start()] + word + content[match.end() :]
        return text if content[:1] == b"{" else _with_length(text, len(word) - len(match[0]))
    at = 4 * draw(st.integers(0, 8))
    return content[:at] + draw(st.sampled_from(NUMBERS)).to_bytes(4, "little", signed=True) + content[at + 4 :]


def _with_length(content: bytes, more: int) -> bytes:
    return (int.from_bytes(content[:8], "little") + more).to_bytes(8, "little") + content[8:]


NUMBER = re.compile(rb"-?\d+")


def _tensor_bytes(file: str, content: bytes) -> int:
    """Return the bytes of a file; of safetensors those after its header, which may say of itself that it is longer."""
    return len(content) - (int.from_bytes(content[:8], "little") if file.endswith(".safetensors") else 0)
