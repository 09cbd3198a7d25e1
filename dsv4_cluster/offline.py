"""In-process inference without Ray: `LLM(checkpoint).generate(prompts)`."""

import math
import secrets
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from numbers import Integral
from pathlib import Path
from typing import Literal, cast

import torch

from dsv4_cluster.clock import MonotonicClock
from dsv4_cluster.config.engine_config import EngineConfig
from dsv4_cluster.config.kv_config import KVConfig
from dsv4_cluster.config.speculation_config import SpeculationConfig
from dsv4_cluster.engine.admission import check_request
from dsv4_cluster.engine.core import EngineCore
from dsv4_cluster.engine.draft_scores import DraftScorer
from dsv4_cluster.errors import InvalidRequestError
from dsv4_cluster.ids import new_request_id
from dsv4_cluster.protocol import request as protocol
from dsv4_cluster.protocol.copies import MAX_COPIES, can_share, copies
from dsv4_cluster.protocol.output import FinishReason, PromptLogprobs, TokenChunk, TokenLogprobs
from dsv4_cluster.protocol.request import GenerationRequest, StopParams, StructuredSpec
from dsv4_cluster.structured.source import check_spec
from dsv4_cluster.tokenizer.stop_text import StopTextStream
from dsv4_cluster.tokenizer.text import TextTokenizer


@dataclass(frozen=True, slots=True, kw_only=True)
class SamplingParams:
    """How to generate the answers to one prompt; all fields are optional and keyword-only.

    max_tokens: upper bound of generated tokens. temperature: 0 = greedy. top_p: nucleus mass in (0, 1].
    top_k: sample among the k most probable tokens, 0 or -1 = all. min_p: least probability, as a share of the most
    probable token's. seed: same seed, same tokens, anywhere; None draws a fresh one per prompt.
    n: answers per prompt; answer i draws from a seed mixed from (seed, i), answer 0 from the seed itself.
    presence_penalty, frequency_penalty: -2..2, on generated tokens. repetition_penalty: > 0, on prompt and generated
    tokens. logit_bias: token id -> -100..100, added to its logit.
    stop: strings that end the answer and are cut from its text. stop_token_ids: ids that end it.
    ignore_eos: do not stop at the model's EOS. min_tokens: EOS and stop ids are not sampled before.
    thinking: the prompt ends inside the thoughts. thinking_budget: so it does, and after so many generated tokens
    </think> is forced.
    structured: the form of the answer, behind the thoughts if there are any: StructuredSpec(kind="json_object"), or
    kind "json_schema", "regex", "lark", "tool_call", "tool_call_required" with its source in `schema`.
    logprobs, prompt_logprobs: n = the token itself and the n most probable ones, None = nothing. They are those of
    the model: before bias, penalties and temperature.
    priority: lower runs first. deadline_s: seconds from the call to `generate` in which every answer to the prompt has
    to be complete; None = no limit.
    """

    max_tokens: int = 16
    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = 0
    min_p: float = 0.0
    seed: int | None = None
    n: int = 1
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    repetition_penalty: float = 1.0
    logit_bias: Mapping[int, float] = field(default_factory=dict)
    stop: str | Sequence[str] = ()
    stop_token_ids: Sequence[int] = ()
    ignore_eos: bool = False
    min_tokens: int = 0
    thinking: bool = False
    thinking_budget: int | None = None
    structured: StructuredSpec | None = None
    logprobs: int | None = None
    prompt_logprobs: int | None = None
    priority: int = 0
    deadline_s: float | None = None

    def to_requests(self, request_id: str, prompt_token_ids: Sequence[int]) -> tuple[GenerationRequest, ...]:
        """One engine request per answer. Raises: InvalidRequestError when n or the grammar is not valid."""
        if not 1 <= self.n <= MAX_COPIES:
            raise InvalidRequestError(f"n is {self.n}, expected 1..{MAX_COPIES}")
        if self.deadline_s is not None and not 0 < self.deadline_s < math.inf:
            raise InvalidRequestError(f"deadline_s is {self.deadline_s}, expected a number of seconds above 0")
        if self.structured is not None:
            check_spec(self.structured)
        sampling = protocol.SamplingParams(
            max_tokens=self.max_tokens,
            temperature=self.temperature,
            top_p=self.top_p,
            top_k=0 if self.top_k == -1 else self.top_k,
            min_p=self.min_p,
            seed=secrets.randbits(63) if self.seed is None else self.seed,
            presence_penalty=self.presence_penalty,
            frequency_penalty=self.frequency_penalty,
            repetition_penalty=self.repetition_penalty,
            logit_bias=tuple(self.logit_bias.items()),
            logprobs=self.logprobs,
            prompt_logprobs=self.prompt_logprobs,
        )
        stop = StopParams(
            token_ids=tuple(self.stop_token_ids),
            strings=(self.stop,) if isinstance(self.stop, str) else tuple(self.stop),
            ignore_eos=self.ignore_eos,
            min_tokens=self.min_tokens,
        )
        request = GenerationRequest(
            request_id=request_id,
            prompt_token_ids=tuple(prompt_token_ids),
            sampling=sampling,
            stop=stop,
            structured=self.structured,
            thinking=self.thinking or self.thinking_budget is not None,
            thinking_budget=self.thinking_budget,
            priority=self.priority,
            deadline_s=self.deadline_s,
        )
        return copies(request, self.n)


