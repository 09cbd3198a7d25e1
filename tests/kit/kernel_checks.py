"""What every kernel must survive: poisoned outputs, guarded allocations, graph replay with other data, any batch."""

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
from torch.overrides import TorchFunctionMode

_MARGIN_BYTES = 1024  # on either side of an allocation; keeps the 16-byte alignment that kernels are compiled for
_CANARY = 0xA5
_POISON_FLOAT = 0xFF  # NaN in every float format that kernels use
_POISON_INTEGER = 0x5A  # a large positive number: an index that was never written goes far out of range
_EMPTY = (torch.empty, torch.empty_like, torch.Tensor.new_empty)


@dataclass
class GuardedAllocations(TorchFunctionMode):
    """See `guarded_allocations`."""

    blocks: list[tuple[torch.Tensor, int]] = field(default_factory=list)

    def __post_init__(self) -> None:
        super().__init__()

    def __torch_function__(
        self, func: Callable[..., Any], types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        result = func(*args, **(kwargs or {}))
        return self._guard(result) if func in _EMPTY else result

    def _guard(self, plain: torch.Tensor) -> torch.Tensor:
        num_bytes = plain.numel() * plain.element_size()
        block = torch.full((num_bytes + 2 * _MARGIN_BYTES,), _CANARY, dtype=torch.uint8, device=plain.device)
        inside = block[_MARGIN_BYTES : _MARGIN_BYTES + num_bytes]
        is_float = plain.dtype.is_floating_point
        inside.fill_(_POISON_FLOAT if is_float else 0 if plain.dtype == torch.bool else _POISON_INTEGER)
        self.blocks.append((block, num_bytes))
        return inside.view(plain.dtype).view(plain.shape)

    def check(self) -> None:
        """Raises: AssertionError naming the allocation whose margin was written."""
        for block, num_bytes in self.blocks:
            before, after = block[:_MARGIN_BYTES], block[_MARGIN_BYTES + num_bytes :]
            for side, margin in (("before", before), ("behind", after)):
                wrong = (margin != _CANARY).nonzero()
                assert not len(wrong), f"write {side} an allocation of {num_bytes} bytes, at margin byte {wrong[0, 0]}"


@contextmanager
def guarded_allocations() -> Iterator[GuardedAllocations]:
    """`torch.empty` and its kin return poisoned memory between margins, which are checked at the end."""
    guard = GuardedAllocations()
    with guard:
        yield guard
    guard.check()


def assert_fully_written(*outputs: torch.Tensor) -> None:
    """No output still holds the poison of `guarded_allocations`."""
    for index, out in enumerate(outputs):
        if out.dtype.is_floating_point:
            left = out.float().isnan()
        else:
            poison = torch.full((out.element_size(),), _POISON_INTEGER, dtype=torch.uint8, device=out.device)
            left = out == poison.view(out.dtype)
        assert not left.any(), f"output {index}: {int(left.sum())} of {out.numel()} elements were never written"


def assert_graph_replays(op: Callable[..., Any], first: Sequence[Any], second: Sequence[Any]) -> None:
    """Captured with `first` and replayed with the data of `second`, `op` gives what it gives eagerly, bit for bit.

    op: takes the elements of `first`, returns a tensor or a tuple. first, second: equal shapes; non-tensors are equal.
    """
    static = [value.clone() if isinstance(value, torch.Tensor) else value for value in first]
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        op(*static)  # compiles; capture must not
    torch.cuda.current_stream().wait_stream(stream)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        captured = _tensors(op(*static))

    for data in (second, first):
        for target, source in zip(static, data, strict=True):
            if isinstance(target, torch.Tensor):
                target.copy_(source)
        graph.replay()
        torch.cuda.synchronize()
        expected = _tensors(op(*[value.clone() if isinstance(value, torch.Tensor) else value for value in data]))
        for index, (left, right) in enumerate(zip(captured, expected, strict=True)):
            assert same_bits(left, right), f"output {index} differs between replay and eager run"


def assert_batch_invariant(
    op: Callable[..., Any], inputs: Sequence[Any], *, batched: Sequence[int], rows: Sequence[Sequence[int]]
) -> None:
    """A row's output bits do not depend on the rows beside it.

    inputs: of the whole batch. batched: which of them have the batch as first dim. rows: the selections to run.
    """
    whole = _tensors(op(*inputs))
    for selection in rows:
        index = torch.tensor(list(selection), device=whole[0].device)
        part = [value.index_select(0, index) if i in batched else value for i, value in enumerate(inputs)]
        for i, (left, right) in enumerate(zip(whole, _tensors(op(*part)), strict=True)):
            assert same_bits(left.index_select(0, index), right), f"output {i} of rows {list(selection)} differs"


def same_bits(left: torch.Tensor, right: torch.Tensor) -> bool:
    """Equal shape, dtype and bytes; NaN equals the same NaN."""
    if left.shape != right.shape or left.dtype != right.dtype:
        return False
    return torch.equal(left.contiguous().view(torch.uint8), right.contiguous().view(torch.uint8))


def _tensors(result: Any) -> tuple[torch.Tensor, ...]:
    return (result,) if isinstance(result, torch.Tensor) else tuple(result)
