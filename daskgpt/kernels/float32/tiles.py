"""Code of the float32 product: tiles of sums in vector registers, copies, transposes, and a table of these functions;
scratch memory.

Callers get the address of the table: Numba compiles a helper with everything that it calls, so each helper would
otherwise compile these functions again. Addresses and distances are in bytes.
"""

from collections.abc import Callable, Iterator, Sequence

from llvmlite import ir
from numba.core import cgutils

from daskgpt.kernels.compilation import helper, instruction
from daskgpt.kernels.simd import lanes

# The size of a tile follows from the registers of the processor. With 32 registers of 16 numbers (AVX-512), a tile has
# 8 rows and 3 vectors; with 16 registers of 8 numbers (AVX2), or 32 of 4 (NEON), 4 rows and 3 vectors. The sums, a row
# of the right operand and a number of the left one then fill the registers. No bit of a product depends on the size.
LANES = 16 if lanes.has_avx512() else 8
VECTOR = 4 * LANES
REALS, MASK = ir.VectorType(lanes.F32, LANES), ir.VectorType(lanes.I1, LANES)
# Rows and vectors of the largest tile.
ROWS, WIDTH = LANES // 2, 3
# Numbers in a cache line: the number of steps between two prefetches.
LINE = 16


def transpose_body(builder: ir.IRBuilder, *arguments: ir.Value) -> None:
    source, step, rows, columns, target, target_step, target_rows, target_columns = arguments
    places = source, step, target, target_step
    missing = builder.icmp_signed("<", rows, lanes.whole(LANES))
    for count in (columns, target_rows, target_columns):
        missing = builder.or_(missing, builder.icmp_signed("<", count, lanes.whole(LANES)))
    with builder.if_else(missing) as (edge, inside):
        with edge:
            masks = lanes.row_masks(builder, rows, columns, LANES)
            target_masks = lanes.row_masks(builder, target_rows, target_columns, LANES)
            lanes.transpose_masked(builder, *places, masks, target_masks)
        with inside:
            masks = [lanes.constant(MASK, 1)] * LANES
            lanes.transpose_masked(builder, *places, masks, masks)


def copy_body(width: int) -> Callable[..., None]:
    def body(
        builder: ir.IRBuilder, source: ir.Value, step: ir.Value, rows: ir.Value, columns: ir.Value, target: ir.Value
    ) -> None:
        source, target = (builder.inttoptr(address, lanes.POINTER) for address in (source, target))
        masks = [lanes.below(builder, columns, LANES * part, LANES) for part in range(width)]
        with cgutils.for_range(builder, rows) as loop:
            start, end = builder.mul(loop.index, step), builder.mul(loop.index, lanes.whole(VECTOR * width))
            for part in range(width):
                value = lanes.load_masked(
                    builder, source, builder.add(start, lanes.whole(VECTOR * part)), masks[part], REALS
                )
                lanes.store(builder, value, target, builder.add(end, lanes.whole(VECTOR * part)))

    return body


