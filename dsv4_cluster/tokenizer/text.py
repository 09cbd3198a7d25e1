"""Raw text to token ids and back, for prompts without a chat template.

Encoding runs without the added vocabulary: a special token spelled by a user is plain text, as in the official prompt
encoder. It goes through deepseek-recipe's tokenizer, which releases the interpreter lock while it works, so that a
long prompt encoded on a thread does not stall the event loop. Decoding is a table of bytes per token id: a byte-level
vocabulary makes the text of a sequence the concatenation of its tokens' bytes, whichever way it is cut.
"""

import json
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import deepseek_recipe as recipe

from dsv4_cluster.config.checkpoint_json import parse_json_object
from dsv4_cluster.errors import CheckpointError, InvalidRequestError

TOKENIZER_FILE = "tokenizer.json"
_FIM_BEGIN, _FIM_HOLE, _FIM_END = "<｜fim▁begin｜>", "<｜fim▁hole｜>", "<｜fim▁end｜>"
THINK_END = recipe.SpecialToken.ThinkingEnd.default_str()


class TextTokenizer:
    """The tokenizer of one checkpoint. Immutable; safe to use from several threads."""

    def __init__(
        self, plain: recipe.Tokenizer, token_bytes: list[bytes], added_token_ids: Mapping[str, int], *, origin: str
    ) -> None:
        """plain: tokenizer without the added vocabulary. token_bytes: index = token id; b"" where there is no token.

        added_token_ids: by spelling. origin: named in errors. Raises: CheckpointError when BOS or EOS is missing.
        """
        self._plain = plain
        self._token_bytes = token_bytes
        self._origin = origin
        self.added_token_ids = added_token_ids
        self.bos_token_id = self.special_token_id(recipe.SpecialToken.Bos)
        self.eos_token_id = self.special_token_id(recipe.SpecialToken.Eos)

    @classmethod
    def from_checkpoint(cls, checkpoint_dir: str | Path) -> "TextTokenizer":
        """Load `tokenizer.json` of a checkpoint. Raises: CheckpointError when it is absent or not usable."""
        return cls.from_file(Path(checkpoint_dir) / TOKENIZER_FILE)

    @classmethod
    def from_file(cls, path: str | Path) -> "TextTokenizer":
        """Load a `tokenizer.json`. Raises: CheckpointError that names the file and the reason."""
        raw = _read_tokenizer(Path(path))
        table = _token_bytes(raw)
        added = {entry["content"]: entry["id"] for entry in raw["added_tokens"]}
        for kind in (recipe.SpecialToken.Bos, recipe.SpecialToken.Eos):
            _require(added, kind.default_str(), str(path))
        plain = recipe.Tokenizer.from_str(json.dumps({**raw, "added_tokens": []}))
        return cls(plain, table, added, origin=str(path))

    @property
    def vocab_size(self) -> int:
        """Largest token id plus one."""
        return len(self._token_bytes)

    def special_token_id(self, kind: recipe.SpecialToken) -> int:
        """The id of a named special token. Raises: CheckpointError when the vocabulary lacks it."""
        return _require(self.added_token_ids, kind.default_str(), self._origin)

    def encode(self, text: str) -> list[int]:
        """Token ids of plain text, without BOS; special-token spellings stay text.

        Raises: InvalidRequestError when the text holds a lone surrogate.
        """
        try:
            return self._plain.encode(text)
        except UnicodeEncodeError as err:
            raise InvalidRequestError(
                f"prompt is not valid Unicode text: {err.reason} at character {err.start}"
            ) from err

    def encode_prompt(self, text: str) -> list[int]:
        """Token ids of a whole prompt: BOS and the text. Every official prompt layout starts with BOS (spec 8.2)."""
        return [self.bos_token_id, *self.encode(text)]

    def encode_gap(self, prefix: str, suffix: str) -> list[int]:
        """Token ids of a prompt whose answer stands between `prefix` and `suffix` (spec 8.9).

        Raises: InvalidRequestError when the vocabulary has no tokens for it, or a text holds a lone surrogate.
        """
        missing = [token for token in (_FIM_BEGIN, _FIM_HOLE, _FIM_END) if token not in self.added_token_ids]
        if missing:
            raise InvalidRequestError(f"the model cannot fill a gap: its tokenizer lacks {', '.join(missing)}")
        begin, hole, end = (self.added_token_ids[token] for token in (_FIM_BEGIN, _FIM_HOLE, _FIM_END))
        return [self.bos_token_id, begin, *self.encode(prefix), hole, *self.encode(suffix), end]

    def decode(self, token_ids: Iterable[int]) -> str:
        """Text of token ids, special tokens spelled out. Broken UTF-8 becomes U+FFFD, unknown ids become nothing."""
        return b"".join(map(self.token_bytes, token_ids)).decode("utf-8", errors="replace")

    def token_bytes(self, token_id: int) -> bytes:
        """The bytes one token stands for; b"" for an id outside the vocabulary."""
        return self._token_bytes[token_id] if 0 <= token_id < len(self._token_bytes) else b""


def special_token_id(checkpoint_dir: str | Path, token: str) -> int | None:
    """Id of a special token of a checkpoint, without building its tokenizer; None when there is no such token or file.

    Raises: CheckpointError when the file cannot be read.
    """
    path = Path(checkpoint_dir) / TOKENIZER_FILE
    if not path.exists():
        return None
    return next(
        (int(entry["id"]) for entry in _read_tokenizer(path)["added_tokens"] if entry["content"] == token), None
    )


def _read_tokenizer(path: Path) -> dict[str, Any]:
    try:
        text = path.read_bytes()
    except FileNotFoundError as err:
        raise CheckpointError(f"no {path.name} in {path.parent}") from err
    except OSError as err:
        raise CheckpointError(f"cannot read {path}: {err}") from err
    raw = parse_json_object(text, source=str(path))
    kinds = [part.get("type") if isinstance(part := raw.get(name), dict) else None for name in ("model", "decoder")]
    if kinds != ["BPE", "ByteLevel"] or "added_tokens" not in raw:
        raise CheckpointError(f"{path}: model {kinds[0]!r} with decoder {kinds[1]!r}, expected BPE with ByteLevel")
    return raw


def _require(added_token_ids: Mapping[str, int], text: str, origin: str) -> int:
    if text not in added_token_ids:
        raise CheckpointError(f"{origin}: the special token {text!r} is missing; is this a DeepSeek V4 tokenizer?")
    return added_token_ids[text]


def _token_bytes(raw: dict[str, Any]) -> list[bytes]:
    """Bytes per token id. Added tokens are literal text; the others are written in the byte-level alphabet."""
    vocab: dict[str, int] = raw["model"]["vocab"]
    added: list[dict[str, Any]] = raw["added_tokens"]
    size = 1 + max(max(vocab.values(), default=-1), max((entry["id"] for entry in added), default=-1))
    table = [b""] * size
    to_byte = {char: bytes([value]) for value, char in enumerate(_byte_alphabet())}
    for token, token_id in vocab.items():
        table[token_id] = b"".join(to_byte.get(char) or char.encode() for char in token)
    for entry in added:
        table[entry["id"]] = entry["content"].encode()
    return table


def _byte_alphabet() -> list[str]:
    """The printable character that stands for each byte value in a byte-level vocabulary.

    Printable Latin-1 bytes stand for themselves; the other 68 take the code points from U+0100 on, in byte order.
    """
    printable = {*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)}
    others = (chr(0x100 + index) for index in range(256 - len(printable)))
    return [chr(value) if value in printable else next(others) for value in range(256)]
