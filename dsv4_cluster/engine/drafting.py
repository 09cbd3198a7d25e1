"""Speculation inside the engine: how many drafts, which ones, and the MTP layer's rows behind every step.

After a step a sequence of n computed tokens has true MTP rows at positions 0 .. n-2, and the main model's streams of
position n-1 in the hidden pool. Row n-1 pairs those streams with token n, which is no function of the n tokens: it is
computed when token n is there, and never moved or restored.

| rows of a step            | window rows of the MTP layer                   | hidden pool                        |
|---------------------------|------------------------------------------------|------------------------------------|
| drafting, before the step | n-1 true, n .. n+k-2 from drafts               | reads n-1                          |
| catch-up, after the step  | n-1 .. n'-2 true, n' tokens being computed     | reads n-1, then writes n .. n'-1   |
| rejected drafts           | n'-1 and later: overwritten before they count  | n' and later: never written        |

Catch-up costs next to nothing: a window row depends on its own streams and token only, so a step computes the last ring
of rows of each chunk and neither attention nor experts. A prompt therefore leaves a drafter that is warm.
"""

import time
from collections.abc import Callable, Mapping
from collections.abc import Sequence as Seq
from dataclasses import replace

import torch

from dsv4_cluster.config.speculation_config import SpeculationConfig
from dsv4_cluster.engine.loader import LoadedModel
from dsv4_cluster.engine.sequence import Sequence
from dsv4_cluster.engine.step import ScheduledChunk, StepPlan
from dsv4_cluster.sampling.batch import SamplingRow
from dsv4_cluster.speculation.budget import (
    PROBE_PERIOD_TOKENS,
    Acceptance,
    LineFit,
    StepCost,
    choose_num_drafts,
    share_drafts,
)
from dsv4_cluster.speculation.mtp_batch import MTPSpan, mtp_batch
from dsv4_cluster.speculation.mtp_proposer import MTPProposer
from dsv4_cluster.speculation.proposer import DraftRow, Proposer

RowOf = Callable[[Sequence, Seq[int]], SamplingRow]  # how the token after a sequence and these drafts is chosen
Prepare = Callable[[str, Seq[int]], None]  # told of a request id and drafts before RowOf is

# Cost of one more row, as a share of a step's fixed cost. An assumption, used until steps of several sizes were timed.
DEFAULT_ROW_SHARE = 0.25


class Drafting:
    """One engine's drafts. Without a proposer it hands out none; without an MTP layer it keeps no rows."""

    def __init__(
        self,
        loaded: LoadedModel,
        speculation: SpeculationConfig,
        row_of: RowOf,
        *,
        prepare: Prepare,
        proposer: Proposer | None = None,
    ) -> None:
        """proposer: instead of the MTP layer, which then still gets its rows."""
        self._loaded = loaded
        self._config = speculation
        self._row_of = row_of
        self._prepare = prepare
        self._proposer = proposer
        if proposer is None and loaded.mtp is not None:
            self._proposer = MTPProposer(loaded.mtp, loaded.model, loaded.pools.layer_caches, loaded.device)
        self._acceptance = Acceptance()
        self._step_fit = LineFit()
        self._pass_fit = LineFit()
        self.num_drafted = 0
        self.num_accepted = 0

    def limits(self, decoding: Seq[Sequence], budget: int) -> dict[str, int]:
        """Drafts per sequence, at most `budget` in total and none past the last token it may generate."""
        most = self._config.max_draft_tokens if self._proposer is not None else 0
        if most == 0 or not decoding:
            return {}
        wanted = [min(most, sequence.num_wanted_tokens - 1) for sequence in decoding]
        if self._config.num_draft_tokens == "auto":
            wanted = self._worthwhile(decoding, wanted)
        shared = share_drafts(wanted, budget)
        return {sequence.request_id: count for sequence, count in zip(decoding, shared, strict=True)}

    def propose(self, plan: StepPlan, sequences: Mapping[str, Sequence], slot_of: Callable[[str], int]) -> StepPlan:
        """Fill in the drafts of a plan."""
        chunks = [chunk for chunk in plan.scheduled if chunk.num_drafts]
        if not chunks:
            return plan
        assert self._proposer is not None
        started = time.perf_counter()
        rows = [self._draft_row(sequences[c.request_id], slot_of(c.request_id), c.num_drafts) for c in chunks]
        drafts = self._proposer.propose(rows)
        num_passes = max(map(len, drafts))
        if num_passes:
            num_rows = round(sum(map(len, drafts)) / num_passes)
            self._pass_fit = self._pass_fit.updated(num_rows, (time.perf_counter() - started) / num_passes)
        by_id = {chunk.request_id: tuple(tokens) for chunk, tokens in zip(chunks, drafts, strict=True)}
        scheduled = tuple(_with_drafts(chunk, by_id.get(chunk.request_id, ())) for chunk in plan.scheduled)
        return replace(plan, scheduled=scheduled)

    def record(self, sequence: Sequence, num_drafted: int, num_accepted: int) -> None:
        """Take note of one verification."""
        if num_drafted:
            sequence.acceptance = sequence.acceptance.updated(num_drafted, num_accepted)
            self._acceptance = self._acceptance.updated(num_drafted, num_accepted)
            self.num_drafted += num_drafted
            self.num_accepted += num_accepted

    def record_step(self, plan: StepPlan, seconds: float) -> None:
        """Take note of what a step cost, drafting excluded. Steps with prompt chunks say nothing about decoding."""
        if all(chunk.samples and chunk.end - chunk.start == 1 for chunk in plan.scheduled):
            self._step_fit = self._step_fit.updated(plan.num_tokens, seconds)

    @torch.inference_mode()
    def catch_up(
        self, plan: StepPlan, sequences: Mapping[str, Sequence], slot_of: Callable[[str], int], streams: torch.Tensor
    ) -> None:
        """Write the MTP rows that the step made possible and keep the last streams.

        streams: [T, S, D] of the step. The sequences have their new lengths and still own their slots.
        """
        mtp = self._loaded.mtp
        if mtp is None:
            return
        rows = _CatchUp(self._loaded, streams)
        first_row = 0
        for chunk in plan.scheduled:
            rows.add(chunk, sequences[chunk.request_id], slot_of(chunk.request_id), first_row)
            first_row += chunk.num_tokens
        rows.write()

    def _draft_row(self, sequence: Sequence, slot: int, num_drafts: int) -> DraftRow:
        return DraftRow(
            sequence.token_ids,
            slot,
            num_drafts,
            sampling_row=lambda drafts: self._row_of(sequence, drafts),
            prepare=lambda drafts: self._prepare(sequence.request_id, drafts),
        )

    def _worthwhile(self, decoding: Seq[Sequence], limits: list[int]) -> list[int]:
        prior = self._acceptance.rates()
        cost = StepCost(*self._step_fit.line(DEFAULT_ROW_SHARE), *self._pass_cost())
        chosen = choose_num_drafts([sequence.acceptance.rates(prior) for sequence in decoding], limits, cost)
        for i, sequence in enumerate(decoding):
            if sequence.num_generated_tokens % PROBE_PERIOD_TOKENS == 1:
                chosen[i] = max(chosen[i], min(1, limits[i]))
        return chosen

    def _pass_cost(self) -> tuple[float, float]:
        """(fixed, per row) of a draft pass; before one was timed, that of one layer among all."""
        if self._pass_fit.weight:
            return self._pass_fit.line(DEFAULT_ROW_SHARE)
        fixed, per_row = self._step_fit.line(DEFAULT_ROW_SHARE)
        share = 1.0 / self._loaded.config.num_hidden_layers
        return fixed * share, per_row * share


