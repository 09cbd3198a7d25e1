"""Lightning indexer: score compressed entries per query and keep the best."""

from dsv4_kernels.indexer.op import hadamard, index_scores, index_slots, index_topk, select_topk

__all__ = ["hadamard", "index_scores", "index_slots", "index_topk", "select_topk"]
