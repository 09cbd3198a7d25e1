"""Anthropic's Messages API over deepseek-recipe, and what its conversion leaves out: a schema for the answer's text
(`output_config.format`), and an assistant message at the end, which the answer continues.
"""

from typing import Any

import deepseek_recipe as recipe

from dsv4_cluster.errors import InvalidRequestError
from dsv4_cluster.tokenizer.family import ApiFamily, Body, ClientSchema, ClientSchemas, Rendering, objects


def answer_schema(body: Body) -> Any:
    """`output_config.format.schema`; None when there is none."""
    config = body.get("output_config")
    form = config.get("format") if isinstance(config, dict) else None
    return form.get("schema") if isinstance(form, dict) else None


def _free_choice(body: Body) -> dict[str, Any] | None:
    choice = body.get("tool_choice")
    if not isinstance(choice, dict) or choice.get("type") not in ("any", "tool"):
        return None
    named = choice.get("name") if choice["type"] == "tool" else None
    tools = [tool for tool in objects(body.get("tools")) if named in (None, tool.get("name"))]
    return {**body, "tool_choice": {"type": "auto"}, "tools": tools}


def _client_schemas(body: Body) -> ClientSchemas:
    strict = {
        str(tool.get("name")): ClientSchema(f"tools[{index}].input_schema", tool.get("input_schema"))
        for index, tool in enumerate(objects(body.get("tools")))
        if tool.get("strict") is True
    }
    own = answer_schema(body)
    response = None if own is None else ClientSchema("output_config.format.schema", own)
    return ClientSchemas(tools=strict, response=response)


def _render(conversion: recipe.ConversationRequest, body: Body) -> Rendering:
    conversation, parsing = conversion.conversation, conversion.parsing_options
    messages = conversation.messages
    schema = answer_schema(body)
    begun = messages[-1] if messages and messages[-1].role == "assistant" else None
    if begun is None and schema is None:
        return Rendering(conversation=conversation, parsing=parsing)
    if begun is not None:
        if schema is not None:
            raise InvalidRequestError("output_config.format cannot be combined with an assistant message at the end")
        if begun.tool_calls:
            raise InvalidRequestError("messages: the last message calls tools, so their results have to follow it")
        prefix = recipe.AssistantMessage(begun.content, begun.reasoning_content, None, prefix=True)
        messages = [*messages[:-1], prefix]
        if conversation.thinking_mode:
            parsing.thinking_initial_stage = recipe.ThinkingInitialStage.ContentContinuation
    changed = recipe.Conversation(
        messages,
        thinking_mode=conversation.thinking_mode,
        tools=conversation.tools,
        tool_choice=conversation.tool_choice,
        reasoning_effort=conversation.reasoning_effort,
        response_schema=schema,
    )
    return Rendering(conversation=changed, parsing=parsing)


MESSAGES = ApiFamily(
    request=recipe.MessagesRequest,
    free_choice=_free_choice,
    client_schemas=_client_schemas,
    make_generator=lambda *_: recipe.MessagesRequest.chunk_generator,
    render=_render,
)
