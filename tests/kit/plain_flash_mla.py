"""What flash_mla's functions compute, in plain torch, by the layouts that its docstrings describe."""

import torch

_NOPE, _ROPE, _GROUP, _SCALES = 448, 64, 64, 8


def has_legacy():
    return True


def get_mla_metadata():
    return object(), None


def flash_mla_with_kvcache(
    q, k_cache, block_table, cache_seqlens, head_dim_v, tile_scheduler_metadata, *, softmax_scale, is_fp8_kvcache,
    indices, attn_sink, extra_k_cache, extra_indices_in_kvcache, use_legacy,
):  # fmt: skip
    """q: [B, S, H, 512]. Returns: [B, S, H, 512] bf16, and nothing of the statistics."""
    assert is_fp8_kvcache and use_legacy and block_table is cache_seqlens is None and tile_scheduler_metadata
    assert indices.dtype == extra_indices_in_kvcache.dtype == torch.int32
    rows = torch.cat((_rows(k_cache)[indices.long()], _rows(extra_k_cache)[extra_indices_in_kvcache.long()]), dim=2)
    return _attend(q, rows, attn_sink, softmax_scale)[..., :head_dim_v], None


def flash_mla_sparse_fwd(q, kv, indices, sm_scale, d_v, attn_sink, *, use_legacy, return_log2_lse):
    """q: [T, H, 512]. kv: [N, 1, 512]. indices: [T, 1, K] int32, all valid here. Returns: [T, H, d_v] bf16."""
    assert use_legacy and return_log2_lse is False and indices.dtype == torch.int32
    rows = kv[:, 0].float()[indices[:, 0].long()]
    return _attend(q, rows, attn_sink, sm_scale)[..., :d_v], None, None


def _rows(cache):
    """cache: [pages, rows, 1, 584] bytes; a page is the rows' values, 576 bytes each, then 8 scale bytes of each."""
    num_pages, num_rows = cache.shape[:2]
    width = _NOPE + 2 * _ROPE
    page = cache.as_strided((num_pages, num_rows * (width + _SCALES)), (cache.stride(0), 1))
    data = page[:, : num_rows * width].reshape(-1, width)
    scales = page[:, num_rows * width :].reshape(-1, _SCALES)[:, : _NOPE // _GROUP]
    values = data[:, :_NOPE].contiguous().view(torch.float8_e4m3fn).float()
    values = values * torch.exp2(scales.float() - 127).repeat_interleave(_GROUP, dim=1)
    return torch.cat((values, data[:, _NOPE:].contiguous().view(torch.bfloat16).float()), dim=1)


def _attend(q, rows, sink, scale):
    logits = q.float() @ rows.transpose(-1, -2) * scale
    logits = torch.cat((logits, sink[:, None].expand(*logits.shape[:-1], 1)), dim=-1)
    return (logits.softmax(-1)[..., :-1] @ rows).bfloat16()
