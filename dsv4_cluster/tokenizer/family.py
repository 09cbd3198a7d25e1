"""The chat APIs as data: the classes of deepseek-recipe behind each, and how each spells what the server adds.

One path encodes a body and parses its answer (`ChatCodec`, `ChatParser`); an `ApiFamily` says where they differ.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, TypeAlias

import deepseek_recipe as recipe

Body: TypeAlias = Mapping[str, Any]
Request: TypeAlias = recipe.ChatCompletionRequest | recipe.ResponsesRequest | recipe.MessagesRequest
Event: TypeAlias = recipe.ChatCompletionChunk | recipe.ResponsesStreamEvent | recipe.MessagesStreamEvent
Generator: TypeAlias = (
    recipe.ChatCompletionChunkGenerator | recipe.ResponsesChunkGenerator | recipe.MessagesChunkGenerator
)
MakeGenerator: TypeAlias = Callable[[recipe.ConversationRequest, str, str], Generator]  # conversion, id, model


@dataclass(frozen=True, slots=True)
class ClientSchema:
    """A strict schema, and where it stands in the body."""

    param: str
    schema: Any


@dataclass(frozen=True, slots=True, kw_only=True)
class ClientSchemas:
    """Strict schemas as the client wrote them: the conversion drops keywords on the way, the constraint keeps them."""

    tools: Mapping[str, ClientSchema] = field(default_factory=dict)  # function name -> parameters
    response: ClientSchema | None = None  # None: no strict schema for the answer's text


@dataclass(frozen=True, slots=True, kw_only=True)
class Rendering:
    """What is encoded and how its answer is read."""

    conversation: recipe.Conversation
    parsing: recipe.ParsingOptions


@dataclass(frozen=True, slots=True, kw_only=True)
class ApiFamily:
    """One API.

    free_choice: for a body that forces a tool call, the same body with a free choice among the tools it may call; None
    otherwise. client_schemas: see ClientSchemas. make_generator: called before the conversion consumes the request.
    render: adds what the conversion leaves out; raises InvalidRequestError.
    """

    request: type[recipe.ChatCompletionRequest] | type[recipe.ResponsesRequest] | type[recipe.MessagesRequest]
    free_choice: Callable[[Body], dict[str, Any] | None]
    client_schemas: Callable[[Body], ClientSchemas]
    make_generator: Callable[[Any, recipe.ConversionOptions], MakeGenerator]
    render: Callable[[recipe.ConversationRequest, Body], Rendering]


def as_converted(conversion: recipe.ConversationRequest, _: Body) -> Rendering:
    """The rendering that the conversion asks for."""
    return Rendering(conversation=conversion.conversation, parsing=conversion.parsing_options)


def tool_name(value: object) -> str | None:
    """The function name in a chat-completions tool or tool choice; None when there is none."""
    function = value.get("function") if isinstance(value, dict) else None
    name = function.get("name") if isinstance(function, dict) else None
    return name if isinstance(name, str) else None


def objects(value: object) -> list[dict[str, Any]]:
    """The objects in a JSON array; [] for anything else."""
    return [entry for entry in value if isinstance(entry, dict)] if isinstance(value, list) else []


def _free_chat_choice(body: Body) -> dict[str, Any] | None:
    choice = body.get("tool_choice")
    if choice != "required" and not isinstance(choice, dict):
        return None
    named = tool_name(choice)
    tools = [tool for tool in objects(body.get("tools")) if named in (None, tool_name(tool))]
    return {**body, "tool_choice": "auto", "tools": tools}


def _chat_schemas(body: Body) -> ClientSchemas:
    strict = {}
    for index, tool in enumerate(objects(body.get("tools"))):
        name = tool_name(tool)
        if name is not None and tool["function"].get("strict") is True:
            strict[name] = ClientSchema(f"tools[{index}].function.parameters", tool["function"].get("parameters"))
    answer = body.get("response_format")
    own = answer.get("json_schema") if isinstance(answer, dict) else None
    is_strict = isinstance(own, dict) and own.get("strict") is True and own.get("schema") is not None
    response = ClientSchema("response_format.json_schema.schema", own["schema"]) if own and is_strict else None
    return ClientSchemas(tools=strict, response=response)


CHAT = ApiFamily(
    request=recipe.ChatCompletionRequest,
    free_choice=_free_chat_choice,
    client_schemas=_chat_schemas,
    make_generator=lambda *_: recipe.ChatCompletionRequest.chunk_generator,
    render=as_converted,
)
