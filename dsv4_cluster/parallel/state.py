"""The place of one rank in the process mesh, passed to every layer at construction and never looked up."""

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class ParallelState:
    """Ranks and sizes of the tensor-parallel and expert-parallel axes. The default is a single rank."""

    tp_rank: int = 0
    tp_size: int = 1
    ep_rank: int = 0
    ep_size: int = 1

    def __post_init__(self) -> None:
        assert 0 <= self.tp_rank < self.tp_size, (self.tp_rank, self.tp_size)
        assert 0 <= self.ep_rank < self.ep_size, (self.ep_rank, self.ep_size)
