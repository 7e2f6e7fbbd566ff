"""The next tokens of some texts: a model over a few rows, each a token of a text whose keys and values are kept.

No array is allocated here: the caller owns the weights, the kept keys and values, and the scratch memory, and passes
them to each call. Every thread normalizes and gates all rows itself, which costs less than waiting for another thread.
"""

import numpy as np
from llvmlite import ir
from numba.core import cgutils

from daskgpt.kernels.compilation import helper, instruction, kernel, part, stay_apart, wide_vectors
from daskgpt.kernels.decoding.products import ROWS, attend, keep, rows_times_vectors
from daskgpt.kernels.elementwise import CUBIC, SLOPE
from daskgpt.kernels.rotary import set_angles, turn
from daskgpt.kernels.simd import lanes
from daskgpt.kernels.simd.lanes import REALS, address_of, read, read_real
from daskgpt.kernels.simd.math import fma, sigmoid, widened
from daskgpt.kernels.simd.rows import scale_of, sum_of

# Columns of the table of addresses, which has a row per block; `keys` and `values` are the kept ones of all texts.
TENSORS = (
    *("ln_1.weight", "ln_1.bias", "attn.c_attn.weight", "attn.c_attn.bias", "attn.c_proj.weight", "attn.c_proj.bias"),
    *("ln_2.weight", "ln_2.bias", "mlp.c_fc.weight", "mlp.c_fc.bias", "mlp.c_proj.weight", "mlp.c_proj.bias"),
    *("attn.q_norm.weight", "attn.k_norm.weight", "keys", "values"),
)
# Each with the column after it.
_LN_1, _C_ATTN, _ATTN_PROJ, _LN_2, _C_FC, _MLP_PROJ, _QK_NORM, _KEYS = range(0, len(TENSORS), 2)
_VALUES = _KEYS + 1
# Columns of the last row of that table.
OUTSIDE = ("wte.weight", "wpe.weight", "ln_f.weight", "ln_f.bias", "lm_head.weight")
_WTE, _WPE, _LN_F, _, _LM_HEAD = range(5)
# Columns of a row: the text, the token's position among its kept tokens, and the token.
_TEXT, _POSITION, _TOKEN = range(3)
# Positions in `sizes`.
_CHANNELS, _HEADS, _KEY_HEADS, _HEAD_SIZE, _HIDDEN, _VOCABULARY, _CAPACITY, _WIDTH = range(8)
_HALVES, _MEAN, _ACTIVATION = range(8, 11)

_PART_BYTES = 1 << 16  # of a matrix: a thread takes this much at once
# What follows a product; the first ones are activations, in the order of their numbers in `sizes`.
_GELU, _SWIGLU, _RELU2, _ADDED, _KEPT, _SCORES = range(6)
ACTIVATIONS = ("gelu", "swiglu", "relu2")


# Threads share a step by tickets for its parts, and barriers. Each stage has two counters, which the caller allocates
# and sets: the number of parts that threads have taken (at first the number of threads, since thread n begins with part
# n), and the number of threads that have arrived. A waiting thread reads the counter again and again; if every thread
# has a core, this takes less than a microsecond. After a while it offers its core to other threads.

# Distance of two counters in whole numbers, so that each has cache lines to itself.
APART = 16
# Reads of a counter, some ten microseconds, before a thread offers its core to others.
_LOOKS = 4096


def stages(blocks: int) -> int:
    """Return the number of stages of a step, each of which has two counters."""
    return 5 * blocks + 1


@instruction("n", "n")
def _add_one(builder, place):
    """Add one to the whole number at an address; return the number before."""
    return builder.atomic_rmw("add", builder.inttoptr(place, lanes.I64.as_pointer()), lanes.I64(1), "acq_rel")


@instruction("n", "n")
def _look(builder, place):
    """Return the whole number at an address; whatever was written before it is visible then."""
    return builder.load_atomic(builder.inttoptr(place, lanes.I64.as_pointer()), "acquire", 8)


@instruction("")
def _offer_core(builder):
    lanes.call(builder, "sched_yield", lanes.I32, [])


