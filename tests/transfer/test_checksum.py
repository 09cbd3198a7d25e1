"""What the segment checksum notices."""

import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from dsv4_cluster.transfer.checksum import bound_checksum

BINDING = b"request, epoch, segment"


def as_tensor(data: bytes | bytearray) -> torch.Tensor:
    return torch.frombuffer(bytearray(data), dtype=torch.uint8) if data else torch.empty(0, dtype=torch.uint8)


@settings(max_examples=100, deadline=None)
@given(st.binary(min_size=1, max_size=2000), st.data())
def test_every_flipped_bit_changes_it(data, draw):
    bit = draw.draw(st.integers(0, 8 * len(data) - 1))
    flipped = bytearray(data)
    flipped[bit // 8] ^= 1 << (bit % 8)

    assert bound_checksum(as_tensor(flipped), BINDING) != bound_checksum(as_tensor(data), BINDING)


@settings(max_examples=50, deadline=None)
@given(st.binary(min_size=1, max_size=300), st.binary(min_size=1, max_size=300))
def test_the_order_of_the_bytes_changes_it(left, right):
    is_same = left + right == right + left

    one, other = bound_checksum(as_tensor(left + right), BINDING), bound_checksum(as_tensor(right + left), BINDING)

    assert (one == other) == is_same


@settings(max_examples=100, deadline=None)
@given(st.binary(min_size=1, max_size=300), st.integers(1, 300))
def test_truncation_and_padding_change_it(data, num_zeros):
    whole = bound_checksum(as_tensor(data), BINDING)

    assert bound_checksum(as_tensor(data[:-1]), BINDING) != whole
    assert bound_checksum(as_tensor(data + bytes(num_zeros)), BINDING) != whole


@settings(max_examples=100, deadline=None)
@given(st.binary(max_size=300), st.binary(max_size=40), st.binary(max_size=40))
def test_the_binding_changes_it_even_for_no_bytes(data, one, other):
    tensor = as_tensor(data)

    assert (bound_checksum(tensor, one) == bound_checksum(tensor, other)) == (one == other)


def test_it_does_not_depend_on_where_the_bytes_lie():
    data = torch.arange(4096, dtype=torch.int64).to(torch.uint8)
    padded = torch.cat([torch.zeros(3, dtype=torch.uint8), data])

    assert bound_checksum(padded[3:], BINDING) == bound_checksum(data, BINDING)


def test_it_is_the_same_on_every_machine():
    data = torch.arange(1000, dtype=torch.int64).to(torch.uint8)

    # Regenerate by printing this expression; both ends of a transfer must agree on it.
    assert bound_checksum(data, BINDING) == GOLDEN


GOLDEN = 2466121131217418266
