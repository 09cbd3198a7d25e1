"""EngineCore: add requests, call step, take tokens. Synchronous; one thread owns it.

A prefill engine holds a sequence after its first token until it is exported; a decode engine imports it and goes on.
Both are the same engine, so a decode engine can recompute a sequence it had to preempt.
"""

import time
from collections.abc import Sequence as Seq
from dataclasses import dataclass
from pathlib import Path
from typing import Self

import torch

from dsv4_cluster.clock import Clock, MonotonicClock
from dsv4_cluster.config.engine_config import EngineConfig
from dsv4_cluster.config.kv_config import KVConfig
from dsv4_cluster.config.speculation_config import SpeculationConfig
from dsv4_cluster.engine.admission import check_request
from dsv4_cluster.engine.batch_builder import build_batch, prompt_rows
from dsv4_cluster.engine.constraints import FREE, Constraints
from dsv4_cluster.engine.drafting import Drafting
from dsv4_cluster.engine.freed_memory import give_back_after_step
from dsv4_cluster.engine.loader import LoadedModel, load_model
from dsv4_cluster.engine.model_runner import ModelRunner
from dsv4_cluster.engine.outcome import Outcome, take_tokens
from dsv4_cluster.engine.residency import Residency
from dsv4_cluster.engine.sampling_rows import SamplingRows
from dsv4_cluster.engine.scheduler import Scheduler
from dsv4_cluster.engine.sequence import Sequence, SequenceStatus
from dsv4_cluster.engine.step import StepOutput, StepPlan
from dsv4_cluster.errors import DeadlineExceededError, Dsv4Error, InvalidRequestError, NonFiniteLogitsError
from dsv4_cluster.kv.manager import KVManager
from dsv4_cluster.kv.snapshot import LiveSegment, SegmentShape, export_live, live_segment_shapes
from dsv4_cluster.parallel.state import ParallelState
from dsv4_cluster.protocol.output import FinishReason, PromptLogprobs, TokenChunk
from dsv4_cluster.protocol.request import GenerationRequest
from dsv4_cluster.protocol.stats import EngineStats
from dsv4_cluster.sampling.batch import SamplingBatch, SamplingRow
from dsv4_cluster.sampling.logprobs import top_logprobs
from dsv4_cluster.sampling.sampler import sample_tokens
from dsv4_cluster.speculation.proposer import Proposer

GRAMMAR_WAIT_S = 0.005  # commands to an engine that only waits for grammars are taken after at most this


@dataclass(frozen=True, slots=True)
class SequenceExport:
    """The live cache bytes of a prefilled sequence. The first generated token is not in the cache."""

    num_tokens: int
    segments: tuple[LiveSegment, ...]


