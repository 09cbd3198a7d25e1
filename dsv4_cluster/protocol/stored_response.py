"""A response that is kept: its latest state and the items it answers."""

from dataclasses import dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class StoredResponse:
    """One response of one tenant, as JSON texts, because the store has no use for what is in them.

    body: the response object. items: the array of all input items it answers, those of earlier responses included.
    is_over: False while it is queued or generated.
    """

    response_id: str
    tenant: str
    body: str
    items: str
    is_over: bool

    @property
    def num_bytes(self) -> int:
        """What it counts for in a bound on memory: characters of both texts, at least one byte each."""
        return len(self.body) + len(self.items)
