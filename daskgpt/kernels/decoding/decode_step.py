"""The next tokens of some texts: GPT-2 over a few rows, each a token of a text whose keys and values are kept.

No array is allocated here: the caller owns the weights, the kept keys and values, and the scratch memory, and passes
them to each call. Every thread normalizes all rows itself, which costs less than waiting for another thread.
"""

import math

import numpy as np

from daskgpt.kernels.compilation import helper, kernel, part, stay_apart, wide_vectors
from daskgpt.kernels.decoding.gelu_simd import gelu_at
from daskgpt.kernels.decoding.gemv import ROWS, rows_times_vectors
from daskgpt.kernels.decoding.kv_cache import attend, keep
from daskgpt.kernels.decoding.thread_barrier import meet, next_part
from daskgpt.kernels.layernorm import EPSILON
from daskgpt.kernels.simd.lanes import address_of, read, read_real
from daskgpt.kernels.simd.math import fma
from daskgpt.kernels.simd.reductions import dot, sum_of

# Columns of the table of addresses, which has a row per block; `keys` and `values` are the kept ones of all texts.
TENSORS = (
    *("ln_1.weight", "ln_1.bias", "attn.c_attn.weight", "attn.c_attn.bias", "attn.c_proj.weight", "attn.c_proj.bias"),
    *("ln_2.weight", "ln_2.bias", "mlp.c_fc.weight", "mlp.c_fc.bias", "mlp.c_proj.weight", "mlp.c_proj.bias"),
    *("keys", "values"),
)
_LN_1, _C_ATTN, _ATTN_PROJ, _LN_2, _C_FC, _MLP_PROJ, _KEYS = range(0, len(TENSORS), 2)  # each with the column after it
_VALUES = _KEYS + 1
# Columns of the last row of that table.
OUTSIDE = ("wte.weight", "wpe.weight", "ln_f.weight", "ln_f.bias")
_WTE, _WPE, _LN_F = range(3)
# Columns of a row: the text, the token's position among its kept tokens, and the token.
_TEXT, _POSITION, _TOKEN = range(3)
# Positions in `sizes`.
_CHANNELS, _HEADS, _VOCABULARY, _CAPACITY, _WIDTH, _HALVES, _MEAN = range(7)

_PART_BYTES = 1 << 16  # of a matrix: a thread takes this much at once
_ACTIVATED, _ADDED, _KEPT, _SCORES = range(4)


def stages(blocks: int) -> int:
    """Return the number of stages of a step, each of which has two counters (`thread_barrier`)."""
    return 5 * blocks + 1


@helper
def _embed(halves, wte, wpe, rows, x, channels):
    for i in range(rows.shape[0]):
        position, token = rows[i, _POSITION], rows[i, _TOKEN]
        for j in range(channels):
            x[i, j] = _weight(halves, wte, token * channels + j) + read_real(wpe, position * channels + j)


@helper
def _weight(halves, place, index):
    if halves:
        return np.uint32(np.uint32(read(place, index, np.uint16(0))) << np.uint32(16)).view(np.float32)
    return read_real(place, index)


@part
def _normalise(mean_too, weight, bias, x, i, y, channels):
    """Write the layernorm or rmsnorm of row i into y."""
    stay_apart()
    wide_vectors()
    inverse = np.float32(1) / np.float32(channels)
    mean = sum_of(x[i, :channels]) * inverse if mean_too else np.float32(0)
    for j in range(channels):
        y[j] = x[i, j] - mean
    scale = np.float32(1) / np.float32(math.sqrt(fma(dot(y[:channels], y[:channels]), inverse, np.float32(EPSILON))))
    for j in range(channels):
        if mean_too:
            y[j] = fma(y[j] * scale, read_real(weight, j), read_real(bias, j))
        else:
            y[j] = y[j] * scale * read_real(weight, j)


@helper
def _finish(what, bias, out, m, first, last, x):
    """Add the bias to the new numbers of one vector, then apply GELU or add them to the residual stream."""
    if what == _SCORES:
        return
    for o in range(first, last):
        out[m, o] += read_real(bias, o)
    if what == _ACTIVATED:
        gelu_at(address_of(out) + 4 * (m * out.shape[1] + first), last - first)
    if what == _ADDED:
        for o in range(first, last):
            x[m, o] += out[m, o]


