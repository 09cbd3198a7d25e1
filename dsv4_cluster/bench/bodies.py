"""Request bodies for the turns of a conversation, as chat messages or as one raw text."""

from dsv4_cluster.bench.client import Endpoint
from dsv4_cluster.bench.workload import Conversation, Turn


class Dialogue:
    """The growing history of one conversation."""

    def __init__(self, conversation: Conversation, endpoint: Endpoint, *, temperature: float) -> None:
        self._endpoint = endpoint
        self._temperature = temperature
        self._messages: list[dict[str, str]] = []
        self._raw = conversation.prefix
        if conversation.prefix:
            self._messages.append({"role": "system", "content": conversation.prefix})

    def ask(self, turn: Turn) -> dict[str, object]:
        """Append the turn's text and return the body that sends everything so far."""
        self._messages.append({"role": "user", "content": turn.text})
        self._raw += turn.text
        prompt: dict[str, object] = (
            {"messages": [*self._messages]} if self._endpoint.api == "chat" else {"prompt": self._raw}
        )
        return {
            "model": self._endpoint.model,
            **prompt,
            "max_tokens": turn.num_output_tokens,
            "temperature": self._temperature,
            "seed": turn.seed,
            "stream": True,
            "stream_options": {"include_usage": True},
            **self._endpoint.extra_body,
        }

    def answered(self, text: str) -> None:
        """Append the server's answer, so that the next turn repeats it."""
        self._messages.append({"role": "assistant", "content": text})
        self._raw += text
