"""The layout in which the GPU streams MXFP4 weights, made once when a checkpoint is loaded.

A matrix is cut into tiles of `rows_per_tile` rows and 128 columns, and a tile is contiguous. Rows and columns inside
are ordered so that a thread of a warpgroup finds its part of the tensor core's operand with 16-byte reads:

- row order: bit 3 of the row number comes first, then the others (a thread holds rows r and r + 8);
- a row has 16 words of 8 weights; word 4 j + g has the columns 32 g + 4 j + (0..3) and 32 g + 16 + 4 j + (0..3) of the
  tile, "first" and "second" four below;
- a word has the magnitudes of the first four in its low half and of the second four in its high half, 3 bits in every
  nibble, as selectors of a byte permutation. Bit 8 i + 7 is the sign of first weight i, bit 8 i + 3 of second weight i.

A group of 32 columns has a scale 2^e. Where the exponents of a tile lie within 12 octaves, the tile has one exponent
and its groups have offsets of 0..11, which the kernel folds into the e4m3 value: every FP4 value times any of them is
exact in e4m3. All-zero groups do not count. Where one tile does not fit, the whole matrix keeps its scale bytes, and
the kernel multiplies each group's product by its scale: slower, and exact for any scales.
"""

from dataclasses import dataclass

import torch

from dsv4_kernels.quant import decode_e2m1, decode_ue8m0, unpack_e2m1

BLOCK_K = 128  # columns of a tile, and activations per scale
GROUP = 32  # weights per scale
GROUPS = BLOCK_K // GROUP
WORDS = BLOCK_K // 8  # per row of a tile
MAX_OFFSET = 11  # of a group's exponent above the lowest that a tile can hold
TOP_OFFSET_EXPONENT = 6  # the largest fold: 6 * 2^6 = 384 is below e4m3's 448
HALF_TILE = 128  # gate rows, and up rows, of a tile of w13; also the values per scale of the hidden activations
_UE8M0_BIAS, _UE8M0_NAN = 127, 255
# Added to an activation's scale, 2^-22 (the floor of quantise_fp8) to 2^119, the exponent stays a normal fp32's.
_BASE_EXPONENTS = (-104, 8)


class Fp4LayoutError(ValueError):
    """Weights that the packed layout cannot hold; the message names the value and the limit."""


@dataclass(frozen=True, slots=True)
class PackedFp4:
    """E matrices of N rows and K columns. R = rows_per_tile."""

    words: torch.Tensor  # [E, N / R, K / 128, R, 16] int32
    exponents: torch.Tensor  # [E, N / R, K / 128, R] int32, byte g = offset of group g; UE8M0 byte when not folded
    block_exponent: torch.Tensor  # [E, N / R, K / 128] int32, times 2^23: added to an fp32's bits; 0 when not folded
    is_folded: bool

    @property
    def num_experts(self) -> int:
        return self.words.shape[0]

    @property
    def rows_per_tile(self) -> int:
        return self.words.shape[3]

    @property
    def num_rows(self) -> int:
        return self.words.shape[1] * self.rows_per_tile

    @property
    def num_columns(self) -> int:
        return self.words.shape[2] * BLOCK_K

    @property
    def num_bytes(self) -> int:
        return sum(t.numel() * t.element_size() for t in (self.words, self.exponents, self.block_exponent))


@dataclass(frozen=True, slots=True)
class Fp4Experts:
    """SwiGLU experts. A tile of w13 has 128 gate rows, then the 128 up rows of the same intermediate columns."""

    w13: PackedFp4  # N = 2 I, K = D, 256 rows per tile
    w2: PackedFp4  # N = D, K = I, 128 rows per tile
    limit: float  # of the clamped SwiGLU

    @property
    def num_experts(self) -> int:
        return self.w2.num_experts

    @property
    def hidden_size(self) -> int:
        return self.w2.num_rows

    @property
    def intermediate_size(self) -> int:
        return self.w2.num_columns


def can_pack(hidden_size: int, intermediate_size: int) -> bool:
    """Both sizes are whole numbers of tiles."""
    return hidden_size % BLOCK_K == 0 and intermediate_size % BLOCK_K == 0


