"""FP4 keys as e4m3 operands of Hopper's tensor core, in registers; exact, whatever the exponents of their groups.

A key's groups are scaled relative to its largest: a table of e4m3 codes per group takes the exponent in, and a byte
permutation looks four values up at once. The table holds 12 octaves. Keys with a wider spread take more passes, each
with the groups of its own 12 octaves, which the fp32 sums put together.
"""

# mypy: allow-untyped-defs, allow-incomplete-defs

from dsv4_kernels.gluon import gl, jit, warpgroup_mma

# e4m3 codes of 0, 0.5, 1, 1.5 and of 2, 3, 4, 6, each times 2^-5, lowest byte first; one octave is 8 in every code.
_LOW_TABLE = gl.constexpr(0x14100800)
_HIGH_TABLE = gl.constexpr(0x24201C18)
_LOW_OCTAVE = gl.constexpr(0x08080800)  # zero stays zero
_HIGH_OCTAVE = gl.constexpr(0x08080808)
_OCTAVES = gl.constexpr(12)  # of group exponents in one table
_ROWS = gl.constexpr(64)
KEY_SCALE = gl.constexpr(2.0**-6)  # the largest group is looked up times 2^6

# A lane takes one group of a key: word 4 j + i of a row is i = 0 .. 3 of group j, and lanes 4 r + j share row r.
_GROUPED = gl.constexpr(
    gl.DistributedLinearLayout(
        [[0, 0, 1], [0, 0, 2], [8, 0, 0]],
        [[0, 1, 0], [0, 2, 0], [1, 0, 0], [2, 0, 0], [4, 0, 0]],
        [[16, 0, 0], [32, 0, 0]],
        [],
        [64, 4, 4],
    )
)
WORDS = gl.constexpr(
    gl.DistributedLinearLayout(
        [[0, 1], [0, 2], [8, 0]], [[0, 4], [0, 8], [1, 0], [2, 0], [4, 0]], [[16, 0], [32, 0]], [], [64, 16]
    )
)
CODES = gl.constexpr(gl.SliceLayout(1, gl.SliceLayout(2, _GROUPED.value)))


@jit
def value_at(position):
    """Which value of a row stands at a position of the operands: byte e of word i, half h, of lane j."""
    return (position >> 2) % 4 * 32 + (position >> 5) * 8 + (position >> 4) % 2 * 4 + position % 4


@jit
def fp4_products(words, codes, query, HEADS: gl.constexpr, sums: gl.constexpr):
    """Products of a page and their scales. words: [64, 16] int32 as WORDS. codes: [64] int32 as CODES, 4 UE8M0 each.

    query: [HEADS, 128] e4m3 in shared memory, in the order of `value_at`. Returns: [64, HEADS] fp32 and [64] fp32.
    """
    pairs: gl.constexpr = gl.SliceLayout(2, _GROUPED)
    code = (codes[:, None] >> (8 * gl.arange(0, 4, layout=gl.SliceLayout(0, pairs)))[None, :]) & 0xFF
    largest = gl.max(code, axis=1)
    below = largest[:, None] - code
    depth = gl.max(gl.max(below, axis=1), axis=0)
    grouped = gl.convert_layout(gl.reshape(words, [_ROWS, 4, 4]), _GROUPED, assert_trivial=True)
    products = _pass(grouped, below, query, HEADS, sums)
    for part in range(1, depth // _OCTAVES + 1):
        more = _pass(grouped, below - part * _OCTAVES, query, HEADS, sums)
        products += more * ((127 - part * _OCTAVES) << 23).to(gl.float32, bitcast=True)
    scale = (largest << 23).to(gl.float32, bitcast=True) * KEY_SCALE
    return products, gl.convert_layout(scale, gl.SliceLayout(1, sums))


@jit
def _pass(words, below, query, HEADS: gl.constexpr, sums: gl.constexpr):
    """Products with the groups that are 0 to 11 octaves `below` the largest."""
    is_here = (below >= 0) & (below < _OCTAVES)
    offset = _OCTAVES - 1 - below
    low = gl.where(is_here, offset * _LOW_OCTAVE + _LOW_TABLE, 0)
    high = gl.where(is_here, offset * _HIGH_OCTAVE + _HIGH_TABLE, 0)
    first, second = gl.inline_asm_elementwise(
        """{ .reg .u32 s, t, u, v;
        and.b32 s, $2, 0x77777777;
        prmt.b32 t, $3, $4, s; prmt.b32 u, $2, 0, 0x1100; shl.b32 v, u, 4;
        lop3.b32 u, u, v, 0xFF00FF00, 0xE4; lop3.b32 $0, t, u, 0x80808080, 0xF8;
        shr.u32 s, s, 16;
        prmt.b32 t, $3, $4, s; prmt.b32 u, $2, 0, 0x3322; shl.b32 v, u, 4;
        lop3.b32 u, u, v, 0xFF00FF00, 0xE4; lop3.b32 $1, t, u, 0x80808080, 0xF8; }""",
        "=&r,=r,r,r,r",
        [words, gl.broadcast(low[:, :, None], words)[0], gl.broadcast(high[:, :, None], words)[0]],
        dtype=(gl.int32, gl.int32),
        is_pure=True,
        pack=1,
    )
    halves = gl.join(first, second)  # [row, j, i, half]
    low_pair = gl.join((halves & 0xFF).to(gl.uint8), ((halves >> 16) & 0xFF).to(gl.uint8))
    high_pair = gl.join(((halves >> 8) & 0xFF).to(gl.uint8), ((halves >> 24) & 0xFF).to(gl.uint8))
    values = gl.join(low_pair, high_pair)  # [row, j, i, half, byte bit 1, byte bit 0]
    values = gl.reshape(gl.permute(values, (0, 2, 3, 1, 4, 5)), [_ROWS, 128]).to(gl.float8e4nv, bitcast=True)
    keys = gl.convert_layout(values, gl.DotOperandLayout(0, sums, 4), assert_trivial=True)
    products = gl.zeros([_ROWS, HEADS], gl.float32, layout=sums)
    return warpgroup_mma(keys, query.permute((1, 0)), products, use_acc=False)
