"""The 64-bit checksum of a segment's bytes.

XXH3 is order-sensitive and runs far above memory-copy speed, so verifying costs less than moving the bytes. It guards
against accidents (a reused buffer, a truncated stream, a flipped bit), not against an attacker.
"""

import torch
import xxhash


def bound_checksum(data: torch.Tensor, binding: bytes) -> int:
    """Checksum of `data` that also depends on `binding`: the same bytes under another binding do not verify.

    data: [num_bytes] uint8 on the CPU, contiguous.
    binding: who the bytes belong to and where they lie, encoded without ambiguity by the caller.
    Returns: an unsigned 64-bit integer. Releases the GIL while hashing.
    Source: XXH3 64-bit variant of the xxHash specification.
    """
    # The binding's own hash is the seed: a fixed-size, unambiguous prefix that leaves the data in one aligned pass.
    seed = xxhash.xxh3_64_intdigest(binding)
    return xxhash.xxh3_64_intdigest(data.numpy().data, seed=seed)