@dataclass(slots=True, kw_only=True)
class CompletionOutput:
    """One answer.

    index: 0 <= index < n. token_ids: generated ids, a final EOS or stop id included. text: without them and without a
    matched stop string. logprobs: one dict per generated token, or None. num_drafted: drafts of the MTP layer that were
    checked; num_accepted: those of them that are in token_ids.
    """

    index: int
    token_ids: list[int] = field(default_factory=list)
    text: str = ""
    finish_reason: FinishReason | None = None
    logprobs: list[TokenLogprobs] | None = None
    num_drafted: int = 0
    num_accepted: int = 0

    @property
    def cumulative_logprob(self) -> float | None:
        """Log-probability of the whole answer under the model, or None without logprobs."""
        if self.logprobs is None:
            return None
        return math.fsum(entry[token_id] for entry, token_id in zip(self.logprobs, self.token_ids, strict=True))


@dataclass(slots=True, kw_only=True)
class RequestOutput:
    """The answers to one prompt: `outputs` has all n of them, the fields beside it are those of the first.

    prompt_logprobs: [None, {token_id: float}, ...], or None. num_cached_tokens: of the first answer's prompt.
    """

    request_id: str
    prompt: str | None
    prompt_token_ids: list[int]
    token_ids: list[int] = field(default_factory=list)
    text: str = ""
    finish_reason: FinishReason | None = None
    logprobs: list[TokenLogprobs] | None = None
    prompt_logprobs: PromptLogprobs | None = None
    num_cached_tokens: int = 0
    num_drafted: int = 0
    num_accepted: int = 0
    outputs: list[CompletionOutput] = field(default_factory=list)