class _CatchUp:
    """Collects the rows of one step over all sequences, then writes them in one pass."""

    def __init__(self, loaded: LoadedModel, streams: torch.Tensor) -> None:
        self._loaded = loaded
        self._streams = streams
        cache = loaded.pools.layer_caches[-1]
        assert cache.hidden is not None and loaded.mtp is not None
        self._hidden, self._mtp, self._window_ring = cache.hidden, loaded.mtp, cache.window.rows_per_page
        self._spans: list[MTPSpan] = []
        self._fresh_rows: list[int] = []  # rows of `streams` that MTP rows are made from
        self._kept_slots: list[int] = []  # hidden rows of earlier steps, the same
        self._order: list[int] = []  # per MTP row: index of a fresh row, or -1 - index of a kept one
        self._new_rows: list[int] = []  # rows of `streams` to keep, and where
        self._new_slots: list[int] = []

    def add(self, chunk: ScheduledChunk, sequence: Sequence, slot: int, first_row: int) -> None:
        """The rows of one chunk, which begins at `first_row` of the streams."""
        ring = self._hidden.rows_per_page
        end = sequence.num_computed_tokens
        first = max(0, chunk.start - 1, end - 1 - self._window_ring)  # older rows would leave the ring at once
        if first < end - 1:
            self._spans.append(MTPSpan(slot, first, sequence.token_ids[first + 1 : end]))
            if first < chunk.start:
                self._kept_slots.append(slot * ring + first % ring)
                self._order.append(-len(self._kept_slots))
            num_fresh = end - 1 - max(first, chunk.start)
            self._order += range(len(self._fresh_rows), len(self._fresh_rows) + num_fresh)
            self._fresh_rows += range(first_row + end - 1 - chunk.start - num_fresh, first_row + end - 1 - chunk.start)
        for position in range(max(chunk.start, end - ring), end):
            self._new_rows.append(first_row + position - chunk.start)
            self._new_slots.append(slot * ring + position % ring)

    def write(self) -> None:
        """MTP rows first: the hidden rows they read are about to be replaced."""
        streams, device = self._streams.flatten(1), self._loaded.device  # [T, S * D]

        def ints(values: list[int]) -> torch.Tensor:
            return torch.tensor(values, dtype=torch.int64, device=device)

        if self._spans:
            hidden = streams[ints(self._fresh_rows)]
            if self._kept_slots:
                kept = self._hidden.gather(ints(self._kept_slots)).flip(0)  # -1 is the first kept row, from the end
                hidden = torch.cat((hidden, kept))[ints(self._order)]
            hidden = hidden.view(-1, *self._streams.shape[1:])  # [N, S, D]
            batch = mtp_batch(self._spans, self._loaded.pools.layer_caches, device)
            self._mtp.store_rows(batch, hidden, self._loaded.model)
        self._hidden.write(ints(self._new_slots), streams[ints(self._new_rows)])


def _with_drafts(chunk: ScheduledChunk, drafts: tuple[int, ...]) -> ScheduledChunk:
    assert len(drafts) <= chunk.num_drafts, (len(drafts), chunk.num_drafts)
    return replace(chunk, num_drafts=len(drafts), draft_token_ids=drafts)
