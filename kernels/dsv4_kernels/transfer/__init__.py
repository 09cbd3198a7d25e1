"""Rows of a cache pool as the bytes of a transfer segment, with a checksum."""

from dsv4_kernels.transfer.op import checksum, pack, unpack

__all__ = ["checksum", "pack", "unpack"]
