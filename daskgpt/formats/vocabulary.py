"""Vocabularies that are known by a digest of their content: learned ones, and those of Hugging Face's folders.

Their content is a tokenizer as JSON (`formats/tokenizer_folder`). A name has size and digest:
`learned-4096-1f2e3d4c5b6a`. Configurations, manifests and messages hold the name; a model's file also holds the
content, so that its text can be decoded anywhere. Once a process has read a vocabulary, it is available by its name.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path

from tokenizers import Tokenizer

from daskgpt.config.errors import nearest, require
from daskgpt.config.files import readable
from daskgpt.formats import tokenizer_folder
from daskgpt.formats.byte_characters import END_OF_TEXT, named
from daskgpt.formats.stored_model import FilePath
from daskgpt.formats.tokenizer_folder import PREFIX, SIZE_LIMIT, LibraryEncoding, splitting_of

WHERE = "read_vocabulary"
ENCODINGS = ["bytes", "gpt2"]
GPT2, GPT2_IDS = "0ffec638c558", 50257  # digest of the names of GPT-2's tokens, and the number of its ids


@dataclass(frozen=True)
class Vocabulary:
    """Tokens that tiktoken merges; end-of-text has the id after the last of them.

    ranks     ids of tokens, which are also the order of their merges
    content   none, since it is known by its name
    """

    ranks: dict[bytes, int]
    content: str = ""

    @property
    def specials(self) -> dict[str, int]:
        """End-of-text, and its id."""
        return {END_OF_TEXT: len(self.ranks)}

    @property
    def n_vocab(self) -> int:
        """Number of ids."""
        return len(self.ranks) + 1


# Vocabularies by name: that of bytes, and those that were read in this process.
KNOWN: dict[str, Vocabulary | LibraryEncoding] = {"bytes": Vocabulary({bytes([byte]): byte for byte in range(256)})}


def is_learned(name: str) -> bool:
    """Return whether an encoding's name is that of a vocabulary which is known by its content."""
    return name.startswith(PREFIX)


def known_vocabulary(name: str) -> Vocabulary | LibraryEncoding:
    """Return a vocabulary that was read in this process, or that of bytes.

    Errors   ValueError for another name
    """
    advice = "Give its file: --encoding FOLDER/vocabulary.json." if is_learned(name) else nearest(name, ENCODINGS)
    require(name in KNOWN, "get_encoding", "the vocabulary must be available", {"encoding": name[:60]}, advice)
    return KNOWN[name]


def read_vocabulary(path: FilePath) -> str:
    """Read the vocabulary in a file, and return its name, by which it is available from here on.

    Errors   OSError if it cannot be read; ValueError if it is not such a file
    """
    with readable(path, WHERE):
        size = Path(path).stat().st_size
        require(size <= SIZE_LIMIT, WHERE, "it must be a vocabulary", {"path": path, "bytes": size}, "Give another.")
        content = Path(path).read_text(encoding="utf-8", errors="replace")
    return know_vocabulary(content, str(path))


def know_vocabulary(content: str, origin: str) -> str:
    """Register a vocabulary, and return its name, by which it is available from here on.

    content   content of its file
    origin    where it comes from, for error messages

    Errors    ValueError as `read_vocabulary`
    """
    digest = _digest(content)
    if not (name := next((name for name in KNOWN if name.endswith(f"-{digest}")), "")):
        rule, got = "a vocabulary must be JSON that daskgpt wrote", {"path": origin, "begin": ascii(content[:20])}
        require(content.startswith("{"), WHERE, rule, got, "Learn those of earlier versions again.")
        vocabulary = LibraryEncoding(digest, content, origin)
        KNOWN[name := vocabulary.name] = vocabulary
    return name


def _digest(content: str) -> str:
    return hashlib.sha256(content.encode()).hexdigest()[:12]


# Hugging Face's files


def encoding_in(folder: Path) -> str:
    """Read the tokenizer of a folder, and return the name of its encoding; "" without one.

    Errors   ValueError naming the difference if it is not byte-level BPE, or if it is damaged
    """
    content = tokenizer_folder.read_folder(folder)
    return encoding_of_content(content, str(folder)) if content else ""


def encoding_of_content(content: str, origin: str) -> str:
    """Return the name of the encoding of a tokenizer in Hugging Face's form; GPT-2's own one is gpt2.

    origin   where it comes from, for error messages
    """
    name = know_vocabulary(content, origin)
    encoding = KNOWN[name]
    if isinstance(encoding, LibraryEncoding) and encoding.n_vocab == GPT2_IDS:
        names, pipeline = " ".join(map(named, encoding.ranks)), json.loads(encoding.library.to_str())
        if _digest(names) == GPT2 and len(pipeline["added_tokens"]) == 1 and splitting_of(pipeline) == "gpt-2":
            KNOWN[name := "gpt2"] = Vocabulary(encoding.ranks)
    return name


def tokenizer_files(vocabulary: Vocabulary | LibraryEncoding, positions: int) -> dict[str, bytes]:
    """Return the files of a tokenizer by name: tokenizer.json and tokenizer_config.json.

    positions   longest sequence of the model [tokens]

    Cost        a second for GPT-2's 50,257 tokens
    Errors      ValueError if a token is not a merge of two earlier ones
    """
    end = next(iter(vocabulary.specials))
    settings: dict[str, object] = {"bos_token": bos_of(vocabulary) or None, "eos_token": end, "unk_token": end}
    settings |= {"model_max_length": positions, "tokenizer_class": "PreTrainedTokenizerFast"}
    if isinstance(vocabulary, LibraryEncoding) and vocabulary.chat_template:
        settings["chat_template"] = vocabulary.chat_template
    pipeline = library_of(vocabulary).to_str()
    return {tokenizer_folder.TOKENIZER: pipeline.encode(), tokenizer_folder.SETTINGS: json.dumps(settings).encode()}


def bos_of(vocabulary: Vocabulary | LibraryEncoding) -> str:
    """Return the token that begins a text; "" for a tokenizer from elsewhere without one, end-of-text for others."""
    return vocabulary.bos_token if isinstance(vocabulary, LibraryEncoding) else next(iter(vocabulary.specials))


def library_of(vocabulary: Vocabulary | LibraryEncoding) -> Tokenizer:
    """Return a vocabulary as a tokenizer of the library `tokenizers`.

    Errors   ValueError if a token is not a merge of two earlier ones
    """
    if isinstance(vocabulary, LibraryEncoding):
        return vocabulary.library
    ids = {named(token): i for token, i in vocabulary.ranks.items()} | vocabulary.specials
    library = tokenizer_folder.byte_level_bpe(ids, merges_of(vocabulary.ranks))
    library.add_special_tokens([END_OF_TEXT])
    return library


def merges_of(ranks: Mapping[bytes, int]) -> list[tuple[str, str]]:
    """Return the two tokens from which each longer token was merged, in order. They are what all earlier merges make of
    its bytes.
    """
    merges = []
    for token, rank in sorted(ranks.items(), key=lambda item: item[1]):
        if len(token) > 1:
            parts = [token[n : n + 1] for n in range(len(token))]
            while len(parts) > 2:
                least, place = min((ranks.get(a + b, rank), n) for n, (a, b) in enumerate(pairwise(parts)))
                rule, advice = "every token must be a merge of two before it", "Give ids in the order of merges."
                require(least < rank, "tokenizer_files", rule, {"id": rank}, advice)
                parts[place : place + 2] = [parts[place] + parts[place + 1]]
            merges.append((named(parts[0]), named(parts[1])))
    return merges
