"""FlashMLA's sparse attention for Hopper: decode over FP8 rows in pages, prefill over gathered bf16 rows.

Its pages have the layout of ours, so decode reads the same memory. Source: docstrings of the package flash_mla.
"""

from functools import partial
from typing import Any

import torch

from dsv4_kernels.attention.keys import PoolKeys
from dsv4_kernels.kv.rows import PagedRows
from dsv4_kernels.peers import Peer, PeerCall, one_by_one
from dsv4_kernels.rope import apply_rope_
from dsv4_kernels.testing import relative_error

_DIM = 512
_ROUNDINGS = 0.01  # both round weights and results to bf16, by other partial sums: 2^-9 each, and a few of them


def decode_peer() -> Peer:
    """Input sets: q [S, H, 512] bf16, [window, entries] PoolKeys of "kv_fp8", sink [H], cis [S, 32]."""
    return Peer("flash_mla", one_by_one(_prepare_decode), _ROUNDINGS, "rotation back")


def prefill_peer() -> Peer:
    """Input sets: q [T, H, 512] bf16, WindowKeys, PoolKeys, sink [H], cis [T, 32]."""
    lacks = "rotation back; the cache's rows are bf16, gathered beforehand"
    return Peer("flash_mla", one_by_one(_prepare_prefill), _ROUNDINGS, lacks)


def _prepare_decode(library: Any, inputs: tuple[Any, ...]) -> PeerCall:
    q, (window, entries), sink, cis = inputs
    schedule, _ = library.get_mla_metadata()
    call = partial(
        library.flash_mla_with_kvcache, q[:, None], _pages(window.pool), None, None, _DIM, schedule,
        softmax_scale=_DIM**-0.5, is_fp8_kvcache=True, indices=_slots(window)[:, None], attn_sink=sink,
        extra_k_cache=_pages(entries.pool), extra_indices_in_kvcache=_slots(entries)[:, None],
        **_hopper(library),
    )  # fmt: skip
    call()  # makes the schedule, which a model shares among its layers
    return PeerCall(call, lambda ours, raw: relative_error(apply_rope_(raw[0][:, 0].clone(), cis, inverse=True), ours))


def _prepare_prefill(library: Any, inputs: tuple[Any, ...]) -> PeerCall:
    q, window, entries, sink, cis = inputs
    rows = torch.cat((_rows(entries.pool), window.rows))  # [E + N, 512]
    width = int((window.end - window.begin).max())
    own = window.begin[:, None] + torch.arange(width, device=q.device)
    own = torch.where(own < window.end[:, None], own + rows.shape[0] - window.rows.shape[0], -1)
    slots = torch.cat((_slots(entries).expand(q.shape[0], -1), own.int()), dim=1)
    call = partial(
        library.flash_mla_sparse_fwd, q, rows[:, None], slots[:, None].contiguous(), _DIM**-0.5, _DIM, sink,
        **_hopper(library, return_log2_lse=False),
    )  # fmt: skip
    return PeerCall(call, lambda ours, raw: relative_error(apply_rope_(raw[0].clone(), cis, inverse=True), ours))


def _hopper(library: Any, **options: bool) -> dict[str, bool]:
    """The fork of the package that keeps the kernels for Hopper has them behind an argument, and options of its own."""
    return {"use_legacy": True, **options} if hasattr(library, "has_legacy") else {}


def _pages(pool: PagedRows) -> torch.Tensor:
    """[pages, rows per page, 1, bytes per row]; the last two strides are the payload of a row."""
    width = pool.row_bytes
    shape = (pool.num_pages, pool.rows_per_page, 1, width)
    return pool.pages.as_strided(shape, (pool.pages.shape[1], width, width, 1))


def _slots(keys: PoolKeys) -> torch.Tensor:
    return keys.slots.int()


def _rows(pool: PagedRows) -> torch.Tensor:
    return pool.gather(torch.arange(pool.num_pages * pool.rows_per_page, device=pool.pages.device))
