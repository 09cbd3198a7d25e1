"""Device functions that turn packed FP4 words into e4m3 operands of the tensor cores; see layout.py for the words.

Why e4m3 by table: per group of 32 weights two integer multiply-adds make an eight-entry table of e4m3 codes, already
times 2^offset; a byte permutation then looks four weights up at once. Seven instructions give eight signed weights,
which keeps the whole loop below five instructions per packed byte: memory stays the limit.
"""

# mypy: allow-untyped-defs, allow-incomplete-defs
import triton
import triton.language as tl

# e4m3 codes of 0, 0.5, 1, 1.5 and of 2, 3, 4, 6, each times 2^-5, lowest byte first; one octave is 8 in every code.
_LOW_TABLE = tl.constexpr(0x14100800)
_HIGH_TABLE = tl.constexpr(0x24201C18)
_LOW_OCTAVE = tl.constexpr(0x08080800)  # zero stays zero
_HIGH_OCTAVE = tl.constexpr(0x08080808)
UNIT_OFFSET = tl.constexpr(5)  # the offset at which the table holds the plain FP4 values
_MAGNITUDES = tl.constexpr(0x77777777)
_SIGNS = tl.constexpr(0x80808080)


@triton.jit
def unpack_tile(words, offsets, rows: tl.constexpr, use_ptx: tl.constexpr):
    """A tile's weights times 2^(offset - 5).

    words: [rows/2, 2, 16] int32. offsets: [rows/2, 2] int32, a byte per group. Returns: [rows, 128] e4m3.
    The shapes follow the tensor core's operand: every reshape here is a renaming of registers, none moves data.
    """
    half: tl.constexpr = rows // 2
    group = tl.arange(0, 4)
    offset = (offsets.to(tl.uint32, bitcast=True)[:, :, None] >> (8 * group)[None, None, :]) & 0xFF
    low = tl.broadcast_to((offset * _LOW_OCTAVE + _LOW_TABLE).to(tl.uint32)[:, :, None, :], (half, 2, 4, 4))
    high = tl.broadcast_to((offset * _HIGH_OCTAVE + _HIGH_TABLE).to(tl.uint32)[:, :, None, :], (half, 2, 4, 4))
    first, second = _look_up(
        words.to(tl.uint32, bitcast=True), low.reshape(half, 2, 16), high.reshape(half, 2, 16), use_ptx
    )
    lanes = tl.join(first, second).reshape(half // 8, 8, 2, 4, 4, 2)  # [row >> 4, row & 7, row bit 3, j, g, half]
    return _bytes(lanes.permute(0, 2, 1, 4, 5, 3)).reshape(rows, 128).to(tl.float8e4nv, bitcast=True)


@triton.jit
def unpack_group(words, rows: tl.constexpr, use_ptx: tl.constexpr):
    """Plain weights of one group. words: [rows/2, 2, 4] int32, the words of group g for j = 0..3.

    Returns: [rows, 32] e4m3.
    """
    half: tl.constexpr = rows // 2
    low = tl.full((half, 2, 4), _LOW_TABLE + UNIT_OFFSET * _LOW_OCTAVE, tl.uint32)
    high = tl.full((half, 2, 4), _HIGH_TABLE + UNIT_OFFSET * _HIGH_OCTAVE, tl.uint32)
    first, second = _look_up(words.to(tl.uint32, bitcast=True), low, high, use_ptx)
    lanes = tl.join(first, second).reshape(half // 8, 8, 2, 4, 2)  # [row >> 4, row & 7, row bit 3, j, half]
    return _bytes(lanes.permute(0, 2, 1, 4, 3)).reshape(rows, 32).to(tl.float8e4nv, bitcast=True)


@triton.jit
def _look_up(words, low, high, use_ptx: tl.constexpr):
    """Signed e4m3 codes of the first and second four weights of every word, four to a word."""
    if use_ptx:
        first, second = tl.inline_asm_elementwise(
            """{ .reg .u32 s, t, u;
            and.b32 s, $2, 0x77777777; prmt.b32 t, $3, $4, s; lop3.b32 $0, t, $2, 0x80808080, 0xF8;
            shr.u32 s, s, 16; prmt.b32 t, $3, $4, s; shl.b32 u, $2, 4; lop3.b32 $1, t, u, 0x80808080, 0xF8; }""",
            "=r,=r,r,r,r",
            [words, low, high],
            dtype=(tl.uint32, tl.uint32),
            is_pure=True,
            pack=1,
        )
    else:
        selectors = words & _MAGNITUDES
        first = _permute_bytes(selectors, low, high) | (words & _SIGNS)
        second = _permute_bytes(selectors >> 16, low, high) | ((words << 4) & _SIGNS)
    return first, second


@triton.jit
def _permute_bytes(selectors, low, high):
    """Bytes 0-3 come from low, 4-7 from high; selector i is nibble i."""
    out = tl.zeros_like(selectors)
    for i in tl.static_range(4):
        pick = (selectors >> (4 * i)) & 7
        byte = tl.where(pick < 4, low >> (8 * (pick & 3)), high >> (8 * (pick & 3))) & 0xFF
        out |= byte << (8 * i)
    return out


@triton.jit
def _bytes(words):
    """[...] uint32 -> [..., 2, 2] uint8, the bytes in order."""
    byte0 = (words & 0xFF).to(tl.uint8)
    byte1 = ((words >> 8) & 0xFF).to(tl.uint8)
    byte2 = ((words >> 16) & 0xFF).to(tl.uint8)
    byte3 = (words >> 24).to(tl.uint8)
    return tl.join(tl.join(byte0, byte2), tl.join(byte1, byte3))