@part
def _product(what, weight, bias, xs, columns, out, outputs, x, texts, stage, team):
    """Compute out = xs weightᵀ and what follows from it; the threads divide the rows of the weight among themselves.

    texts   rows, table of addresses, block, sizes
    team    counters, thread, threads
    """
    stay_apart()
    wide_vectors()
    rows, tensors, block, sizes = texts
    counters, thread, threads = team
    halves = sizes[_HALVES] != 0
    pitch = columns * (2 if halves else 4)
    part_rows = max(_PART_BYTES // (ROWS * pitch), 1) * ROWS
    parts = (outputs + part_rows - 1) // part_rows
    vectors, index = out.shape[0], np.int64(thread)
    y, x_pitch, y_pitch = address_of(out), xs.shape[1] * 4, out.shape[1] * 4
    while index < parts:
        following = next_part(counters, stage)
        first, last = index * part_rows, min((index + 1) * part_rows, outputs)
        for o in range(first, last, ROWS):
            then = o + ROWS if o + ROWS < last else following * part_rows
            count = min(ROWS, last - o)
            place, ahead = weight + o * pitch, weight + then * pitch
            rows_times_vectors(
                halves, count, place, pitch, columns, address_of(xs), x_pitch, vectors, y + 4 * o, y_pitch, ahead
            )
        for m in range(vectors):
            _finish(what, bias, out, m, first, last, x)
            if what == _KEPT:
                keep(halves, out[m], first, last, rows[m], tensors[block, _KEYS], tensors[block, _VALUES], sizes)
        index = following
    meet(counters, stage, threads)


@part
def _attention(qkv, y, scores, row, texts, stage, team):
    """Compute the attention of every row and head, divided among the threads; see `_product` for `texts` and `team`."""
    stay_apart()
    wide_vectors()
    rows, tensors, block, sizes = texts
    counters, thread, threads = team
    halves = sizes[_HALVES] != 0
    channels, heads, capacity, width = sizes[_CHANNELS], sizes[_HEADS], sizes[_CAPACITY], sizes[_WIDTH]
    head_size, size = channels // heads, 2 if halves else 4
    pair = np.int64(thread)
    while pair < rows.shape[0] * heads:
        m, head = pair // heads, pair % heads
        number = rows[m, _TEXT] * heads + head
        keys = tensors[block, _KEYS] + number * capacity * head_size * size
        values = tensors[block, _VALUES] + number * capacity * width * size
        query = address_of(qkv) + 4 * (m * qkv.shape[1] + head * head_size)
        attend(halves, query, keys, values, head_size, width, rows[m, _POSITION] + 1, scores, row)
        for c in range(head_size):
            y[m, head * head_size + c] = row[c]
        pair = next_part(counters, stage)
    meet(counters, stage, threads)


@kernel("l2 l1 l2 l1 S2 S3 S2 S2 S2 S2 S2 S2 L1 n n", cost=27, use="decoding")
def decode_step(
    tensors, sizes, rows, wanted, x, normal, qkv, y, hidden, scores, row, logits, counters, thread, threads
):
    """Run one thread's share of a step, from rows of tokens to the logits of the wanted rows.

    x        scratch memory for the residual stream
    sizes    channels, heads, vocabulary, capacity, width, bfloat16, mean

    Shapes   tensors (blocks + 1, len(TENSORS)), rows (n, 3), wanted (w,); x, y (n, C16), normal (threads, at least n,
             C16), qkv (n, 3C), hidden (n, at least 4C), scores (threads, capacity), row (threads, width), logits
             (w, vocabulary); counters (2 stages(blocks) APART,), each stage's first one at `threads`, its second one
             at 0. C16 is C up to the next multiple of 16, width likewise the channels of a head; what lies beyond them
             is 0
    """
    wide_vectors()
    channels, halves, mean_too = sizes[_CHANNELS], sizes[_HALVES] != 0, sizes[_MEAN] != 0
    blocks, n = tensors.shape[0] - 1, rows.shape[0]
    normed, stage, team = normal[thread], 0, (counters, thread, threads)
    _embed(halves, tensors[blocks, _WTE], tensors[blocks, _WPE], rows, x, channels)
    for block in range(blocks):
        at, texts = tensors[block], (rows, tensors, block, sizes)
        for i in range(n):
            _normalise(mean_too, at[_LN_1], at[_LN_1 + 1], x, i, normed[i], channels)
        _product(_KEPT, at[_C_ATTN], at[_C_ATTN + 1], normed, channels, qkv, 3 * channels, x, texts, stage, team)
        _attention(qkv, y, scores[thread], row[thread], texts, stage + 1, team)
        _product(_ADDED, at[_ATTN_PROJ], at[_ATTN_PROJ + 1], y, channels, qkv, channels, x, texts, stage + 2, team)
        for i in range(n):
            _normalise(mean_too, at[_LN_2], at[_LN_2 + 1], x, i, normed[i], channels)
        _product(
            _ACTIVATED, at[_C_FC], at[_C_FC + 1], normed, channels, hidden, 4 * channels, x, texts, stage + 3, team
        )
        _product(
            _ADDED, at[_MLP_PROJ], at[_MLP_PROJ + 1], hidden, 4 * channels, qkv, channels, x, texts, stage + 4, team
        )
        stage += 5
    for i in range(wanted.size):
        _normalise(mean_too, tensors[blocks, _LN_F], tensors[blocks, _LN_F + 1], x, wanted[i], normed[i], channels)
    wte, texts = tensors[blocks, _WTE], (rows, tensors, blocks, sizes)
    _product(_SCORES, wte, 0, normed, channels, logits, sizes[_VOCABULARY], x, texts, stage, team)
