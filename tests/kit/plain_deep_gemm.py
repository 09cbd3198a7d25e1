"""What deep_gemm's functions compute, in plain torch, by the layouts that its signatures and checks describe."""

import torch

_BLOCK = 128


def get_num_sms():
    return 132


def get_mn_major_tma_aligned_tensor(scales):
    """The same numbers, with rows as the contiguous dim, padded to 16 bytes."""
    aligned = -(-scales.shape[-2] // 4) * 4
    made = scales.new_zeros(*scales.shape[:-2], scales.shape[-1], aligned)
    made[..., : scales.shape[-2]] = scales.transpose(-1, -2)
    return made.transpose(-1, -2)[..., : scales.shape[-2], :]


def fp8_gemm_nt(a, b, d):
    """a: [M, K] and scales [M, K / 128]. b: [N, K] and scales [N / 128, K / 128]. d: [M, N], written."""
    assert a[1].stride(0) == 1
    d.copy_(_widen(*a, 1) @ _widen(*b, _BLOCK).T)


def fp8_einsum(expression, a, b, d, *, recipe):
    """a: [T, G, K] and scales, rows contiguous in each group. b: [G, N, K] and scales. d: [T, G, N], written."""
    assert recipe == (1, _BLOCK, _BLOCK) and a[1].stride(0) == 1
    d.copy_(torch.einsum(expression, _widen(*a, 1), _widen(*b, _BLOCK)))


def get_paged_mqa_logits_metadata(context_lens, block_kv, num_sms):
    assert context_lens.dim() == 2 and context_lens.dtype == torch.int32 and block_kv == 64
    return torch.zeros(num_sms + 1, 2, dtype=torch.int32)


def fp8_paged_mqa_logits(q, kv_cache, weights, context_lens, block_table, schedule_meta, max_context_len):
    """q: [B, 1, H, D] e4m3. kv_cache: [pages, 64, 1, D + 4] bytes, values then scales. Returns: [B, length] fp32."""
    assert block_table.dtype == torch.int32 and schedule_meta.shape == (get_num_sms() + 1, 2)
    num_pages, num_rows, _, width = kv_cache.shape
    dim = width - 4
    page = kv_cache.view(num_pages, -1)
    values = page[:, : num_rows * dim].contiguous().view(torch.float8_e4m3fn).float().view(num_pages, num_rows, dim)
    keys = values * page[:, num_rows * dim :].contiguous().view(torch.float32)[..., None]
    keys = keys[block_table.long()].flatten(1, 2)  # [B, N, D]
    logits = (torch.relu(q[:, 0].float() @ keys.transpose(1, 2)) * weights[..., None]).sum(1)
    visible = torch.arange(max_context_len) < context_lens
    return logits[:, :max_context_len].masked_fill(~visible, float("-inf"))


def tf32_hc_prenorm_gemm(a, b, d, sqr_sum, num_splits):
    """a: [T, K] bf16. b: [N, K] fp32. d: [splits, T, N] and sqr_sum: [splits, T] fp32, parts, written."""
    assert d.shape[0] == sqr_sum.shape[0] == num_splits and b.dtype == torch.float32
    for part, columns in enumerate(torch.arange(a.shape[1]).tensor_split(num_splits)):
        d[part] = a[:, columns].float() @ b[:, columns].T
        sqr_sum[part] = a[:, columns].float().square().sum(1)


def _widen(values, scales, rows_per_scale):
    wide = scales.repeat_interleave(rows_per_scale, dim=-2) if rows_per_scale > 1 else scales
    return values.float() * wide.repeat_interleave(_BLOCK, dim=-1)
