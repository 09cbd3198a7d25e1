"""Compressor: pool the tokens of a block into one entry."""

from dsv4_kernels.compressor.op import pool_entries

__all__ = ["pool_entries"]