def pack_fp4_experts(
    w1: tuple[torch.Tensor, torch.Tensor],
    w2: tuple[torch.Tensor, torch.Tensor],
    w3: tuple[torch.Tensor, torch.Tensor],
    limit: float,
) -> Fp4Experts:
    """Pack checkpoint tensors, each a pair (values, scales).

    w1 (gate), w3 (up): [E, I, D/2] int8 or uint8, two codes per byte; [E, I, D/32] uint8 or float8_e8m0fnu.
    w2 (down): [E, D, I/2]; [E, D, I/32]. limit: of the clamped SwiGLU.
    Raises: Fp4LayoutError when D or I is not a multiple of 128 or a scale is NaN.
    """
    gate, up, down = (_checked(*pair) for pair in (w1, w3, w2))
    stacked = tuple(
        torch.stack((a.unflatten(1, (-1, HALF_TILE)), b.unflatten(1, (-1, HALF_TILE))), dim=2).flatten(1, 3)
        for a, b in zip(gate, up, strict=True)
    )
    return Fp4Experts(_pack(stacked[0], stacked[1], 2 * HALF_TILE), _pack(*down, BLOCK_K), limit)


def unpack_fp4(packed: PackedFp4) -> torch.Tensor:
    """Exact values in the original order of rows and columns. Returns: [E, N, K] fp32."""
    codes, scales = unpack_codes(packed)
    return decode_e2m1(codes) * decode_ue8m0(scales).repeat_interleave(GROUP, dim=-1)


def unpack_codes(packed: PackedFp4) -> tuple[torch.Tensor, torch.Tensor]:
    """Codes and scales in the original order; a group of zeros has any scale.

    Returns: [E, N, K] uint8, one E2M1 code each; [E, N, K / 32] uint8, UE8M0.
    """
    codes = _codes_of(packed.words)  # [E, nt, kt, R, 128]
    shift = 8 * torch.arange(GROUPS, device=codes.device, dtype=torch.int32)
    exponent = (packed.exponents.unsqueeze(-1) >> shift) & 0xFF  # [E, nt, kt, R, 4]
    if packed.is_folded:
        base = (packed.block_exponent >> 23)[..., None, None] + TOP_OFFSET_EXPONENT - MAX_OFFSET
        exponent = exponent + base + _UE8M0_BIAS
    return _untiled(codes), _untiled(exponent.to(torch.uint8))


def _untiled(x: torch.Tensor) -> torch.Tensor:
    """[E, nt, kt, R in packed order, C] -> [E, N, kt * C]."""
    return _rows_in_order(x).transpose(2, 3).flatten(3, 4).flatten(1, 2)


