"""How many drafts each sequence gets in a step: pure functions of measured acceptance, measured cost and load.

A step with R rows costs `fixed + R * per_row`; one draft pass costs `fixed + R * per_row` of the draft layer. Drafting
is worth its cost while it raises the expected tokens per unit of time of the whole batch. Few sequences leave the
device idle, so rows are almost free and drafts deep; many fill it, and a doubtful draft takes time from the others.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Self

from dsv4_cluster.config.speculation_config import MAX_DRAFT_TOKENS

MEMORY_CHECKS = 64.0  # checked drafts after which an old one counts 1/e: follows a change of topic within an answer
PRIOR_CHECKS = 4.0  # checks that the engine-wide rate counts as, for a sequence of which nothing is known
FIRST_RATES = (0.7, 0.5, 0.4, 0.3)  # by depth, before anything is measured. Source: spec 5.4
PROBE_PERIOD_TOKENS = 64  # a sequence tries at least one draft this often, so that a low rate can recover

_Counts = tuple[float, ...]  # by depth, MAX_DRAFT_TOKENS long
_ZEROS: _Counts = (0.0,) * MAX_DRAFT_TOKENS


@dataclass(frozen=True, slots=True)
class Acceptance:
    """Decayed counts by depth. A draft behind a wrong one is not checked: it had no chance."""

    checked: _Counts = _ZEROS
    accepted: _Counts = _ZEROS

    def updated(self, num_drafted: int, num_accepted: int) -> Self:
        """After one verification."""
        keep = 1.0 - 1.0 / MEMORY_CHECKS
        checked, accepted = list(self.checked), list(self.accepted)
        for depth in range(min(num_drafted, num_accepted + 1)):
            checked[depth] = checked[depth] * keep + 1.0
            accepted[depth] = accepted[depth] * keep + (depth < num_accepted)
        return type(self)(tuple(checked), tuple(accepted))

    def rates(self, prior: Sequence[float] = FIRST_RATES) -> tuple[float, ...]:
        """By depth: the chance that a draft is right when those before it are."""
        return tuple(
            (accepted + PRIOR_CHECKS * rate) / (checked + PRIOR_CHECKS)
            for checked, accepted, rate in zip(self.checked, self.accepted, prior, strict=True)
        )


@dataclass(frozen=True, slots=True)
class LineFit:
    """Decayed least squares of cost over rows, cost = fixed + rows * per_row, both not negative."""

    memory: float = 0.98  # weight that an observation keeps with each newer one: the last 50 count
    weight: float = 0.0
    sum_x: float = 0.0
    sum_y: float = 0.0
    sum_xx: float = 0.0
    sum_xy: float = 0.0

    def updated(self, num_rows: int, cost_s: float) -> Self:
        """After one observation."""
        sums = (self.weight, self.sum_x, self.sum_y, self.sum_xx, self.sum_xy)
        new = (1.0, num_rows, cost_s, num_rows * num_rows, num_rows * cost_s)
        return type(self)(self.memory, *(old * self.memory + value for old, value in zip(sums, new, strict=True)))

    def line(self, default_share: float) -> tuple[float, float]:
        """(fixed, per_row). default_share: per_row as a share of fixed while all observations have the same rows."""
        if self.weight == 0:
            return 1.0, default_share
        mean_x, mean_y = self.sum_x / self.weight, self.sum_y / self.weight
        variance = self.sum_xx / self.weight - mean_x**2
        if variance < 0.25:  # rows differ by less than half a row: a slope would be noise
            fixed = mean_y / (1.0 + mean_x * default_share)
            return fixed, fixed * default_share
        per_row = (self.sum_xy / self.weight - mean_x * mean_y) / variance
        per_row = min(max(per_row, 0.0), mean_y / mean_x)
        return mean_y - per_row * mean_x, per_row


@dataclass(frozen=True, slots=True)
class StepCost:
    """Costs in any one unit of time."""

    fixed: float  # of a step, before its first row
    per_row: float  # of each verified row
    pass_fixed: float  # of a draft pass
    pass_per_row: float  # of each row of a draft pass


def choose_num_drafts(rates: Sequence[Sequence[float]], limits: Sequence[int], cost: StepCost) -> list[int]:
    """Drafts per row that maximise expected tokens per cost, depth by depth.

    rates: per row, by depth, see Acceptance.rates. limits: per row, most drafts.
    A depth is added for the rows that gain most, as long as their gain pays for their rows and the shared pass.
    """
    num_drafts = [0] * len(rates)
    reach = [1.0] * len(rates)  # chance that all drafts of a row so far are right
    tokens, total = float(len(rates)), cost.fixed + cost.per_row * len(rates)
    for depth in range(max(limits, default=0)):
        gains = sorted(
            ((reach[i] * rates[i][depth], i) for i, limit in enumerate(limits) if num_drafts[i] == depth < limit),
            reverse=True,
        )
        chosen, tokens, total = _best_prefix(gains, tokens, total, cost)
        for gain, i in chosen:
            num_drafts[i] += 1
            reach[i] = gain
        if not chosen:
            break
    return num_drafts


def share_drafts(wanted: Sequence[int], budget: int) -> list[int]:
    """Cut `wanted` to `budget` drafts in total, depth by depth, earlier rows first."""
    shared = [0] * len(wanted)
    for depth in range(max(wanted, default=0)):
        for i, count in enumerate(wanted):
            if count > depth and budget > 0:
                shared[i] += 1
                budget -= 1
    return shared


def _best_prefix(
    gains: list[tuple[float, int]], tokens: float, total: float, cost: StepCost
) -> tuple[list[tuple[float, int]], float, float]:
    """The longest worthwhile beginning of `gains`, with tokens and cost after it."""
    best, best_tokens, best_total = 0, tokens, total
    total += cost.pass_fixed
    for count, (gain, _) in enumerate(gains, start=1):
        tokens += gain
        total += cost.per_row + cost.pass_per_row
        if tokens * best_total > best_tokens * total:
            best, best_tokens, best_total = count, tokens, total
    return gains[:best], best_tokens, best_total
