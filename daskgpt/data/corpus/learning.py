"""Learning a vocabulary from a corpus: byte pairs, merged by the library `tokenizers`."""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator
from importlib.util import find_spec

from daskgpt.config.errors import require
from daskgpt.data.corpus.documents import Reading, passages_of
from daskgpt.data.corpus.sources import Block
from daskgpt.formats.gpt2_tokenizer import CHARACTERS

WHERE = "prepare"
LEARNT_BYTES = 100_000_000  # of text that a vocabulary is learned from, spread over the corpus
SMALLEST, LARGEST = 258, 65536


def check_learnable(size: int, where: str = WHERE, name: str = "learn_vocabulary") -> None:
    """Errors   ValueError for a size that is none, or where the library is not installed"""
    rule = f"{name} must lie between {SMALLEST} and {LARGEST}"
    require(SMALLEST <= size <= LARGEST, where, rule, {name: size}, "Try 4096.")
    rule, advice = "learning a vocabulary needs the library tokenizers", 'Run pip install "daskgpt[prepare]".'
    require(find_spec("tokenizers") is not None, where, rule, {name: size}, advice)


def learn_vocabulary(texts: Iterable[str], size: int) -> dict[bytes, int]:
    """Every token but end-of-text, with its id: the 256 bytes, then the merges in their order.

    texts   to learn from; their order does not matter
    size    wanted token ids, end-of-text among them: fewer come of it where there are no more pairs to merge

    Cost    memory for the different words of the texts
    Source  Sennrich et al. 2016, arXiv:1508.07909; Radford et al. 2019 for bytes and for the words they are merged in
    """
    from tokenizers import Tokenizer, models, pre_tokenizers, trainers

    learner = Tokenizer(models.BPE())
    # GPT-2's words: the same pattern as ours (data/encodings.py).
    learner.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=True)
    trainer = trainers.BpeTrainer(
        vocab_size=size - 1,
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        special_tokens=[],
        show_progress=False,
    )
    learner.train_from_iterator(texts, trainer)
    byte_of = {character: byte for byte, character in CHARACTERS.items()}
    ids: dict[str, int] = json.loads(learner.to_str())["model"]["vocab"]
    # The library has the bytes in the order of their characters; here a byte is its own id.
    merged = sorted((i, token) for token, i in ids.items() if len(token) > 1)
    ranks = {bytes([byte]): byte for byte in range(256)}
    return ranks | {bytes(byte_of[c] for c in token): 256 + n for n, (_, token) in enumerate(merged)}


def sampled_texts(blocks: Iterable[Block], reading: Reading, every: int) -> Iterator[str]:
    """The texts to train on of every so many-th block: what is held out is not learned from."""
    for number, block in enumerate(blocks):
        if number % every == 0:
            for passage in passages_of(block, reading):
                if passage is not None and not passage.held_out:
                    yield passage.text
