"""Preparation of tokens: from the inputs to a folder that training reads, with any scheduler."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import asdict
from itertools import islice

from daskgpt.config.errors import require
from daskgpt.config.files import replacing
from daskgpt.data.corpus.documents import BlockEncoder, Encoded, passages_of
from daskgpt.data.corpus.folder import WHERE, FolderWriter, Manifest, digest_of, read_manifest
from daskgpt.data.corpus.sources import BLOCK_BYTES, Block, PrepareConfig, blocks, list_sources
from daskgpt.data.tokenizer import check_learnable, encoding_named, get_encoding, learn_encoding, vocabulary_size
from daskgpt.formats.vocabulary import is_learned, learned_vocabulary, read_vocabulary

LEARNED_BYTES = 100_000_000  # bytes of text from which a vocabulary is learned, spread over the corpus
# Calls a function on each item in tasks, and another one on each result in this process, in order.
Each = Callable[[str, Callable[[Block], Encoded], Iterator[Block], Callable[[Encoded], None]], None]


class Preparation:
    """Inputs and settings, checked before anything is encoded or written."""

    def __init__(self, inputs: list[str], config: PrepareConfig) -> None:
        """inputs   files, folders and globs

        Errors   ValueError for inputs without text and unknown encodings, OSError for unreadable inputs
        """
        self.config, self.sources = config, list_sources(inputs)
        self.encoding = "" if config.learn_vocabulary else encoding_named(config.encoding or "gpt2")
        if self.encoding:
            get_encoding(self.encoding)
        else:
            check_learnable(config.learn_vocabulary, WHERE)
        # The settings that, with the inputs, decide the tokens.
        known = {name: value for name, value in asdict(config).items() if name != "out"}
        self.settings = known | {"encoding": self.encoding, "block_bytes": BLOCK_BYTES}

    def run(self, each: Each, tell: Callable[[int], None]) -> Manifest:
        """Make the folder, or continue it; its bytes depend on neither the scheduler nor the number of stops.

        each   see schedulers.protocol.Scheduler.each
        tell   called with the bytes of text encoded so far, whenever they grow

        Cost     memory for some blocks of 4 MiB, and for learning a vocabulary
        Errors   ValueError for invalid texts, OSError if the system refuses
        """
        decides = {"settings": self.settings, "files": [asdict(source) for source in self.sources]}
        with FolderWriter(self.config.out, decides, self.settings["shard_tokens"]) as folder:
            if folder.finished:
                return read_manifest(folder.folder, WHERE)
            name = self.encoding or self._learned(folder)
            content = learned_vocabulary(name).content if is_learned(name) else ""
            if content and not folder.vocabulary.is_file():
                with replacing(folder.vocabulary, WHERE) as file:
                    file.write(content.encode())
            tell(sum(part.bytes for part in folder.parts))

            def take(block: Encoded) -> None:
                folder.take(block)
                tell(sum(block.sizes))

            left = islice(self._blocks(), folder.blocks, None)
            each("encode", BlockEncoder(name, content, self.config), left, take)
            folder.close_shards()
            return self._finish(folder, name)

    def _blocks(self) -> Iterator[Block]:
        return blocks(self.sources, self.config)

    def _learned(self, folder: FolderWriter) -> str:
        """Return the name of the corpus's own vocabulary, learned now or by an earlier process."""
        if folder.vocabulary.is_file():
            return read_vocabulary(folder.vocabulary)
        every = max(1, -(-sum(source.size for source in self.sources) // LEARNED_BYTES))
        sampled = (passages_of(block, self.config) for block in islice(self._blocks(), 0, None, every))
        texts = (passage.text for passages in sampled for passage in passages if passage and not passage.held_out)
        return learn_encoding(texts, self.config.learn_vocabulary, str(folder.vocabulary))

    def _finish(self, folder: FolderWriter, name: str) -> Manifest:
        """Write and return the manifest, which completes the folder.

        Errors   ValueError if a part has no text
        """
        training, validation = folder.parts
        for kind, part in (("training", training), ("validation", validation)):
            rule, fraction = f"the {kind} part must hold text", self.config.validation_fraction
            got = {"documents": training.documents + validation.documents, "validation_fraction": fraction}
            require(part.tokens > 0, WHERE, rule, got, "Give more text, or another --validation-fraction.")
        sizes = [[source.name, source.size] for source in self.sources]
        inputs = {"files": len(sizes), "bytes": sum(source.size for source in self.sources), "digest": digest_of(sizes)}
        manifest = Manifest(name, vocabulary_size(name), self.settings, inputs, training, validation, folder.skipped)
        manifest.write(folder.folder)
        return manifest
