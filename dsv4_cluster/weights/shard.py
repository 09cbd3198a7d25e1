"""Which part of a tensor a rank owns. Source: spec 7.1."""

from dataclasses import dataclass
from typing import Literal

from dsv4_cluster.errors import ConfigError


@dataclass(frozen=True, slots=True)
class ShardRule:
    """Split `dim` evenly over an axis of the process mesh, in whole multiples of `unit`; dim None = every rank has all.

    unit: rows or columns that must stay together (a head group, a quantisation block).
    """

    dim: int | None
    axis: Literal["tp", "ep"] = "tp"
    unit: int = 1

    def bounds(self, size: int, rank: int, num_ranks: int) -> tuple[int, int]:
        """Half-open range of indices along `dim` that `rank` owns. Raises: ConfigError when it does not divide."""
        if self.dim is None or num_ranks == 1:
            return 0, size
        if size % (num_ranks * self.unit):
            raise ConfigError(f"{size} in units of {self.unit} does not divide over {num_ranks} {self.axis} ranks")
        per_rank = size // num_ranks
        return rank * per_rank, (rank + 1) * per_rank


REPLICATED = ShardRule(None)
