"""Chat bodies to prompt token ids, all of it through deepseek-recipe: nothing of the prompt format is written here."""

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import deepseek_recipe as recipe

from dsv4_cluster.errors import CheckpointError, InvalidRequestError, PromptTooLongError
from dsv4_cluster.protocol.request import StructuredSpec
from dsv4_cluster.schema_references import check_reference_levels, schemas_in
from dsv4_cluster.tokenizer.answer_form import answer_form
from dsv4_cluster.tokenizer.family import CHAT, ApiFamily, Body, ClientSchemas, Generator, MakeGenerator, Request
from dsv4_cluster.tokenizer.models import ServedModels
from dsv4_cluster.tokenizer.strict_schema import StrictSchemaError, refused_place
from dsv4_cluster.tokenizer.text import TOKENIZER_FILE, TextTokenizer

_FIELDS_WITH_SCHEMAS = ("tools", "response_format", "text", "output_config")
_STRICT = {"name": "checked", "strict": True}


@dataclass(frozen=True, slots=True, kw_only=True)
class ChatPrompt:
    """A converted chat request: its prompt, its resolved sampling values, and what parsing its output needs.

    temperature, top_p: after the official rule that thinking requests sample at 1.0. The asked ones: of the body.
    """

    conversion: recipe.ConversationRequest
    parsing: recipe.ParsingOptions
    make_generator: MakeGenerator
    model: str  # the name the client used
    token_ids: tuple[int, ...]
    max_tokens: int
    temperature: float
    top_p: float
    asked_temperature: float | None
    asked_top_p: float | None
    seed: int | None
    num_logprobs: int | None  # None: not asked for
    stop_strings: tuple[str, ...]
    is_thinking: bool  # generation starts inside the thoughts
    is_stream: bool
    structured: StructuredSpec | None  # the form the answer has to have
    is_single_call: bool  # the answer ends behind its first tool call

    def generator(self, response_id: str) -> Generator:
        """What turns one parsed answer into the family's events."""
        return self.make_generator(self.conversion, response_id, self.model)


class ChatCodec:
    """Chat requests of the served names, rendered as DeepSeek V4. Immutable; `encode` is safe on any thread."""

    def __init__(self, tokenizer: recipe.Tokenizer, text: TextTokenizer, models: ServedModels) -> None:
        """tokenizer: with the added vocabulary. text: the same without it."""
        self.tokenizer = tokenizer
        self.text = text
        self._models = models
        self._encoding = recipe.DeepseekV4Encoding().with_tokenizer(tokenizer)
        version = recipe.ModelVersion.DeepseekV4Pro
        self._options = recipe.ConversionOptions().with_model_versions_by_name(dict.fromkeys(models.names, version))

    def encode(
        self, body: Body, *, context_limit: int, family: ApiFamily = CHAT, is_single_call: bool = False
    ) -> ChatPrompt:
        """Convert, render and encode one parsed body. CPU-bound; it releases the interpreter lock.

        The official conversion refuses a forced tool choice while thinking: then the prompt is the one of a free
        choice, and the constraint starts behind the thoughts.

        context_limit: largest prompt + answer, in tokens. is_single_call: at most one tool call in the answer.
        Raises: ModelNotFoundError, PromptTooLongError with both numbers, InvalidRequestError.
        """
        for schema in schemas_in([body.get(field) for field in _FIELDS_WITH_SCHEMAS]):
            check_reference_levels(schema)
        free = family.free_choice(body)
        try:
            request = self._opened(family, body)
            make_generator = family.make_generator(request, self._options)
            if free is not None:
                conversion = self._opened(family, free).convert(self._options)
            if free is None or not conversion.conversation.thinking_mode:
                conversion = request.convert(self._options)
            rendering = family.render(conversion, body)
        except recipe.ConversionError as err:
            raise self._located(err, family.client_schemas(body)) from err
        except (ValueError, OverflowError, RecursionError) as err:
            raise InvalidRequestError(_reason(err)) from err
        parsing = rendering.parsing
        # Of two that end with the same character the parser takes the first: the longest, as `StopText` does.
        parsing.stop_sequences = sorted(parsing.stop_sequences, key=len, reverse=True)
        token_ids = tuple(self._encoding.encode(rendering.conversation))
        options = conversion.inference_options
        check_context(len(token_ids), options.max_tokens, context_limit)
        return ChatPrompt(
            conversion=conversion,
            parsing=parsing,
            make_generator=make_generator,
            model=str(body["model"]),
            token_ids=token_ids,
            max_tokens=conversion.resolve_max_tokens(len(token_ids), context_limit),
            temperature=1.0 if options.temperature is None else options.temperature,
            top_p=1.0 if options.top_p is None else options.top_p,
            asked_temperature=body.get("temperature"),
            asked_top_p=body.get("top_p"),
            seed=options.seed,
            num_logprobs=(options.top_logprobs or 0) if options.logprobs else None,
            stop_strings=tuple(parsing.stop_sequences),
            is_thinking=_starts_in_thoughts(parsing),
            is_stream=conversion.stream,
            structured=answer_form(
                options.output_constraint,
                parsing,
                family.client_schemas(body),
                is_call_forced=free is not None,
                is_single_call=is_single_call,
            ),
            is_single_call=is_single_call,
        )

    def _located(self, err: recipe.ConversionError, schemas: ClientSchemas) -> InvalidRequestError:
        """The same error, with its place when a strict schema is to blame."""
        checked = [(one, self._refusal_of_parameters) for one in schemas.tools.values()]
        if schemas.response is not None:
            checked.append((schemas.response, self._refusal_of_response))
        for one, refusal in checked:
            found = refused_place(one.schema, refusal) if refusal(one.schema) == str(err) else None
            if found is not None:
                return StrictSchemaError(found[1], param=one.param + found[0])
        return InvalidRequestError(str(err), http_status=err.status_code)

    def _refusal_of_parameters(self, schema: Any) -> str | None:
        """What the conversion says of strict parameters, None when it takes them."""
        return self._refusal({"tools": [{"type": "function", "function": {**_STRICT, "parameters": schema}}]})

    def _refusal_of_response(self, schema: Any) -> str | None:
        """The same of a strict response format."""
        return self._refusal({"response_format": {"type": "json_schema", "json_schema": {**_STRICT, "schema": schema}}})

    def _refusal(self, fields: Body) -> str | None:
        body = {"model": self._models.canonical, "messages": [{"role": "user", "content": ""}], **fields}
        try:
            self._opened(CHAT, body).convert(self._options)
        except (recipe.ConversionError, ValueError) as err:
            return str(err)
        return None

    def _opened(self, family: ApiFamily, body: Body) -> Request:
        request = family.request(json.dumps(body, ensure_ascii=False, allow_nan=False))
        self._models.resolve(request.model)
        return request


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
        return cls(models, ChatCodec(tokenizer, text, models), text)


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


def _starts_in_thoughts(parsing: recipe.ParsingOptions) -> bool:
    """False also for a thinking request that continues the content of a prefix message."""
    stage = parsing.thinking_initial_stage
    return stage is not None and stage.starts_in_reasoning()


def _reason(err: Exception) -> str:
    """A message without Python or Rust class names."""
    if isinstance(err, RecursionError):
        return "invalid request body: nested too deeply"
    if isinstance(err, UnicodeEncodeError):
        return f"invalid request body: not valid Unicode text ({err.reason})"
    return str(err)
