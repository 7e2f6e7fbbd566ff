"""The masks of dropout in plain NumPy, written after the papers and independent of the package.

Sources  Salmon et al. 2011 (Philox4x32-10); Srivastava et al. 2014 (dropout)
"""

import numpy as np

WORD = 2**32


def philox(counter: tuple, key: tuple) -> list[np.ndarray]:
    """Four words of counters and keys, which are four and two arrays of numbers below 2**32."""
    a, b, c, d = (np.asarray(word, np.uint64) for word in counter)
    key = [int(word) for word in key]
    for _ in range(10):
        first, second = a * np.uint64(0xD2511F53), c * np.uint64(0xCD9E8D57)
        a, b = (second // WORD) ^ b ^ np.uint64(key[0]), second % WORD
        c, d = (first // WORD) ^ d ^ np.uint64(key[1]), first % WORD
        key = [(key[0] + 0x9E3779B9) % WORD, (key[1] + 0xBB67AE85) % WORD]
    return [a, b, c, d]


def factors(seed: int, step: int, sequence: int, place: int, part: int, rows: int, columns: int, rate: float):
    """0 if a number is dropped, else 1 / (1 - rate), float64 (rows, columns)."""
    key = philox((sequence, step % WORD, step // WORD, 0), (seed % WORD, seed // WORD))[:2]
    group, row = np.arange(-(-columns // 4)), np.arange(rows)[:, None]
    row, group = np.broadcast_arrays(row, group)
    words = np.stack(philox((group, row, np.full_like(row, place), np.full_like(row, part)), key), -1)
    words = words.reshape(rows, -1)[:, :columns]
    return np.where(words >= np.uint64(round(rate * WORD)), 1 / (1 - rate), 0.0)


def of_batch(seed: int, step: int, batch: tuple[int, int], blocks: int, channels: int, heads: int, rate: float):
    """The factors of every place of a model, by its name: (B, T, C), and (B, NH, T, T) of attention probabilities."""
    sequences, tokens = batch

    def masks(place: int, part: int, columns: int) -> np.ndarray:
        return np.stack([factors(seed, step, s, place, part, tokens, columns, rate) for s in range(sequences)])

    masks_by_place = {"wte+wpe": masks(0, 0, channels)}
    for block in range(blocks):
        at, first = f"h.{block}", 1 + 3 * block
        masks_by_place[f"{at}.attn"] = np.stack([masks(first, head, tokens) for head in range(heads)], 1)
        masks_by_place[f"{at}.attn.c_proj"] = masks(first + 1, 0, channels)
        masks_by_place[f"{at}.mlp.c_proj"] = masks(first + 2, 0, channels)
    return masks_by_place
