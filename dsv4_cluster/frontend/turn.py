"""One checked and encoded body of a chat API, and the generation it asks for."""

from collections.abc import AsyncGenerator
from contextlib import aclosing
from dataclasses import dataclass

from dsv4_cluster.errors import InvalidRequestError
from dsv4_cluster.frontend.caller import Caller
from dsv4_cluster.frontend.error_body import FieldError
from dsv4_cluster.frontend.generation import Backend, token_chunks
from dsv4_cluster.frontend.sampling_fields import SamplingFields
from dsv4_cluster.protocol.request import GenerationRequest, StructuredSpec
from dsv4_cluster.structured.source import TOOL_KINDS, check_spec
from dsv4_cluster.tokenizer.chat_output import ChatParser
from dsv4_cluster.tokenizer.encoding import ChatPrompt
from dsv4_cluster.tokenizer.family import Event


@dataclass(frozen=True, slots=True, kw_only=True)
class Turn:
    """What one request asks the engine for.

    seed: of the body; None = the server draws one. thinking_budget: thought tokens after which </think> is forced.
    user_id: the caller's name for its end user. priority: added to the caller's; lower runs first.
    """

    prompt: ChatPrompt
    sampling: SamplingFields
    seed: int | None = None
    thinking_budget: int | None = None
    user_id: str = ""
    priority: int = 0

    def generation(self, request_id: str, backend: Backend, caller: Caller) -> GenerationRequest:
        """top_k, min_p and penalties hold while thinking too; temperature and top_p are the official ones, or the
        caller's if the server is configured so.

        Raises: FieldError when min_tokens exceeds max_tokens.
        """
        prompt = self.prompt
        seed = prompt.seed if self.seed is None else self.seed
        temperature, top_p = prompt.temperature, prompt.top_p
        if backend.config.api.sampling_while_thinking == "request":
            temperature = temperature if prompt.asked_temperature is None else prompt.asked_temperature
            top_p = top_p if prompt.asked_top_p is None else prompt.asked_top_p
        return GenerationRequest(
            request_id=request_id,
            prompt_token_ids=prompt.token_ids,
            sampling=self.sampling.sampling_params(
                max_tokens=prompt.max_tokens,
                temperature=temperature,
                top_p=top_p,
                seed=backend.draw_seed() if seed is None else seed,
                logprobs=prompt.num_logprobs,
            ),
            stop=self.sampling.stop_params(prompt.stop_strings, eos_token_id=backend.codec.text.eos_token_id),
            model=backend.codec.models.canonical,
            structured=prompt.structured,
            thinking=prompt.is_thinking,
            thinking_budget=self.thinking_budget,
            **caller.labels(self.user_id, self.priority),
        )


def check_budget(thinking_budget: int | None, prompt: ChatPrompt) -> None:
    """Raises: FieldError when there are no thoughts to bound."""
    if thinking_budget is not None and not prompt.is_thinking:
        raise FieldError("thinking_token_budget is for requests that think", param="thinking_token_budget")


def check_structured(spec: StructuredSpec, sampling: SamplingFields, *, param: str) -> None:
    """Refuse what the engine would refuse, before the request is queued. param: the field of a schema for the text.

    Raises: FieldError.
    """
    param = "tools" if spec.kind in TOOL_KINDS else param
    if sampling.ignore_eos:
        raise FieldError(f"ignore_eos cannot be combined with {param}", param="ignore_eos")
    try:
        check_spec(spec)
    except InvalidRequestError as err:
        raise FieldError(err.message, param=param) from err


async def parsed_events(
    parser: ChatParser, generation: GenerationRequest, backend: Backend
) -> AsyncGenerator[list[Event], None]:
    """The events of every chunk of one answer. A stop string or the end of a tool block ends, and so aborts, it."""
    try:
        async with aclosing(token_chunks(backend.service, generation)) as chunks:
            async for chunk in chunks:
                yield parser.push(chunk)
                if parser.is_finished and chunk.finish_reason is None:
                    break
    finally:
        if not parser.is_finished:
            parser.close()
