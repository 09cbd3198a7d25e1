"""What Marlin's operators compute, in plain torch, by the layouts that its packing functions describe."""

import torch

_MAGNITUDES = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)


def moe_align_block_size(ids, num_experts, block, pairs, owners, count, expert_map):
    """Pairs of one expert stand together; the rest of its last block is the number of all pairs."""
    assert expert_map is None and ids.dtype == torch.int32
    pairs.fill_(ids.numel())
    owners.fill_(-1)
    at = 0
    for expert in range(num_experts):
        mine = (ids.flatten() == expert).nonzero().flatten()
        num_blocks = -(-len(mine) // block)
        pairs[at : at + len(mine)] = mine.int()
        owners[at // block : at // block + num_blocks] = expert
        at += num_blocks * block
    count.fill_(at)


def moe_wna16_marlin_gemm(
    a, c, weights, bias, scales, a_scales, global_scale, zeros, locks, pairs, owners, count, topk_weights, block, topk,
    is_weighted, type_number, size_m, size_n, size_k, *options,
):  # fmt: skip
    """a: [M, K] bf16. c: [M * topk, N], written. weights: [E, K / 16, 2 N]. scales: [E, K / 32, N]."""
    assert bias is a_scales is global_scale is zeros is None and options == (False, True, False, -1, -1, -1)
    assert type_number == 0x2000000010102 and a.shape == (size_m, size_k) and c.shape == (size_m * topk, size_n)
    matrices = [_decode(one, scale) for one, scale in zip(weights, scales.view(torch.uint8), strict=True)]
    for at in range(0, int(count), block):
        for pair in pairs[at : at + block].tolist():
            if pair < len(c):
                factor = topk_weights.flatten()[pair] if is_weighted else 1.0
                c[pair] = (a[pair // topk].float() @ matrices[owners[at // block]] * factor).to(c.dtype)
    return c


def _decode(words, scales):
    """Values [K, N]: what the lanes of a warp find in their words."""
    num_tiles, width = words.shape
    num_columns = width // 2
    codes = torch.empty(num_tiles * 16, num_columns, dtype=torch.int64)
    for tile in range(num_columns // 64):
        for lane in range(32):
            for block in range(4):
                word = words[:, 128 * tile + 4 * lane + block].long()
                for row, column, nibble in _fragment(lane):
                    codes[row::16, 64 * tile + 16 * block + column] = word >> 4 * nibble & 15
    values = torch.tensor(_MAGNITUDES)[codes & 7] * (1 - 2 * (codes >> 3))
    exponents = torch.empty_like(scales)
    for column in range(num_columns):
        first, within = column - column % 64, column % 64
        place = within % 8 * 8 + within // 8  # a lane's eight columns stand together
        swapped = place - place % 4 + (0, 2, 1, 3)[place % 4]
        exponents[:, column] = scales[:, first + swapped]
    return values * torch.exp2(exponents.float() - 127).repeat_interleave(32, dim=0)


def _fragment(lane):
    """Row, column and nibble of a lane's eight codes: operands of two m16n8k16 products."""
    column, row = lane // 4, lane % 4 * 2
    return [(row, column, 0), (row + 8, column, 1), (row, column + 8, 2), (row + 8, column + 8, 3),
            (row + 1, column, 4), (row + 9, column, 5), (row + 1, column + 8, 6), (row + 9, column + 8, 7)]  # fmt: skip