def _checked(values: torch.Tensor, scales: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """As bytes, after the checks of shape and scales."""
    scales = scales.view(torch.uint8) if scales.dtype == torch.float8_e8m0fnu else scales
    num_rows, num_columns = values.shape[1], values.shape[2] * 2
    if num_rows % BLOCK_K or num_columns % BLOCK_K:
        raise Fp4LayoutError(f"a matrix is {num_rows} x {num_columns}, both must be multiples of {BLOCK_K}")
    if tuple(scales.shape) != (values.shape[0], num_rows, num_columns // GROUP):
        raise Fp4LayoutError(f"scales are {tuple(scales.shape)} for {tuple(values.shape)} packed values")
    if (scales == _UE8M0_NAN).any():
        raise Fp4LayoutError("a group has the scale NaN (byte 255)")
    return values.view(torch.uint8), scales


def _pack(values: torch.Tensor, scales: torch.Tensor, rows_per_tile: int) -> PackedFp4:
    """values: [E, N, K/2] uint8. scales: [E, N, K/32] uint8."""
    offsets, base, fits = _fold(values, scales, rows_per_tile)
    exponents = _tiled(offsets if fits else scales, rows_per_tile, GROUPS)  # [E, nt, kt, R, 4]
    shift = 8 * torch.arange(GROUPS, device=values.device)
    return PackedFp4(
        words=torch.stack([_words(_tiled(unpack_e2m1(one), rows_per_tile, BLOCK_K)) for one in values]),
        exponents=_int32((exponents.long() << shift).sum(-1)),
        block_exponent=base << 23 if fits else torch.zeros_like(base),
        is_folded=fits,
    )


def _fold(values: torch.Tensor, scales: torch.Tensor, rows_per_tile: int) -> tuple[torch.Tensor, torch.Tensor, bool]:
    """Offsets [E, N, K/32] in 0..11, exponents of the tiles [E, nt, kt] int32, and whether every tile fits."""
    magnitude = values & 0x77
    is_zero = (magnitude.unflatten(-1, (-1, GROUP // 2)) == 0).all(-1)  # [E, N, K/32]
    exponent = scales.int() - _UE8M0_BIAS
    by_tile = exponent.unflatten(1, (-1, rows_per_tile)).unflatten(-1, (-1, GROUPS))  # [E, nt, R, kt, 4]
    empty = is_zero.unflatten(1, (-1, rows_per_tile)).unflatten(-1, (-1, GROUPS))
    highest = by_tile.masked_fill(empty, -1000).amax((2, 4))  # [E, nt, kt]
    lowest = by_tile.masked_fill(empty, 1000).amin((2, 4))
    has_values = highest > -1000
    base = torch.where(has_values, highest - TOP_OFFSET_EXPONENT, 0)
    in_range = (base >= _BASE_EXPONENTS[0]) & (base <= _BASE_EXPONENTS[1])
    fits = (highest - lowest <= MAX_OFFSET) & in_range | ~has_values
    floor = (base + TOP_OFFSET_EXPONENT - MAX_OFFSET)[:, :, None, :, None]
    offsets = torch.where(empty, 0, by_tile - floor).flatten(3, 4).flatten(1, 2)
    return offsets, base, bool(fits.all())


def _tiled(x: torch.Tensor, rows_per_tile: int, per_block: int) -> torch.Tensor:
    """[..., N, C] -> [..., N / R, C / per_block, R in packed order, per_block]."""
    tiles = x.unflatten(-2, (-1, rows_per_tile)).unflatten(-1, (-1, per_block)).transpose(-3, -2)
    split = tiles.unflatten(-2, (-1, 2, 8))  # rows: [R / 16, bit 3, 8]
    return split.transpose(-4, -3).flatten(-4, -2)


def _rows_in_order(x: torch.Tensor) -> torch.Tensor:
    """Undo the row order. x: [..., R in packed order, C]."""
    return x.unflatten(-2, (2, -1, 8)).transpose(-4, -3).flatten(-4, -2)


def _words(codes: torch.Tensor) -> torch.Tensor:
    """[..., 128] codes of a tile's rows -> [..., 16] int32."""
    lanes = codes.long().unflatten(-1, (GROUPS, 2, 4, 4))  # [..., g, half, j, i]
    lanes = lanes.movedim(-2, -4).flatten(-4, -3)  # [..., (j, g), half, i]
    first = 4 * torch.arange(4, device=codes.device)
    shift = torch.stack((first, first + 16))  # [half, i]
    sign = torch.stack((2 * first + 7, 2 * first + 3))
    return _int32((((lanes & 7) << shift) | ((lanes >> 3) << sign)).sum((-2, -1)))


def _codes_of(words: torch.Tensor) -> torch.Tensor:
    """Inverse of `_words`. Returns: [..., 128] uint8."""
    first = 4 * torch.arange(4, device=words.device, dtype=torch.int32)
    shift = torch.stack((first, first + 16))
    sign = torch.stack((2 * first + 7, 2 * first + 3))
    word = words[..., None, None]
    lanes = ((word >> shift) & 7) | (((word >> sign) & 1) << 3)  # [..., (j, g), half, i]
    return lanes.unflatten(-3, (4, GROUPS)).movedim(-4, -2).flatten(-4, -1).to(torch.uint8)


def _int32(bits: torch.Tensor) -> torch.Tensor:
    """Reinterpret 32 unsigned bits held in int64."""
    return torch.where(bits >= 1 << 31, bits - (1 << 32), bits).to(torch.int32)
