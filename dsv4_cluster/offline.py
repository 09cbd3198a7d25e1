"""In-process inference without Ray: `LLM(checkpoint).generate(prompts)`."""

import secrets
from collections.abc import Sequence
from dataclasses import dataclass, field
from numbers import Integral
from pathlib import Path
from typing import Literal, cast

import torch

from dsv4_cluster.config.engine_config import EngineConfig
from dsv4_cluster.config.kv_config import KVConfig
from dsv4_cluster.config.speculation_config import SpeculationConfig
from dsv4_cluster.engine.core import EngineCore
from dsv4_cluster.errors import InvalidRequestError
from dsv4_cluster.ids import new_request_id
from dsv4_cluster.protocol import request as protocol
from dsv4_cluster.protocol.output import FinishReason, PromptLogprobs, TokenChunk, TokenLogprobs
from dsv4_cluster.protocol.request import GenerationRequest, StopParams
from dsv4_cluster.tokenizer.stop_text import StopTextStream
from dsv4_cluster.tokenizer.text import TextTokenizer


@dataclass(frozen=True, slots=True, kw_only=True)
class SamplingParams:
    """How to generate one answer; all fields are optional and keyword-only.

    max_tokens: upper bound of generated tokens. temperature: 0 = greedy. top_p: nucleus mass in (0, 1].
    seed: same seed, same tokens, anywhere; None draws a fresh one per prompt.
    stop: strings that end the answer and are cut from its text. stop_token_ids: ids that end it.
    ignore_eos: do not stop at the model's EOS. min_tokens: EOS and stop ids are not sampled before.
    logprobs, prompt_logprobs: n = the token itself and the n most probable ones, None = nothing.
    """

    max_tokens: int = 16
    temperature: float = 1.0
    top_p: float = 1.0
    seed: int | None = None
    stop: str | Sequence[str] = ()
    stop_token_ids: Sequence[int] = ()
    ignore_eos: bool = False
    min_tokens: int = 0
    logprobs: int | None = None
    prompt_logprobs: int | None = None

    def to_protocol(self) -> tuple[protocol.SamplingParams, StopParams]:
        """Split into the types that cross process boundaries."""
        sampling = protocol.SamplingParams(
            max_tokens=self.max_tokens,
            temperature=self.temperature,
            top_p=self.top_p,
            seed=secrets.randbits(63) if self.seed is None else self.seed,
            logprobs=self.logprobs,
            prompt_logprobs=self.prompt_logprobs,
        )
        stop = StopParams(
            token_ids=tuple(self.stop_token_ids),
            strings=(self.stop,) if isinstance(self.stop, str) else tuple(self.stop),
            ignore_eos=self.ignore_eos,
            min_tokens=self.min_tokens,
        )
        return sampling, stop


@dataclass(slots=True, kw_only=True)
class RequestOutput:
    """One answer.

    token_ids: generated ids, a final EOS or stop id included. text: without them and without a matched stop string.
    logprobs: one dict per generated token, or None. prompt_logprobs: [None, {token_id: float}, ...], or None.
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
        num_draft_tokens: int = 0,
        device: str = "cpu",
    ) -> None:
        """Load a checkpoint directory.

        num_pages: cache size in pages of 256 tokens. dtype auto: float32 on CPU, bfloat16 on CUDA.
        Raises: CheckpointError, ConfigError, pydantic.ValidationError on values out of range.
        """
        engine = EngineConfig(
            dtype=dtype,
            device=device,
            max_num_seqs=max_num_seqs,
            max_num_batched_tokens=max_num_batched_tokens,
            max_model_len=max_model_len,
            num_threads=torch.get_num_threads(),
        )
        kv = KVConfig(kv_cache_dtype=kv_cache_dtype, indexer_dtype=indexer_dtype, num_pages=num_pages)
        speculation = SpeculationConfig(num_draft_tokens=num_draft_tokens)
        self.engine = EngineCore.from_checkpoint(model_dir, engine, kv, speculation)
        self.tokenizer = TextTokenizer.from_checkpoint(model_dir)

    def generate(
        self,
        prompts: str | Sequence[str] | None = None,
        sampling_params: SamplingParams | Sequence[SamplingParams] | None = None,
        *,
        prompt_token_ids: Sequence[int] | Sequence[Sequence[int]] | None = None,
    ) -> list[RequestOutput]:
        """Generate one answer per prompt, all of them batched; results are in the order of the prompts.

        Give either `prompts` (texts, encoded with BOS in front, as /v1/completions does) or `prompt_token_ids`.
        Raises: InvalidRequestError, PromptTooLongError; then nothing was generated.
        """
        texts, token_ids = self._inputs(prompts, prompt_token_ids)
        params = _per_prompt(sampling_params, len(token_ids))
        outputs: dict[str, _Collector] = {}
        try:
            for text, ids, param in zip(texts, token_ids, params, strict=True):
                sampling, stop = param.to_protocol()
                request = GenerationRequest(
                    request_id=new_request_id("llm"), prompt_token_ids=tuple(ids), sampling=sampling, stop=stop
                )
                self.engine.add(request)
                outputs[request.request_id] = _Collector(request, text, self.tokenizer)
            self._run(outputs)
        finally:
            for request_id in outputs:
                self.engine.abort(request_id)
        return [collector.output for collector in outputs.values()]

    def _run(self, outputs: dict[str, "_Collector"]) -> None:
        while self.engine.has_work():
            for chunk in self.engine.step().chunks:
                if chunk.error is not None:
                    raise chunk.error
                if outputs[chunk.request_id].push(chunk):
                    self.engine.abort(chunk.request_id)

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
    """Turns the chunks of one request into its RequestOutput."""

    def __init__(self, request: GenerationRequest, prompt: str | None, tokenizer: TextTokenizer) -> None:
        self._text = StopTextStream(tokenizer, request.stop.strings)
        self.output = RequestOutput(
            request_id=request.request_id,
            prompt=prompt,
            prompt_token_ids=list(request.prompt_token_ids),
            logprobs=None if request.sampling.logprobs is None else [],
        )

    def push(self, chunk: TokenChunk) -> bool:
        """Take a chunk. Returns: True when a stop string ended the answer and the engine has to be told."""
        output = self.output
        for token_id in chunk.token_ids:
            output.token_ids.append(token_id)
            if token_id != chunk.stop_token_id:
                output.text += self._text.push(token_id)
        output.num_cached_tokens = chunk.num_cached_tokens
        output.prompt_logprobs = output.prompt_logprobs or chunk.prompt_logprobs
        if output.logprobs is not None and chunk.logprobs is not None:
            output.logprobs += chunk.logprobs
        if chunk.finish_reason is not None:
            output.text += self._text.finish()
        output.finish_reason = FinishReason.STOP if self._text.is_stopped else chunk.finish_reason
        return self._text.is_stopped and chunk.finish_reason is None


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
