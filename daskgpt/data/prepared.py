"""A folder of prepared tokens as a dataset: its shards stay mapped, whatever their size in all."""

from __future__ import annotations

from hashlib import file_digest
from pathlib import Path

import numpy as np

from daskgpt.config.errors import require
from daskgpt.data.corpus.manifest import JOURNAL, MANIFEST, VOCABULARY_FILE, Manifest, Part, read_manifest
from daskgpt.data.dataset import EPOCHS, Dataset
from daskgpt.data.encodings import encoding_named, vocabulary_size
from daskgpt.data.tokens import MappedTokens
from daskgpt.formats.llmc_tokens import read_tokens
from daskgpt.formats.vocabulary_file import is_learned, read_vocabulary

WHERE = "load_prepared"


def is_token_folder(source: str) -> bool:
    """Whether a source is a folder that `daskgpt.prepare` has made, or has begun."""
    folder = Path(source).expanduser()
    return any((folder / name).is_file() for name in (MANIFEST, JOURNAL))


def load_prepared(folder: str, encoding: str = "", batch_size: int = 1, sequence_length: int = 1) -> Dataset:
    """The tokens of a prepared folder.

    encoding   that is expected, "" = whatever its own is

    Shapes   each part at least (T + 1,), and the training part B sequences of T tokens and their targets
    Cost     headers are read, and the whole of a shard that was written to after the manifest
    Errors   FileNotFoundError where it is not whole; ValueError for another encoding, shards that are not as they were
             written, and too few tokens
    """
    path = Path(folder).expanduser()
    manifest = read_manifest(path, WHERE)
    own = manifest.encoding
    _check_vocabulary(path, manifest)
    encoding = encoding_named(encoding) if encoding else own
    rule, advice = "the encoding must be the one that the tokens were made with", "Leave --encoding out."
    require(encoding == own, WHERE, rule, {"encoding": encoding, "folder": f"{folder} ({own})"}, advice)
    finished = (path / MANIFEST).stat().st_mtime_ns
    training, validation = (_mapped(path, part, finished) for part in (manifest.train, manifest.val))
    for kind, tokens, sequences in (("training", training, batch_size), ("validation", validation, 1)):
        least = sequences * sequence_length + 1
        what = f"a batch, {sequences} x {sequence_length}" if sequences > 1 else f"a sequence of {sequence_length}"
        rule = f"the {kind} part must hold {what} tokens and one more"
        got = {"folder": folder, "tokens": tokens.size}
        require(tokens.size >= least, WHERE, rule, got, "Prepare more text, or give a smaller batch or sequence.")
    sizes = f"{training.size:,} training and {validation.size:,} validation tokens"
    shards = tuple(shard.sha256 for shard in manifest.train.shards + manifest.val.shards)
    described = f"{folder} ({len(shards)} shards): {sizes} ({own})"
    return Dataset(training, validation, manifest.ids, own, described, EPOCHS, shards)


def _check_vocabulary(folder: Path, manifest: Manifest) -> None:
    if is_learned(manifest.encoding):
        found = read_vocabulary(folder / VOCABULARY_FILE)
        rule, got = "its vocabulary must be as it was written", {"path": folder / VOCABULARY_FILE, "encoding": found}
        require(found == manifest.encoding, WHERE, rule, got, "Prepare it again.")
    rule, got = "the encoding must have as many ids", {"folder": folder, "ids": manifest.ids}
    require(vocabulary_size(manifest.encoding) == manifest.ids, WHERE, rule, got, "Prepare it again.")


def _mapped(folder: Path, part: Part, finished: int) -> MappedTokens:
    """Map the shards of a part.

    finished   when the manifest was written, in nanoseconds: a shard of a later time is compared with its SHA-256
    """
    rows: list[np.ndarray] = []
    for shard in part.shards:
        path = folder / shard.file
        tokens = read_tokens(path)
        rule, got = "a shard must be as it was written", {"path": path, "tokens": tokens.size}
        require(tokens.size == shard.tokens, WHERE, rule, got, "Prepare it again.")
        if path.stat().st_mtime_ns > finished:
            with path.open("rb") as file:
                digest = file_digest(file, "sha256").hexdigest()
            require(digest == shard.sha256, WHERE, rule, {"path": path, "sha256": digest[:12]}, "Prepare it again.")
        rows.append(np.asarray(tokens))
    return MappedTokens(rows)