@helper
def _next_part(counters, stage):
    """Return the number of a part of a stage that no thread has taken."""
    return _add_one(address_of(counters) + (2 * stage) * 8 * APART)


@helper
def _meet(counters, stage, threads):
    """Wait until all threads are done with a stage."""
    place = address_of(counters) + (2 * stage + 1) * 8 * APART
    if _add_one(place) + 1 >= threads:
        return
    looks = 0
    while _look(place) < threads:
        looks += 1
        if looks > _LOOKS:
            _offer_core()


@helper
def _embed(halves, wte, wpe, rows, x, channels):
    for i in range(rows.shape[0]):
        position, token = rows[i, _POSITION], rows[i, _TOKEN]
        for j in range(channels):
            number = _weight(halves, wte, token * channels + j)
            # Written once: another thread may read it already, and writes the same.
            x[i, j] = number + read_real(wpe, position * channels + j) if wpe != 0 else number


@helper
def _weight(halves, place, index):
    if halves:
        return widened(read(place, index, np.uint16(0)))
    return read_real(place, index)


@part
def _normalise(mean_too, epsilon, weight, bias, x, y):
    """Write the layernorm or rmsnorm of a row into the beginning of y, which may be that row."""
    stay_apart()
    wide_vectors()
    mean = sum_of(x) * (np.float32(1) / np.float32(x.size)) if mean_too else np.float32(0)
    for j in range(x.size):
        y[j] = x[j] - mean
    scale = scale_of(y[: x.size], epsilon)
    for j in range(x.size):
        if mean_too:
            y[j] = fma(y[j] * scale, read_real(weight, j), read_real(bias, j))
        else:
            y[j] = y[j] * scale * read_real(weight, j)


def _gelu(builder: ir.IRBuilder, v: ir.Value) -> ir.Value:
    """Return GELU of each lane; see `kernels.elementwise`."""
    one = lanes.constant(REALS, 1.0)
    inner = lanes.fma(builder, builder.fmul(lanes.constant(REALS, CUBIC), v), v, one)
    power = lanes.exp(builder, builder.fmul(builder.fmul(lanes.constant(REALS, -SLOPE), v), inner))
    return builder.fdiv(v, builder.fadd(one, power))


@instruction("n n")
def _gelu_at(builder, place, count):
    """Apply GELU in place to `count` float32 numbers, too few for a loop that Numba vectorizes to be faster."""
    with cgutils.for_range(builder, builder.lshr(count, lanes.whole(4))) as loop:
        offset = builder.mul(loop.index, lanes.whole(lanes.VECTOR))
        lanes.store(builder, _gelu(builder, lanes.load(builder, place, offset)), place, offset)
    rest = builder.and_(count, lanes.whole(lanes.LANES - 1))
    offset, mask = builder.mul(builder.sub(count, rest), lanes.whole(4)), lanes.below(builder, rest)
    lanes.store_masked(builder, _gelu(builder, lanes.load_masked(builder, place, offset, mask)), place, offset, mask)


@helper
def _finish(what, bias, out, m, first, last, x):
    """Add the bias to the new numbers of one vector, then apply GELU or ReLU², or add them to the residual stream."""
    if bias != 0:
        for o in range(first, last):
            out[m, o] += read_real(bias, o)
    if what == _GELU:
        _gelu_at(address_of(out) + 4 * (m * out.shape[1] + first), last - first)
    if what == _RELU2:
        for o in range(first, last):
            positive = max(out[m, o], np.float32(0))
            out[m, o] = positive * positive
    if what == _ADDED:
        for o in range(first, last):
            x[m, o] += out[m, o]