class LLM:
    """A model in this process. Not thread-safe."""

    def __init__(
        self,
        model_dir: str | Path,
        *,
        dtype: Literal["auto", "float32", "bfloat16"] = "auto",
        kv_cache_dtype: Literal["auto", "fp8"] = "auto",
        indexer_dtype: Literal["auto", "fp8", "fp4"] = "auto",
        max_num_seqs: int = 64,
        max_num_batched_tokens: int = 2048,
        max_model_len: int | None = None,
        num_pages: int = 256,
        prefix_cache: bool = True,
        host_memory_bytes: int = 0,
        num_draft_tokens: int | Literal["auto"] = 0,
        deterministic: bool | None = None,
        device: str = "cpu",
    ) -> None:
        """Load a checkpoint directory.

        num_draft_tokens: tokens that the MTP layer drafts per step, 0 to 4, or "auto" to follow acceptance and load;
        answers are those of plain decoding. num_pages: cache size in pages of 256 tokens. prefix_cache: resume prompts
        from earlier ones, exactly. host_memory_bytes: room for what falls out of the pages.
        deterministic: the same bits alone or in any batch; None = where that is free, True = also row by row, slowly.
        dtype auto: bfloat16, but float32 on a CPU without fast bf16 (AVX-512 BF16 and a C compiler).
        Raises: CheckpointError, ConfigError, pydantic.ValidationError on values out of range.
        """
        engine = EngineConfig(
            dtype=dtype,
            device=device,
            max_num_seqs=max_num_seqs,
            max_num_batched_tokens=max_num_batched_tokens,
            max_model_len=max_model_len,
            deterministic=deterministic,
            num_threads=torch.get_num_threads(),
        )
        kv = KVConfig(
            kv_cache_dtype=kv_cache_dtype,
            indexer_dtype=indexer_dtype,
            num_pages=num_pages,
            prefix_cache=prefix_cache,
            host_memory_bytes=host_memory_bytes,
        )
        speculation = SpeculationConfig(num_draft_tokens=num_draft_tokens)
        self.engine = EngineCore.from_checkpoint(model_dir, engine, kv, speculation)
        self._model_dir, self._kv, self._chunk_tokens = model_dir, kv, max_num_batched_tokens
        self._scorer: DraftScorer | None = None
        self._clock = MonotonicClock()
        self.tokenizer = TextTokenizer.from_checkpoint(model_dir)

    def generate(
        self,
        prompts: str | Sequence[str] | None = None,
        sampling_params: SamplingParams | Sequence[SamplingParams] | None = None,
        *,
        prompt_token_ids: Sequence[int] | Sequence[Sequence[int]] | None = None,
    ) -> list[RequestOutput]:
        """Generate n answers per prompt, all of them batched; results are in the order of the prompts.

        Give either `prompts` (texts, encoded with BOS in front, as /v1/completions does) or `prompt_token_ids`.
        Raises: InvalidRequestError, PromptTooLongError, then nothing was generated; DeadlineExceededError when one of
        the answers is not complete in time.
        """
        started_s = self._clock.now_s()
        texts, token_ids = self._inputs(prompts, prompt_token_ids)
        params = _per_prompt(sampling_params, len(token_ids))
        groups = [param.to_requests(new_request_id("llm"), ids) for ids, param in zip(token_ids, params, strict=True)]
        if any(param.structured is not None for param in params):
            self.engine.load_vocabulary()  # once; the time that a grammar may take is its own
        collectors = {
            request.request_id: _Collector(request, index, self.tokenizer)
            for group in groups
            for index, request in enumerate(group)
        }
        try:
            later: dict[str, tuple[GenerationRequest, ...]] = {}
            for first, *others in groups:
                self.engine.add(first.after(self._clock.now_s() - started_s))
                later[first.request_id] = tuple(others)
            self._run(collectors, later, started_s)
        finally:
            for request_id in collectors:
                self.engine.abort(request_id)
        return [
            _request_output(text, [collectors[request.request_id] for request in group])
            for text, group in zip(texts, groups, strict=True)
        ]

    def draft_logprobs(
        self, prompt_token_ids: Sequence[int] | Sequence[Sequence[int]], top: int = 1
    ) -> list[list[TokenLogprobs]]:
        """What the MTP layer drafts along given texts, to measure acceptance offline; needs no num_draft_tokens.

        Returns: per prompt one entry per row: entry i pairs the main model's streams at position i with token i + 1 and
        holds the `top` most probable tokens of position i + 2 as {token_id: logprob}. A prompt of n tokens has n - 1.
        Raises: ConfigError without a usable MTP layer, InvalidRequestError, PromptTooLongError.
        """
        if top < 1:
            raise InvalidRequestError(f"top is {top}, at least 1 is needed")
        _, prompts = self._inputs(None, prompt_token_ids)
        for prompt in prompts:
            request = GenerationRequest(
                request_id="draft", prompt_token_ids=tuple(prompt), sampling=protocol.SamplingParams(max_tokens=1)
            )
            check_request(request, vocab_size=self.engine.config.vocab_size, max_model_len=self.engine.max_model_len)
        if self._scorer is None:
            self._scorer = DraftScorer.open(
                self._model_dir, self.engine.loaded, self._kv, chunk_tokens=self._chunk_tokens
            )
        return [self._scorer.score(prompt, top) for prompt in prompts]

    def _run(
        self, collectors: dict[str, "_Collector"], later: dict[str, tuple[GenerationRequest, ...]], started_s: float
    ) -> None:
        """Step to the end. later: copies by the id of the first one; they start once it has computed the prompt they
        share, or at once when the prompt is too short to be shared.
        """
        for request_id in [i for i in later if not can_share(collectors[i].request)]:
            self._add_all(later.pop(request_id), started_s)
        while self.engine.has_work():
            for chunk in self.engine.step().chunks:
                if chunk.error is not None:
                    raise chunk.error
                if collectors[chunk.request_id].push(chunk):
                    self.engine.abort(chunk.request_id)
                self._add_all(later.pop(chunk.request_id, ()), started_s)

    def _add_all(self, requests: Sequence[GenerationRequest], started_s: float) -> None:
        for request in requests:
            self.engine.add(request.after(self._clock.now_s() - started_s))

    def _inputs(
        self,
        prompts: str | Sequence[str] | None,
        prompt_token_ids: Sequence[int] | Sequence[Sequence[int]] | None,
    ) -> tuple[list[str | None], list[list[int]]]:
        """(texts or None, token ids) per prompt."""
        if (prompts is None) == (prompt_token_ids is None):
            raise InvalidRequestError("give either prompts or prompt_token_ids")
        if prompts is not None:
            texts = [prompts] if isinstance(prompts, str) else list(prompts)
            return [*texts], [self.tokenizer.encode_prompt(text) for text in texts]
        rows: list[list[int]] = []
        for item in prompt_token_ids or ():
            if isinstance(item, Integral):  # one flat prompt
                return [None], [[int(token_id) for token_id in cast("Sequence[int]", prompt_token_ids)]]
            rows.append([int(token_id) for token_id in cast("Sequence[int]", item)])
        return [None] * len(rows), rows