def copy_halves_body(builder: ir.IRBuilder, *arguments: ir.Value) -> None:
    source, step, rows, columns, target, distance = arguments
    source, target = (builder.inttoptr(address, lanes.POINTER) for address in (source, target))
    mask, half = lanes.below(builder, columns, lanes=LANES), LANES // 2
    with cgutils.for_range(builder, rows) as loop:
        value = lanes.load_masked(builder, source, builder.mul(loop.index, step), mask, REALS)
        place = builder.mul(loop.index, lanes.whole(VECTOR // 2))
        for first in (0, half):
            lanes.store(builder, lanes.shuffle(builder, value, value, list(range(first, first + half))), target, place)
            place = builder.add(place, distance)


# How a tile reads its left operand.
BY_ROWS, BY_COLUMNS, BY_ROWS_PACKING = 0, 1, 2
_ROWS = tuple(rows for rows in (1, 2, 4, 8) if rows <= ROWS)
_WIDTHS = (1, 2, 3)
_UNROLL = 4


def function(module: ir.Module, name: str, kinds: list[ir.Type], body: Callable[..., None]) -> ir.Function:
    """Return the function of this name in a module; define it at its first use."""
    definition = module.globals.get(name)
    if definition is None:
        definition = ir.Function(module, ir.FunctionType(lanes.VOID, kinds), name)
        definition.linkage = "internal"
        definition.attributes.add("noinline")
        builder = ir.IRBuilder(definition.append_basic_block("entry"))
        body(builder, *definition.args)
        builder.ret_void()
    return definition


class _Tile:
    """Code of rows x (LANES width) sums: total = beta * total + left @ right, step by step.

    The summed axis of a left operand by rows is contiguous, or its rows are (by columns); left_step is the distance
    along the other axis. A tile that packs also writes the vectors of the right operand, one after the other.
    """

    def __init__(self, kind: int, rows: int, width: int) -> None:
        self.by_columns, self.packs, self.rows, self.width = kind == BY_COLUMNS, kind == BY_ROWS_PACKING, rows, width
        self.name = f"sgemm_tile_{kind}_{rows}_{width}"
        self.places = [(row, part) for row in range(rows) for part in range(width)]

    def function(self, module: ir.Module) -> ir.Function:
        return function(module, self.name, [lanes.I64] * 12 + [lanes.F32], self._body)

    def _body(self, builder: ir.IRBuilder, *arguments: ir.Value) -> None:
        self.builder = builder
        steps, left, self.left_step, right, self.right_step, packed, total, total_step, *rest = arguments
        ahead, ahead_count, ahead_lines, ahead_step, beta = rest
        self.left, self.right, self.packed = (
            cgutils.alloca_once_value(builder, builder.inttoptr(address, lanes.POINTER))
            for address in (left, right, packed)
        )
        self.ahead, self.line = (cgutils.alloca_once_value(builder, value) for value in (ahead, ahead_lines))
        sums, total = self._addresses_of_sums(total_step), builder.inttoptr(total, lanes.POINTER)
        self._start(sums, total, beta)
        with cgutils.for_range(builder, builder.lshr(steps, lanes.whole(4))):
            self._look_ahead(ahead_count, ahead_lines, ahead_step)
            with cgutils.for_range(builder, lanes.whole(LINE // _UNROLL)):
                self._multiply(_UNROLL)
        with cgutils.for_range(builder, builder.and_(steps, lanes.whole(LINE - 1))):
            self._multiply(1)
        for place, variable in self.sums.items():
            lanes.store(builder, builder.load(variable), total, sums[place])

    def _addresses_of_sums(self, step: ir.Value) -> dict[tuple[int, int], ir.Value]:
        """Return the distance of every vector of sums from the first."""
        builder = self.builder
        rows = [builder.mul(step, lanes.whole(row)) for row in range(self.rows)]
        return {(row, part): builder.add(rows[row], lanes.whole(VECTOR * part)) for row, part in self.places}

    def _start(self, sums: dict[tuple[int, int], ir.Value], total: ir.Value, beta: ir.Value) -> None:
        """Set the first values of the sums. Calls that continue a sum give the same bits as one call."""
        builder, zero = self.builder, lanes.constant(REALS, 0.0)
        self.sums = {place: cgutils.alloca_once_value(builder, zero) for place in self.places}
        scale = lanes.splat(builder, beta, LANES)
        with builder.if_then(builder.fcmp_unordered("!=", beta, lanes.constant(lanes.F32, 0.0))):
            for place, variable in self.sums.items():
                builder.store(builder.fmul(lanes.load(builder, total, sums[place], REALS), scale), variable)

    def _move(self, variable: ir.Value, offset: ir.Value) -> None:
        self.builder.store(lanes.at(self.builder, self.builder.load(variable), offset, lanes.I8), variable)

    def _look_ahead(self, count: ir.Value, lines: ir.Value, step: ir.Value) -> None:
        """Fetch the next `count` lines of a rectangle of `lines` lines a row."""
        builder = self.builder
        beyond = builder.sub(step, builder.shl(lines, lanes.whole(6)))
        with cgutils.for_range(builder, count):
            place, line = builder.load(self.ahead), builder.sub(builder.load(self.line), lanes.whole(1))
            lanes.prefetch(builder, place)
            last = builder.icmp_signed("==", line, lanes.whole(0))
            place = builder.add(place, builder.select(last, builder.add(beyond, lanes.whole(64)), lanes.whole(64)))
            builder.store(place, self.ahead)
            builder.store(builder.select(last, lines, line), self.line)

    def _multiply(self, count: int) -> None:
        builder = self.builder
        for step in range(count):
            left, right = builder.load(self.left), builder.load(self.right)
            columns = [lanes.load(builder, right, VECTOR * part, REALS) for part in range(self.width)]
            if self.packs:
                for part in range(self.width):
                    lanes.store(builder, columns[part], builder.load(self.packed), VECTOR * part)
                self._move(self.packed, lanes.whole(VECTOR * self.width))
            for row in range(self.rows):
                offset = lanes.whole(4 * row)
                if not self.by_columns:
                    offset = builder.add(builder.mul(self.left_step, lanes.whole(row)), lanes.whole(4 * step))
                value = lanes.splat(builder, lanes.load(builder, left, offset, lanes.F32), LANES)
                for part in range(self.width):
                    place = self.sums[row, part]
                    builder.store(lanes.fma(builder, value, columns[part], builder.load(place)), place)
            if self.by_columns:
                self._move(self.left, self.left_step)
            self._move(self.right, self.right_step)
        if not self.by_columns:
            self._move(self.left, lanes.whole(4 * count))


# Positions of functions in the table.
_TRANSPOSE, _COPY_HALVES = 0, 4


def _number(kind: int, rows: int, width: int) -> int:
    """Return the number of a tile; 1, 2 and 3 copy rows of one, two and three vectors."""
    return kind * 64 + rows * 4 + width


def _functions(module: ir.Module) -> Iterator[tuple[int, ir.Function]]:
    yield _TRANSPOSE, function(module, "sgemm_transpose", [lanes.I64] * 8, transpose_body)
    yield _COPY_HALVES, function(module, "sgemm_copy_halves", [lanes.I64] * 6, copy_halves_body)
    for width in _WIDTHS:
        yield width, function(module, f"sgemm_copy_{width}", [lanes.I64] * 5, copy_body(width))
        for rows in _ROWS:
            for kind in (BY_ROWS, BY_COLUMNS, BY_ROWS_PACKING)[: 3 if rows == ROWS else 2]:
                yield _number(kind, rows, width), _Tile(kind, rows, width).function(module)


@instruction("", "n")
def code(builder):
    """Return the address of the table of all functions; only callers of this function are compiled with them."""
    functions = dict(_functions(builder.module))
    kind = ir.ArrayType(lanes.POINTER, max(functions) + 1)
    empty = ir.Constant(lanes.POINTER, None)
    entries = [
        functions[number].bitcast(lanes.POINTER) if number in functions else empty for number in range(kind.count)
    ]
    table = ir.GlobalVariable(builder.module, kind, "sgemm_code")
    table.linkage, table.global_constant, table.initializer = "internal", True, ir.Constant(kind, entries)
    return builder.ptrtoint(table, lanes.I64)


def _call(builder: ir.IRBuilder, table: ir.Value, number: ir.Value, arguments: Sequence[ir.Value]) -> None:
    """Call the function of a number in the table."""
    place = builder.add(table, builder.shl(number, lanes.whole(3)))
    address = builder.load(builder.inttoptr(place, lanes.POINTER.as_pointer()))
    kind = ir.FunctionType(lanes.VOID, [argument.type for argument in arguments])
    builder.call(builder.bitcast(address, kind.as_pointer()), arguments)


@instruction("n n n n n n7 n n n n s")
def multiply(builder, code, kind, rows, width, steps, operands, ahead, ahead_count, ahead_lines, ahead_step, beta):
    """Compute `rows` (1, 2, 4 or 8) x LANES `width` (1, 2, 3) numbers: total = beta * total + left @ right.

    operands: left, left_step, right, right_step, where to pack the right one, total, total_step.
    """
    number = builder.add(builder.shl(kind, lanes.whole(6)), builder.add(builder.shl(rows, lanes.whole(2)), width))
    values = [steps, *cgutils.unpack_tuple(builder, operands), ahead, ahead_count, ahead_lines, ahead_step, beta]
    _call(builder, code, number, values)


@instruction("n n n")
def fetch_lines(builder, start, step, count):
    """Fetch `count` cache lines, which begin `step` bytes from each other, into the second cache."""
    start = builder.inttoptr(start, lanes.POINTER)
    with cgutils.for_range(builder, count) as loop:
        lanes.prefetch(builder, start, builder.mul(loop.index, step))


@instruction("n n4 n n n n")
def transpose(builder, code, operands, target, target_step, target_rows, target_columns):
    """Write the transpose of LANES x LANES numbers.

    operands: source, its step, rows and columns; beyond these, source counts as zero, and target is not changed beyond
    its own rows and columns.
    """
    values = [*cgutils.unpack_tuple(builder, operands), target, target_step, target_rows, target_columns]
    _call(builder, code, lanes.whole(_TRANSPOSE), values)


@instruction("n n n n n n n")
def copy_rows(builder, code, width, source, step, rows, columns, target):
    """Copy `rows` rows of LANES `width` numbers to target, one after the other; zeros beyond `columns` of source."""
    _call(builder, code, width, [source, step, rows, columns, target])


@instruction("n n n n n n n")
def copy_halves(builder, code, source, step, rows, columns, target, distance):
    """Copy `rows` rows of LANES numbers, half of each to target, half `distance` further; zeros beyond `columns`."""
    _call(builder, code, lanes.whole(_COPY_HALVES), [source, step, rows, columns, target, distance])


# Scratch memory is kept from call to call, since fresh memory costs a page fault every 4 KB. A function that is called
# by its address cannot look up its thread: it takes memory from slots that all threads share, and gives it back.
_SLOTS = 64  # for addresses of free memory


@instruction("", "n")
def slots(builder):
    """Return the address of the slots of the function that calls this. Only the outermost function calls it."""
    kind = ir.ArrayType(lanes.I64, _SLOTS)
    places = ir.GlobalVariable(builder.module, kind, "scratch_slots")
    places.linkage, places.initializer = "internal", ir.Constant(kind, None)
    return builder.ptrtoint(places, lanes.I64)


@instruction("n", "n")
def _take_slot(builder, slot):
    """Empty the slot at an address; return its content, 0 if it was empty."""
    return builder.atomic_rmw("xchg", builder.inttoptr(slot, lanes.I64.as_pointer()), lanes.whole(0), "acquire")


@instruction("n n", "n")
def _fill_slot(builder, slot, address):
    """Put an address into a slot if the slot is empty; return whether it was."""
    place = builder.inttoptr(slot, lanes.I64.as_pointer())
    result = builder.cmpxchg(place, lanes.whole(0), address, "acq_rel", "acquire")
    return builder.zext(builder.extract_value(result, 1), lanes.I64)


@instruction("n", "n")
def _allocate(builder, size):
    return builder.ptrtoint(lanes.call(builder, "malloc", lanes.POINTER, [size]), lanes.I64)


@instruction("n")
def _release(builder, address):
    lanes.call(builder, "free", lanes.VOID, [builder.inttoptr(address, lanes.POINTER)])


@helper
def take(places, size):
    """Return the address of `size` bytes for this call alone; all requests at these slots have the same size."""
    for slot in range(_SLOTS):
        address = _take_slot(places + 8 * slot)
        if address != 0:
            return address
    return _allocate(size)


@helper
def give_back(places, scratch):
    """Give memory of `take` back, for the next call."""
    for slot in range(_SLOTS):
        if _fill_slot(places + 8 * slot, scratch):
            return
    _release(scratch)
