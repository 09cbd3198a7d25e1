"""OpenAI's Responses API over deepseek-recipe."""

from typing import Any

import deepseek_recipe as recipe

from dsv4_cluster.tokenizer.family import (
    ApiFamily,
    Body,
    ClientSchema,
    ClientSchemas,
    MakeGenerator,
    as_converted,
    objects,
)

_NAMESPACE_SEPARATOR = "__"  # deepseek-recipe's, between a namespace and a function in it


def _free_choice(body: Body) -> dict[str, Any] | None:
    choice = body.get("tool_choice")
    if choice != "required" and not isinstance(choice, dict):
        return None
    named = choice.get("name") if isinstance(choice, dict) else None
    tools = [tool for tool in objects(body.get("tools")) if named in (None, tool.get("name"))]
    return {**body, "tool_choice": "auto", "tools": tools}


def _client_schemas(body: Body) -> ClientSchemas:
    strict = {}
    for index, tool in enumerate(objects(body.get("tools"))):
        is_space = tool.get("type") == "namespace"
        prefix = f"{tool.get('name')}{_NAMESPACE_SEPARATOR}" if is_space else ""
        for inner, function in enumerate(objects(tool.get("tools")) if is_space else [tool]):
            if function.get("strict") is True:
                where = f"tools[{index}].tools[{inner}]" if is_space else f"tools[{index}]"
                strict[f"{prefix}{function.get('name')}"] = ClientSchema(
                    f"{where}.parameters", function.get("parameters")
                )
    text = body.get("text")
    form = text.get("format") if isinstance(text, dict) else None
    own = form.get("schema") if isinstance(form, dict) and form.get("strict") is True else None
    return ClientSchemas(tools=strict, response=None if own is None else ClientSchema("text.format.schema", own))


def _make_generator(request: recipe.ResponsesRequest, options: recipe.ConversionOptions) -> MakeGenerator:
    namespaces, echo = request.namespace_tool_map(options), request.echo()

    def make(conversion: recipe.ConversationRequest, response_id: str, model: str) -> recipe.ResponsesChunkGenerator:
        generator = recipe.ResponsesRequest.chunk_generator(conversion, response_id, model)
        return generator.with_namespace_tool_map(namespaces).with_echo(echo)

    return make


RESPONSES = ApiFamily(
    request=recipe.ResponsesRequest,
    free_choice=_free_choice,
    client_schemas=_client_schemas,
    make_generator=_make_generator,
    render=as_converted,
)
