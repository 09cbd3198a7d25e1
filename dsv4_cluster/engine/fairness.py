"""Whose request is next: priority first, then the tenant that got least, then who came first.

Service is counted in computed tokens. A tenant that had nothing to do starts level with the least served active one:
being idle earns no credit, and nobody pays for having had the machine alone. A tenant with requests is never overtaken
for ever: each token that others get brings its turn closer. Priorities are strict: a lower number always goes first.
"""

from collections import Counter, OrderedDict
from collections.abc import Iterator
from itertools import islice

from dsv4_cluster.engine.sequence import Sequence

_Class = tuple[int, str]  # priority, tenant


class TenantShares:
    """Tokens computed per tenant, as far as they matter for who is next."""

    def __init__(self) -> None:
        self._served: dict[str, int] = {}
        self._num_sequences: Counter[str] = Counter()

    def enter(self, tenant: str) -> None:
        """A sequence of the tenant joins the queue or the running ones."""
        if not self._num_sequences[tenant]:
            least = min((self._served[active] for active in +self._num_sequences), default=0)
            self._served = {t: n for t, n in self._served.items() if self._num_sequences[t] or n > least}
            self._served[tenant] = max(self._served.get(tenant, 0), least)
        self._num_sequences[tenant] += 1

    def leave(self, tenant: str) -> None:
        """A sequence of the tenant is gone."""
        self._num_sequences[tenant] -= 1
        assert self._num_sequences[tenant] >= 0, f"tenant {tenant!r} has {self._num_sequences[tenant]} sequences"
        if not +self._num_sequences:
            self._served.clear()
            self._num_sequences.clear()

    def serve(self, tenant: str, num_tokens: int) -> None:
        """The tenant gets tokens computed; negative when they are taken back."""
        self._served[tenant] += num_tokens

    def served(self, tenant: str) -> int:
        """Tokens of a tenant that has sequences."""
        return self._served[tenant]


class WaitingQueue:
    """Sequences without pages, by priority and tenant; first come, first served within both."""

    def __init__(self, shares: TenantShares) -> None:
        self._shares = shares
        self._classes: dict[_Class, OrderedDict[str, Sequence]] = {}
        self._num_sequences = 0
        self.num_tokens = 0  # of all sequences, prompts and answers so far

    def __len__(self) -> int:
        return self._num_sequences

    def append(self, sequence: Sequence, *, is_first: bool = False) -> None:
        """Add a sequence behind those of its priority and tenant, or before them."""
        members = self._classes.setdefault(_class_of(sequence), OrderedDict())
        assert sequence.request_id not in members, f"{sequence.request_id} waits already"
        members[sequence.request_id] = sequence
        members.move_to_end(sequence.request_id, last=not is_first)
        self._num_sequences += 1
        self.num_tokens += len(sequence.token_ids)

    def remove(self, sequence: Sequence) -> None:
        """Take a sequence out."""
        key = _class_of(sequence)
        del self._classes[key][sequence.request_id]
        if not self._classes[key]:
            del self._classes[key]
        self._num_sequences -= 1
        self.num_tokens -= len(sequence.token_ids)

    def by_turn(self) -> Iterator[Sequence]:
        """Yield who is next; whoever is still in the queue afterwards is passed over and not yielded again.

        Service is looked at before every turn, so the sequences that one step admits alternate between tenants.
        """
        num_passed: Counter[_Class] = Counter()
        while True:
            open_classes = [key for key, members in self._classes.items() if len(members) > num_passed[key]]
            if not open_classes:
                return
            key = min(open_classes, key=lambda key: (key[0], self._shares.served(key[1])))
            members = self._classes[key]
            sequence = next(islice(members.values(), num_passed[key], None))
            yield sequence
            num_passed[key] += sequence.request_id in members


def urgency(sequence: Sequence) -> tuple[int, int]:
    """Order among running sequences, by priority and age: the greatest gives way first."""
    return sequence.request.priority, sequence.admission_id


def _class_of(sequence: Sequence) -> _Class:
    return sequence.request.priority, sequence.request.tenant
