"""Hands out ids from a fixed range, each to one owner at a time."""


class IdAllocator:
    """Free list over 0..num_ids-1, used for pages and for sequence slots. Last returned, first reused."""

    __slots__ = ("_free", "_is_free", "num_ids")

    def __init__(self, num_ids: int) -> None:
        self.num_ids = num_ids
        self._free = list(range(num_ids - 1, -1, -1))
        self._is_free = bytearray(b"\x01" * num_ids)

    @property
    def num_free(self) -> int:
        """Ids that nobody owns."""
        return len(self._free)

    def take(self, count: int) -> list[int] | None:
        """`count` distinct ids, or None when fewer are free; then nothing changes."""
        if count > len(self._free):
            return None
        first = len(self._free) - count
        ids = self._free[first:]
        del self._free[first:]
        for i in ids:
            self._is_free[i] = 0
        ids.reverse()
        return ids

    def give_back(self, ids: list[int]) -> None:
        """Return ids that were taken."""
        for i in ids:
            assert not self._is_free[i], f"id {i} of {self.num_ids} is freed twice"
            self._is_free[i] = 1
        self._free.extend(reversed(ids))

    def free_ids(self) -> list[int]:
        """The free ids, for checks."""
        return list(self._free)