class EngineCore:
    """One rank's engine."""

    def __init__(
        self,
        loaded: LoadedModel,
        engine: EngineConfig,
        kv: KVConfig,
        speculation: SpeculationConfig | None = None,
        *,
        proposer: Proposer | None = None,
        clock: Clock | None = None,
    ) -> None:
        """proposer: makes the drafts instead of the MTP layer; None = the MTP layer, where speculation is on.
        clock: what deadlines are measured on; None = the machine's monotonic clock.
        """
        self.config = loaded.config
        self.layout_id = loaded.layout.layout_id
        self.max_model_len = loaded.max_model_len
        self.memory_plan = loaded.plan
        self._loaded = loaded
        self._clock = clock or MonotonicClock()
        self._runner = ModelRunner(
            loaded.model, vocab_size=loaded.config.vocab_size, is_row_by_row=loaded.is_row_by_row
        )
        self._kv = KVManager(kv.num_pages, engine.max_num_seqs)
        self._residency = Residency(self._kv, loaded.pools, kv, max_num_seqs=engine.max_num_seqs)
        self._rows = SamplingRows(
            eos_token_id=loaded.config.eos_token_id,
            think_end_token_id=loaded.think_end_token_id,
            device=loaded.device,
        )
        self._constraints = Constraints(
            loaded.checkpoint_dir,
            vocab_size=loaded.config.vocab_size,
            eos_token_id=loaded.config.eos_token_id,
            device=loaded.device,
            clock=self._clock,
        )
        self._drafting = Drafting(
            loaded,
            speculation or SpeculationConfig(),
            self._draft_row,
            prepare=self._constraints.prepare,
            proposer=proposer,
        )
        self._scheduler = Scheduler(
            self._residency,
            max_num_seqs=engine.max_num_seqs,
            max_num_batched_tokens=engine.max_num_batched_tokens,
            draft_limits=self._draft_limits,
            may_sample=self._constraints.may_sample,
        )
        self._sequences: dict[str, Sequence] = {}
        self._num_prompt_tokens = 0
        self._num_generated_tokens = 0
        self._num_steps = 0
        self._last_step_ms = 0.0

    @classmethod
    def from_checkpoint(
        cls,
        checkpoint_dir: str | Path,
        engine: EngineConfig,
        kv: KVConfig,
        speculation: SpeculationConfig,
        *,
        parallel: ParallelState | None = None,
    ) -> Self:
        """Load a checkpoint and allocate the pools. Raises: CheckpointError, ConfigError."""
        loaded = load_model(checkpoint_dir, engine, kv, speculation, parallel or ParallelState())
        return cls(loaded, engine, kv, speculation)

    def load_vocabulary(self) -> None:
        """Prepare for constrained answers; otherwise the first one does it while its prompt is computed.

        Does nothing for a tokenizer that has no </think>, without which there are none. Raises: CheckpointError.
        """
        if self._loaded.think_end_token_id is not None:
            self._constraints.load_vocabulary()

    @property
    def loaded(self) -> LoadedModel:
        """What it runs on."""
        return self._loaded

    def add(self, request: GenerationRequest, *, hold_after_prefill: bool = False) -> None:
        """Queue a request; with `hold_after_prefill` it stops after its first token and waits for export.

        Raises: InvalidRequestError, PromptTooLongError.
        """
        self._check_new(request)
        self._constraints.add(request)
        sequence = Sequence(
            request,
            list(request.prompt_token_ids),
            hold_after_prefill=hold_after_prefill,
            expires_at_s=self._expires_at_s(request),
        )
        self._sequences[request.request_id] = sequence
        self._scheduler.enqueue(sequence)

    def abort(self, request_id: str) -> bool:
        """Forget a request in any phase and free its pages. Returns: False when it is unknown or already finished."""
        sequence = self._sequences.pop(request_id, None)
        if sequence is None:
            return False
        self._constraints.free(request_id)
        self._scheduler.remove(sequence)
        return True

    def has_work(self) -> bool:
        """True while `step` has something to compute."""
        return self._scheduler.has_work()

    @torch.inference_mode()
    def step(self) -> StepOutput:
        """Compute one step. A request with non-finite logits ends with an error chunk; the others go on.

        So does one whose deadline has passed or whose grammar failed, before anything is computed for it. Where all
        that is left waits for grammars, the step sleeps for at most GRAMMAR_WAIT_S and computes nothing.

        All of it is in inference mode: counts of tokens are made or grown by a draft pass and updated anywhere else.
        """
        started = time.perf_counter()
        failed = self._fail_early()
        plan = self._scheduler.plan()
        if not plan.scheduled:
            if self._scheduler.has_work():
                self._constraints.wait(GRAMMAR_WAIT_S)
            return StepOutput(plan.step_id, failed)
        plan = self._drafting.propose(plan, self._sequences, self._kv.slot)
        drafted = time.perf_counter()
        self._constraints.begin({chunk.request_id: chunk.draft_token_ids for chunk in plan.scheduled if chunk.samples})
        batch = build_batch(plan, self._sequences, self._kv, self._loaded.pools.layer_caches, self._loaded.device)
        streams = self._runner.forward(batch)
        self._take_prompt_logprobs(plan, streams)
        outcomes = self._sample(plan, streams, batch.logits_rows)
        self._drafting.catch_up(plan, self._sequences, self._kv.slot, streams)
        for chunk in plan.scheduled:
            self._residency.commit(self._sequences[chunk.request_id], chunk.start)
        chunks = tuple(self._settle(outcome) for outcome in outcomes)
        self._drafting.record_step(plan, time.perf_counter() - drafted)
        if self._loaded.device.type == "cpu":
            del batch, streams
            give_back_after_step(plan.num_tokens)
        self._num_steps += 1
        self._last_step_ms = (time.perf_counter() - started) * 1e3
        return StepOutput(plan.step_id, (*failed, *chunks), plan.num_tokens)

    def export_sequence(self, request_id: str) -> SequenceExport:
        """Copy the live cache bytes of a held sequence; `abort` frees it afterwards.

        Raises: InvalidRequestError when no sequence of that id is held.
        """
        sequence = self._scheduler.held.get(request_id)
        if sequence is None:
            raise InvalidRequestError(f"{request_id}: no held sequence of this id to export")
        num_tokens = sequence.num_computed_tokens
        segments = export_live(self._loaded.pools, self._kv.page_ids(request_id), self._kv.slot(request_id), num_tokens)
        return SequenceExport(num_tokens, tuple(segments))

    def import_sequence(self, request: GenerationRequest, first_token_id: int, segments: Seq[LiveSegment]) -> bool:
        """Take over a prefilled sequence; it decodes from its second token on.

        Returns: False when slots or pages are short, nothing changed then; try again after a step.
        Raises: InvalidRequestError, KVTransferError when the segments do not fit the prompt's length.
        """
        self._check_new(request)
        sequence = Sequence(
            request, [*request.prompt_token_ids, first_token_id], expires_at_s=self._expires_at_s(request)
        )
        self._constraints.add(request, (first_token_id,))
        is_adopted = False
        try:
            is_adopted = self._residency.adopt(sequence, segments)
        finally:
            if not is_adopted:
                self._constraints.free(request.request_id)
        if not is_adopted:
            return False
        self._sequences[request.request_id] = sequence
        self._scheduler.start(sequence)
        return True

    def live_segment_shapes(self, num_tokens: int) -> list[SegmentShape]:
        """What an export of `num_tokens` tokens consists of."""
        return live_segment_shapes(self._loaded.layout, num_tokens)

    def stats(self) -> EngineStats:
        """Counters of now."""
        return EngineStats(
            num_running=len(self._scheduler.running),
            num_waiting=len(self._scheduler.waiting),
            num_waiting_tokens=self._scheduler.waiting.num_tokens,
            num_held=len(self._scheduler.held),
            free_pages=self._residency.available_pages,
            num_pages=self._kv.num_pages,
            num_preemptions=self._scheduler.num_preemptions,
            total_prompt_tokens=self._num_prompt_tokens,
            total_generated_tokens=self._num_generated_tokens,
            num_steps=self._num_steps,
            last_step_ms=self._last_step_ms,
            total_drafted_tokens=self._drafting.num_drafted,
            total_accepted_tokens=self._drafting.num_accepted,
            prefix_cache=self._residency.stats(),
        )

    def check(self) -> None:
        """Assert that pages and slots are accounted for and that exactly the started sequences own some."""
        self._residency.check()
        assert self._constraints.request_ids() <= self._sequences.keys(), self._constraints.request_ids()
        owners = {s.request_id for s in self._sequences.values() if s.status is not SequenceStatus.WAITING}
        assert self._kv.seq_ids() == owners, (self._kv.seq_ids(), owners)

    def _expires_at_s(self, request: GenerationRequest) -> float | None:
        return None if request.deadline_s is None else self._clock.now_s() + request.deadline_s

    def _check_new(self, request: GenerationRequest) -> None:
        if request.request_id in self._sequences:
            raise InvalidRequestError(f"request id {request.request_id!r} is already running")
        check_request(
            request,
            vocab_size=self.config.vocab_size,
            max_model_len=self.max_model_len,
            can_end_thoughts=self._loaded.think_end_token_id is not None,
        )

    def _take_prompt_logprobs(self, plan: StepPlan, streams: torch.Tensor) -> None:
        rows = prompt_rows(plan, self._sequences)
        for tile, logits in self._runner.logits_tiles(streams, [row.row for row in rows]):
            owners = [self._sequences[row.request_id] for row in rows[tile]]
            positions = [row.position for row in rows[tile]]
            targets = [owner.token_ids[position] for owner, position in zip(owners, positions, strict=True)]
            counts = [owner.request.sampling.prompt_logprobs or 0 for owner in owners]
            entries = top_logprobs(logits, torch.tensor(targets, device=logits.device), counts)
            for owner, position, entry in zip(owners, positions, entries, strict=True):
                owner.prompt_logprobs[position] = entry

    def _sample(self, plan: StepPlan, streams: torch.Tensor, logits_rows: torch.Tensor) -> list[Outcome]:
        """Advance every scheduled sequence; those at their end get the tokens that were sampled or verified.

        One whose masks are late gets none, and computes its last token again later, to the same rows.
        """
        for chunk in plan.scheduled:
            self._sequences[chunk.request_id].num_computed_tokens = chunk.end
        sampling = [(chunk, self._sequences[chunk.request_id]) for chunk in plan.scheduled if chunk.samples]
        if not sampling:
            return []
        logits = self._runner.logits(streams, logits_rows)
        masks, late = self._constraints.collect()
        rows = [
            self._rows.row(
                sequence,
                chunk.draft_token_ids[:num_drafts],
                allowed_mask=masks.get(chunk.request_id, FREE).row(num_drafts),
            )
            for chunk, sequence in sampling
            for num_drafts in range(chunk.num_drafts + 1)
        ]
        sampled = sample_tokens(logits, SamplingBatch.build(rows, logits.device))
        outcomes, first_row = [], 0
        for chunk, sequence in sampling:
            if chunk.request_id in late:
                sequence.num_computed_tokens = chunk.end - 1
            else:
                outcomes.append(take_tokens(chunk, sequence, sampled, first_row, self.config.eos_token_id))
            first_row += chunk.num_drafts + 1
        return outcomes

    def _draft_limits(self, decoding: Seq[Sequence], budget: int) -> dict[str, int]:
        drafting = [sequence for sequence in decoding if self._constraints.may_draft(sequence.request_id)]
        return self._drafting.limits(drafting, budget)

    def _draft_row(self, sequence: Sequence, draft_token_ids: Seq[int]) -> SamplingRow:
        """How the token after these drafts would be chosen, so that drafts keep to the sequence's constraint."""
        masks = self._constraints.mask_rows(sequence.request_id, draft_token_ids)
        return self._rows.row(sequence, draft_token_ids, allowed_mask=masks.row(len(draft_token_ids)))

    def _settle(self, outcome: Outcome) -> TokenChunk:
        """Decide whether the sequence ends, goes on or is held."""
        sequence = outcome.sequence
        if not outcome.token_ids:
            position = len(sequence.token_ids)
            message = f"{sequence.request_id}: logits for position {position} are not finite"
            self._residency.discard(sequence)
            return self._fail(sequence, NonFiniteLogitsError(message))
        error = self._constraints.error_after(sequence.request_id, len(outcome.token_ids))
        if error is not None:
            return self._fail(sequence, error)
        is_first = sequence.num_generated_tokens == 1
        self._num_generated_tokens += len(outcome.token_ids)
        self._num_prompt_tokens += sequence.num_prompt_tokens if is_first else 0
        self._drafting.record(sequence, outcome.num_drafted, outcome.num_accepted)
        if outcome.finish_reason is not None:
            self.abort(sequence.request_id)
        elif sequence.hold_after_prefill:
            self._scheduler.hold(sequence)
        else:
            self._constraints.accept(sequence.request_id, outcome.token_ids)
        return TokenChunk(
            request_id=sequence.request_id,
            token_ids=outcome.token_ids,
            logprobs=outcome.logprobs,
            prompt_logprobs=_prompt_logprobs(sequence) if is_first else None,
            finish_reason=outcome.finish_reason,
            stop_token_id=outcome.stop_token_id,
            num_cached_tokens=sequence.num_cached_tokens,
            num_drafted=outcome.num_drafted,
            num_accepted=outcome.num_accepted,
        )

    def _fail_early(self) -> tuple[TokenChunk, ...]:
        """End the requests for which nothing more is to be computed."""
        expired = tuple(self._expire(sequence) for sequence in self._scheduler.expired(self._clock.now_s()))
        failures = self._constraints.failures().items()
        return expired + tuple(self._fail(self._sequences[request_id], error) for request_id, error in failures)

    def _expire(self, sequence: Sequence) -> TokenChunk:
        error = DeadlineExceededError(
            f"{sequence.request_id}: the deadline passed after {sequence.num_generated_tokens} of at most "
            f"{sequence.request.sampling.max_tokens} tokens"
        )
        return self._fail(sequence, error)

    def _fail(self, sequence: Sequence, error: Dsv4Error) -> TokenChunk:
        """End one request with an error chunk; the engine goes on."""
        self.abort(sequence.request_id)
        return TokenChunk(request_id=sequence.request_id, finish_reason=FinishReason.ERROR, error=error)


def _prompt_logprobs(sequence: Sequence) -> PromptLogprobs | None:
    """Entry i is the distribution that predicted prompt token i; nothing predicted the first one."""
    if sequence.request.sampling.prompt_logprobs is None:
        return None
    return [None, *(sequence.prompt_logprobs[position] for position in range(1, sequence.num_prompt_tokens))]
