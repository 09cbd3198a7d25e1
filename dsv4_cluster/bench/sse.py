"""Server-sent events out of the bytes of a stream, however they are cut."""

_PREFIX = b"data:"


class SSEDecoder:
    """Feed bytes, take the `data` payloads of the events they complete. Comments and other fields are skipped."""

    def __init__(self) -> None:
        self._buffer = b""
        self._data: list[bytes] = []

    def feed(self, raw: bytes) -> list[bytes]:
        """Returns: payloads of the events that `raw` completes; several data lines are joined by a newline."""
        lines = (self._buffer + raw).split(b"\n")
        self._buffer = lines.pop()
        events = []
        for line in lines:
            line = line.removesuffix(b"\r")
            if line.startswith(_PREFIX):
                self._data.append(line[len(_PREFIX) :].removeprefix(b" "))
            elif not line and self._data:
                events.append(b"\n".join(self._data))
                self._data = []
        return events