@helper
def _keep_heads(halves, qkv, m, first, last, angles, texts):
    """Normalize the new queries and keys of one vector and turn them by its position, if the model does; store its keys
    and values.
    """
    rows, tensors, block, sizes, epsilon = texts
    heads, key_heads, size = sizes[_HEADS], sizes[_KEY_HEADS], sizes[_HEAD_SIZE]
    text, position, half = rows[m, _TEXT], rows[m, _POSITION], angles.shape[2] // 2
    for head in range(first // size, last // size):
        number = head - heads
        if number < key_heads:
            weight = tensors[block, _QK_NORM + (number >= 0)]
            if weight != 0:
                row = qkv[m, head * size : (head + 1) * size]
                _normalise(False, epsilon, weight, 0, row, row)
            if half > 0:
                turn(qkv[m], head * size, angles[0, m, :half], angles[0, m, half:], qkv[m])
        if number >= 0:
            values = number >= key_heads
            at = text * key_heads + number % key_heads
            numbers, place = address_of(qkv) + 4 * (m * qkv.shape[1] + head * size), tensors[block, _KEYS + values]
            keep(halves, numbers, place, values, at, position, size, sizes[_CAPACITY], sizes[_WIDTH])


@helper
def _gate(hidden, gated, size):
    """Write one half of the numbers, passed through SiLU, times the other half."""
    for m in range(hidden.shape[0]):
        for j in range(size):
            gated[m, j] = hidden[m, j] * sigmoid(hidden[m, j]) * hidden[m, size + j]


@part
def _product(what, weight, bias, xs, columns, out, outputs, x, angles, texts, stage, team):
    """Compute out = xs weightᵀ and what follows from it; the threads divide the rows of the weight among themselves.

    angles  cosines and sines of the rows' positions; none if queries and keys are not turned
    texts   rows, table of addresses, block, sizes, what normalizations add
    team    counters, thread, threads
    """
    stay_apart()
    wide_vectors()
    sizes = texts[3]
    counters, thread, threads = team
    halves = sizes[_HALVES] != 0
    pitch = columns * (2 if halves else 4)
    part_rows = max(_PART_BYTES // (ROWS * pitch), 1) * ROWS
    if what == _KEPT:  # whole heads
        part_rows = (part_rows + sizes[_HEAD_SIZE] - 1) // sizes[_HEAD_SIZE] * sizes[_HEAD_SIZE]
    parts = (outputs + part_rows - 1) // part_rows
    vectors, index = out.shape[0], np.int64(thread)
    y, x_pitch, y_pitch = address_of(out), xs.shape[1] * 4, out.shape[1] * 4
    while index < parts:
        following = _next_part(counters, stage)
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
                _keep_heads(halves, out, m, first, last, angles, texts)
        index = following
    _meet(counters, stage, threads)


@part
def _attention(qkv, y, scores, row, texts, stage, team):
    """Compute the attention of every row and head, divided among the threads; see `_product` for `texts` and `team`."""
    stay_apart()
    wide_vectors()
    rows, tensors, block, sizes, _ = texts
    counters, thread, threads = team
    halves = sizes[_HALVES] != 0
    heads, key_heads, capacity, width = sizes[_HEADS], sizes[_KEY_HEADS], sizes[_CAPACITY], sizes[_WIDTH]
    head_size, size = sizes[_HEAD_SIZE], 2 if halves else 4
    pair = np.int64(thread)
    while pair < rows.shape[0] * heads:
        m, head = pair // heads, pair % heads
        number = rows[m, _TEXT] * key_heads + head // (heads // key_heads)
        keys = tensors[block, _KEYS] + number * capacity * head_size * size
        values = tensors[block, _VALUES] + number * capacity * width * size
        query = address_of(qkv) + 4 * (m * qkv.shape[1] + head * head_size)
        attend(halves, query, keys, values, head_size, width, rows[m, _POSITION] + 1, scores, row)
        for c in range(head_size):
            y[m, head * head_size + c] = row[c]
        pair = _next_part(counters, stage)
    _meet(counters, stage, threads)


@kernel("l2 l1 l2 l1 d2 s S2 S3 S3 S3 S2 S2 S2 S2 S2 S2 L1 n n", cost=27, use="decoding")
def decode_step(
    tensors, sizes, rows, wanted, rope, epsilon, x, normal, gated, angles, qkv, y, hidden, scores, row, logits,
    counters, thread, threads,
):  # fmt: skip
    """Run one thread's share of a step, from rows of tokens to the logits of the wanted rows.

    sizes     channels, heads, heads of keys, channels of a head, hidden channels, vocabulary, capacity, width; 1 for
              bfloat16, 1 for layernorm, number of the activation in ACTIVATIONS
    rope      what the angles follow from by which queries and keys are turned: `rotary.angles_of`
    epsilon   what the normalizations add
    x         scratch memory for the residual stream, and what follows it, for other steps of a block

    Shapes   tensors (blocks + 1, len(TENSORS)), rows (n, 3), wanted (w,); x (n, C16), y (n, A16), normal (threads, at
             least n, C16), gated (threads, at least n, H16), angles (threads, at least n, HS; or 0 numbers, if nothing
             is turned), qkv (n, at least Q and C), hidden (n, as many as go into the activation), scores (threads,
             capacity), row (threads, width), logits (w, vocabulary); counters (2 stages(blocks) APART,), each stage's
             first one at `threads`, its second one at 0. A are the channels of all heads, Q those of queries, keys and
             values; C16 is C up to the next multiple of 16, width likewise the channels of a head; what lies beyond
             them is 0
    """
    wide_vectors()
    channels, halves, mean_too = sizes[_CHANNELS], sizes[_HALVES] != 0, sizes[_MEAN] != 0
    blocks, n, hidden_size = tensors.shape[0] - 1, rows.shape[0], sizes[_HIDDEN]
    attended = sizes[_HEADS] * sizes[_HEAD_SIZE]
    all_heads = attended + 2 * sizes[_KEY_HEADS] * sizes[_HEAD_SIZE]
    normed, stage, team = normal[thread], 0, (counters, thread, threads)
    angles, half = angles[thread : thread + 1], angles.shape[2] // 2
    _embed(halves, tensors[blocks, _WTE], tensors[blocks, _WPE], rows, x, channels)
    if half > 0:
        for i in range(n):
            set_angles(float(rows[i, _POSITION]), rope, 1.0, angles[0, i, :half], angles[0, i, half:])
    for block in range(blocks):
        at, texts = tensors[block], (rows, tensors, block, sizes, epsilon)
        for i in range(n):
            _normalise(mean_too, epsilon, at[_LN_1], at[_LN_1 + 1], x[i, :channels], normed[i])
        weight, bias = at[_C_ATTN], at[_C_ATTN + 1]
        _product(_KEPT, weight, bias, normed, channels, qkv, all_heads, x, angles, texts, stage, team)
        _attention(qkv, y, scores[thread], row[thread], texts, stage + 1, team)
        weight, bias = at[_ATTN_PROJ], at[_ATTN_PROJ + 1]
        _product(_ADDED, weight, bias, y, attended, qkv, channels, x, angles, texts, stage + 2, team)
        for i in range(n):
            _normalise(mean_too, epsilon, at[_LN_2], at[_LN_2 + 1], x[i, :channels], normed[i])
        weight, bias = at[_C_FC], at[_C_FC + 1]
        what, activated, outputs = sizes[_ACTIVATION], hidden, hidden_size
        if what == _SWIGLU:
            activated, outputs = gated[thread], 2 * hidden_size
        _product(what, weight, bias, normed, channels, hidden, outputs, x, angles, texts, stage + 3, team)
        if what == _SWIGLU:
            _gate(hidden, activated, hidden_size)
        weight, bias = at[_MLP_PROJ], at[_MLP_PROJ + 1]
        _product(_ADDED, weight, bias, activated, hidden_size, qkv, channels, x, angles, texts, stage + 4, team)
        stage += 5
    last, texts = tensors[blocks], (rows, tensors, blocks, sizes, epsilon)
    for i in range(wanted.size):
        _normalise(mean_too, epsilon, last[_LN_F], last[_LN_F + 1], x[wanted[i], :channels], normed[i])
    table = last[_LM_HEAD] if last[_LM_HEAD] != 0 else last[_WTE]
    _product(_SCORES, table, 0, normed, channels, logits, sizes[_VOCABULARY], x, angles, texts, stage, team)
