"""Compressor: pool the tokens of a block into one entry."""

from dsv4_kernels.compressor.op import pool_entries
from dsv4_kernels.compressor.step import CompressorBatch, CompressorPart, compress

__all__ = ["CompressorBatch", "CompressorPart", "compress", "pool_entries"]
