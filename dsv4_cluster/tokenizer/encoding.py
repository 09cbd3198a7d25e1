"""Chat bodies to prompt token ids, all of it through deepseek-recipe: nothing of the prompt format is written here."""

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

import deepseek_recipe as recipe

from dsv4_cluster.errors import CheckpointError, InvalidRequestError, PromptTooLongError
from dsv4_cluster.protocol.request import StructuredSpec
from dsv4_cluster.tokenizer.answer_form import answer_form, tool_name
from dsv4_cluster.tokenizer.models import ServedModels
from dsv4_cluster.tokenizer.text import TOKENIZER_FILE, TextTokenizer


@dataclass(frozen=True, slots=True, kw_only=True)
class ChatPrompt:
    """A converted chat request: its prompt, its resolved sampling values, and what parsing its output needs.

    temperature, top_p: after the official rule that thinking requests sample at 1.0.
    """

    conversion: recipe.ConversationRequest
    model: str  # the name the client used
    token_ids: tuple[int, ...]
    max_tokens: int
    temperature: float
    top_p: float
    seed: int | None
    num_logprobs: int | None  # None: not asked for
    stop_strings: tuple[str, ...]
    is_thinking: bool  # generation starts inside the thoughts
    is_stream: bool
    structured: StructuredSpec | None  # the form the answer has to have


class ChatCodec:
    """Chat requests of the served names, rendered as DeepSeek V4. Immutable; `encode` is safe on any thread."""

    def __init__(self, tokenizer: recipe.Tokenizer, models: ServedModels) -> None:
        """tokenizer: with the added vocabulary."""
        self.tokenizer = tokenizer
        self._models = models
        self._encoding = recipe.DeepseekV4Encoding().with_tokenizer(tokenizer)
        version = recipe.ModelVersion.DeepseekV4Pro
        self._options = recipe.ConversionOptions().with_model_versions_by_name(dict.fromkeys(models.names, version))

    def encode(self, body: Mapping[str, object], *, context_limit: int) -> ChatPrompt:
        """Convert, render and encode one parsed chat-completions body. CPU-bound; it releases the interpreter lock.

        context_limit: largest prompt + answer, in tokens.
        Raises: ModelNotFoundError, PromptTooLongError with both numbers, InvalidRequestError.
        """
        try:
            conversion, is_call_forced = self._convert_choice(body)
        except recipe.ConversionError as err:
            raise InvalidRequestError(str(err), http_status=err.status_code) from err
        except (ValueError, RecursionError) as err:
            raise InvalidRequestError(_reason(err)) from err
        token_ids = tuple(self._encoding.encode(conversion.conversation))
        options = conversion.inference_options
        check_context(len(token_ids), options.max_tokens, context_limit)
        return ChatPrompt(
            conversion=conversion,
            model=str(body["model"]),
            token_ids=token_ids,
            max_tokens=conversion.resolve_max_tokens(len(token_ids), context_limit),
            temperature=1.0 if options.temperature is None else options.temperature,
            top_p=1.0 if options.top_p is None else options.top_p,
            seed=options.seed,
            num_logprobs=(options.top_logprobs or 0) if options.logprobs else None,
            stop_strings=tuple(conversion.parsing_options.stop_sequences),
            is_thinking=_starts_in_thoughts(conversion),
            is_stream=conversion.stream,
            structured=answer_form(conversion, body, is_call_forced=is_call_forced),
        )

    def _convert_choice(self, body: Mapping[str, object]) -> tuple[recipe.ConversationRequest, bool]:
        """Convert; and whether a tool call is forced although the prompt does not open it.

        The official conversion refuses a forced tool choice while thinking. Then the prompt is the one of "auto" with
        only the tools that may be called, and the constraint starts behind the thoughts.
        """
        choice = body.get("tool_choice")
        if choice == "required" or isinstance(choice, dict):
            tools = body.get("tools")
            named = tool_name(choice)
            callable_tools = [
                tool for tool in (tools if isinstance(tools, list) else []) if named in (None, tool_name(tool))
            ]
            conversion = self._convert({**body, "tool_choice": "auto", "tools": callable_tools})
            if conversion.conversation.thinking_mode:
                return conversion, True
        return self._convert(body), False

    def _convert(self, body: Mapping[str, object]) -> recipe.ConversationRequest:
        request = recipe.ChatCompletionRequest(json.dumps(body, ensure_ascii=False, allow_nan=False))
        self._models.resolve(request.model)
        return request.convert(self._options)


@dataclass(frozen=True, slots=True)
class ModelCodec:
    """All text work for one served model: its names, chat rendering and raw text."""

    models: ServedModels
    chat: ChatCodec
    text: TextTokenizer

    @classmethod
    def from_checkpoint(cls, checkpoint_dir: str | Path, models: ServedModels) -> "ModelCodec":
        """Load `tokenizer.json` of a checkpoint directory. Raises: CheckpointError."""
        return cls.from_file(Path(checkpoint_dir) / TOKENIZER_FILE, models)

    @classmethod
    def from_file(cls, path: str | Path, models: ServedModels) -> "ModelCodec":
        """Load a `tokenizer.json`. Raises: CheckpointError."""
        text = TextTokenizer.from_file(path)
        try:
            tokenizer = recipe.Tokenizer.from_file(str(path))
        except ValueError as err:
            raise CheckpointError(f"cannot load {path}: {err}") from err
        return cls(models, ChatCodec(tokenizer, models), text)


def check_context(num_prompt_tokens: int, max_tokens: int | None, context_limit: int) -> None:
    """Raises: PromptTooLongError with the numbers when prompt and answer (at least one token) exceed the context."""
    if max_tokens is None:
        if num_prompt_tokens + 1 > context_limit:
            raise PromptTooLongError(
                f"This model's maximum context length is {context_limit} tokens, answer included; "
                f"the prompt has {num_prompt_tokens} tokens. Please shorten it."
            )
    elif num_prompt_tokens + max_tokens > context_limit:
        raise PromptTooLongError(
            f"This model's maximum context length is {context_limit} tokens; you asked for "
            f"{num_prompt_tokens + max_tokens} ({num_prompt_tokens} in the prompt, {max_tokens} for the answer)."
        )


def _starts_in_thoughts(conversion: recipe.ConversationRequest) -> bool:
    """False also for a thinking request that continues the content of a prefix message."""
    stage = conversion.parsing_options.thinking_initial_stage
    return stage is not None and stage.starts_in_reasoning()


def _reason(err: Exception) -> str:
    """A message without Python or Rust class names."""
    if isinstance(err, RecursionError):
        return "invalid request body: nested too deeply"
    if isinstance(err, UnicodeEncodeError):
        return f"invalid request body: not valid Unicode text ({err.reason})"
    return str(err)