class _Collector:
    """Turns the chunks of one request into its answer."""

    def __init__(self, request: GenerationRequest, index: int, tokenizer: TextTokenizer) -> None:
        self._text = StopTextStream(tokenizer, request.stop.strings)
        self.request = request
        self.answer = CompletionOutput(index=index, logprobs=None if request.sampling.logprobs is None else [])
        self.prompt_logprobs: PromptLogprobs | None = None
        self.num_cached_tokens = 0

    def push(self, chunk: TokenChunk) -> bool:
        """Take a chunk. Returns: True when a stop string ended the answer and the engine has to be told."""
        answer = self.answer
        num_taken = 0
        for token_id in chunk.token_ids:
            answer.token_ids.append(token_id)
            num_taken += 1
            if token_id != chunk.stop_token_id:
                answer.text += self._text.push(token_id)
                if self._text.is_stopped:
                    break  # accepted drafts behind the match are not part of the answer
        self.num_cached_tokens = chunk.num_cached_tokens
        answer.num_drafted += chunk.num_drafted
        answer.num_accepted += min(chunk.num_accepted, num_taken)
        self.prompt_logprobs = self.prompt_logprobs or chunk.prompt_logprobs
        if answer.logprobs is not None and chunk.logprobs is not None:
            answer.logprobs += chunk.logprobs[:num_taken]
        if chunk.finish_reason is not None:
            answer.text += self._text.finish()
        answer.finish_reason = FinishReason.STOP if self._text.is_stopped else chunk.finish_reason
        return self._text.is_stopped and chunk.finish_reason is None


def _request_output(prompt: str | None, collectors: Sequence[_Collector]) -> RequestOutput:
    first = collectors[0]
    return RequestOutput(
        request_id=first.request.request_id,
        prompt=prompt,
        prompt_token_ids=list(first.request.prompt_token_ids),
        token_ids=first.answer.token_ids,
        text=first.answer.text,
        finish_reason=first.answer.finish_reason,
        logprobs=first.answer.logprobs,
        prompt_logprobs=first.prompt_logprobs,
        num_cached_tokens=first.num_cached_tokens,
        num_drafted=first.answer.num_drafted,
        num_accepted=first.answer.num_accepted,
        outputs=[collector.answer for collector in collectors],
    )


def _per_prompt(
    sampling_params: SamplingParams | Sequence[SamplingParams] | None, num_prompts: int
) -> list[SamplingParams]:
    if sampling_params is None:
        return [SamplingParams()] * num_prompts
    if isinstance(sampling_params, SamplingParams):
        return [sampling_params] * num_prompts
    if len(sampling_params) != num_prompts:
        raise InvalidRequestError(f"{len(sampling_params)} sampling_params for {num_prompts} prompts")
    return list(sampling_params)
