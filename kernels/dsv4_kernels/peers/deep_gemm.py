"""DeepGEMM's block-scaled FP8 products, its indexer scan, and the product within a hyper-connection.

Source: signatures of the package deep_gemm.
"""

from functools import partial
from typing import Any

import torch

from dsv4_kernels.gemm.fp8 import Fp8Weight
from dsv4_kernels.kv.rows import PagedRows
from dsv4_kernels.mhc import hc_post
from dsv4_kernels.mhc.reference import Mixed
from dsv4_kernels.peers import Peer, PeerCall, one_by_one
from dsv4_kernels.quant import Fp8Rows, decode_ue8m0, quantise_index_fp8
from dsv4_kernels.testing import relative_error

_BLOCK = 128
_ROUNDINGS = 0.01  # bf16 results, and other partial sums on the FP8 tensor core's 14 bits
_MIX_ROWS, _LEAST_OF_A_PART = 64, 256  # of a tile; columns of a part
_MOST_OTHER_SLOTS = 0.01  # of the selected ones: near the threshold scores of 14 bits swap places


def linear_peer() -> Peer:
    """Input sets have `rows` (Fp8Rows) and `weight` (Fp8Weight)."""
    return Peer("deep_gemm", one_by_one(_prepare_linear), _ROUNDINGS)


def scan_peer() -> Peer:
    """Input sets: q [S, H, 128] bf16, weights [S, H] fp32, pool of "index_fp8", page_table, seqs, num_visible."""
    prepare = one_by_one(partial(_prepare_scan, selects=False))
    return Peer("deep_gemm", prepare, _MOST_OTHER_SLOTS, "selection", is_part=True)


def select_peer(topk: int) -> Peer:
    """As `scan_peer`, and torch.topk of the scores."""
    prepare = one_by_one(partial(_prepare_scan, selects=True, topk=topk))
    return Peer("deep_gemm", prepare, _MOST_OTHER_SLOTS, "slots of the entries")


def mix_peer(norm_eps: float) -> Peer:
    """Input sets as of `mhc.hc_post_pre`: y, x [T, S, D], post, comb, fn, scale, base, norm_weight."""
    prepare = one_by_one(partial(_prepare_mix, norm_eps=norm_eps))
    return Peer("deep_gemm", prepare, _ROUNDINGS, "all but the product with fn and the squares", is_part=True)


def _prepare_linear(library: Any, inputs: Any) -> PeerCall:
    rows: Fp8Rows = inputs.rows
    weight: Fp8Weight = inputs.weight
    num_tokens, groups, num_rows = rows.values.shape[0], weight.num_groups, weight.rows_per_group
    scales = decode_ue8m0(rows.scales)
    out = torch.empty(num_tokens, groups * num_rows, dtype=torch.bfloat16, device=scales.device)
    if groups == 1:
        aligned = library.get_mn_major_tma_aligned_tensor(scales)
        call = partial(library.fp8_gemm_nt, (rows.values, aligned), (weight.values, weight.scales), out)
    else:
        by_group = scales.view(num_tokens, groups, -1).transpose(0, 1).contiguous()
        aligned = library.get_mn_major_tma_aligned_tensor(by_group).transpose(0, 1)
        matrices = weight.values.view(groups, num_rows, -1), weight.scales.view(groups, num_rows // _BLOCK, -1)
        tokens = rows.values.view(num_tokens, groups, -1), aligned
        target = out.view(num_tokens, groups, num_rows)
        call = partial(library.fp8_einsum, "bhr,hdr->bhd", tokens, matrices, target, recipe=(1, _BLOCK, _BLOCK))
    return PeerCall(call, lambda ours, _nothing: relative_error(out, ours))


def _prepare_scan(library: Any, inputs: tuple[Any, ...], *, selects: bool, topk: int = 0) -> PeerCall:
    q, weights, pool, page_table, _seqs, num_visible = inputs
    values, scale = quantise_index_fp8(q)
    lengths = num_visible.int()[:, None]
    schedule = library.get_paged_mqa_logits_metadata(lengths, pool.rows_per_page, library.get_num_sms())
    table = page_table.int()
    width = page_table.shape[1] * pool.rows_per_page
    scan = partial(
        library.fp8_paged_mqa_logits, values[:, None], _pages(pool), weights * scale, lengths, table, schedule, width
    )

    def select() -> Any:
        return scan().topk(topk).indices

    def difference(ours: tuple[torch.Tensor, torch.Tensor], raw: torch.Tensor) -> float:
        slots = ours[0]
        entries = raw if selects else raw.topk(slots.shape[1]).indices
        theirs = page_table.gather(1, entries // pool.rows_per_page) * pool.rows_per_page
        theirs = theirs + entries % pool.rows_per_page
        common = [float(torch.isin(a, b).float().mean()) for a, b in zip(slots, theirs, strict=True)]
        return 1.0 - sum(common) / len(common)

    return PeerCall(select if selects else scan, difference)


def _prepare_mix(library: Any, inputs: tuple[torch.Tensor, ...], *, norm_eps: float) -> PeerCall:
    y, x, post, comb, fn, scale, base, _norm_weight = inputs
    num_tokens, streams, dim = x.shape
    flat = hc_post(y, x, post, comb).flatten(1)
    parts = max(1, min(library.get_num_sms() // -(-num_tokens // _MIX_ROWS), flat.shape[1] // _LEAST_OF_A_PART))
    mixes = flat.new_empty(parts, num_tokens, fn.shape[0], dtype=torch.float32)
    squares = flat.new_empty(parts, num_tokens, dtype=torch.float32)
    call = partial(library.tf32_hc_prenorm_gemm, flat, fn, mixes, squares, parts)

    def difference(ours: Mixed, _nothing: None) -> float:
        mix = mixes.sum(0) * torch.rsqrt(squares.sum(0) / (streams * dim) + norm_eps)[:, None]
        here = slice(streams, 2 * streams)
        return relative_error(2 * torch.sigmoid(mix[:, here] * scale[1] + base[here]), ours.post)

    return PeerCall(call, difference)


def _pages(pool: PagedRows) -> torch.Tensor:
    return pool.pages.view(pool.num_pages, pool.rows_per_page, 1, pool.row_bytes)
