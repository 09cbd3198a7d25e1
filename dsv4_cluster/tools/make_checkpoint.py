"""Makes a complete checkpoint directory with random weights, in the official format or as bf16."""

import contextlib
import json
import os
import shutil
import tempfile
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Literal, get_args

from rich.console import Console
from rich.progress import BarColumn, DownloadColumn, Progress, TextColumn, TimeRemainingColumn

from dsv4_cluster.config.model_config import ModelConfig
from dsv4_cluster.errors import ConfigError
from dsv4_cluster.tools.presets import preset_config, preset_json
from dsv4_cluster.tools.tokenizer_files import write_tokenizer
from dsv4_cluster.weights.dummy import dummy_plain, dummy_tensor
from dsv4_cluster.weights.formats import as_stored
from dsv4_cluster.weights.inventory import TensorSpec, inventory
from dsv4_cluster.weights.writer import ShardedWriter, TensorEntry

CheckpointFormat = Literal["official", "bf16"]

GENERATOR_VERSION = 1  # raise it whenever the same arguments would give other bytes
MARKER_FILE = "dsv4_make_checkpoint.json"
_MAX_SHARD_BYTES = 1_000_000_000
_QUANTISED_ONLY_KEYS = ("quantization_config", "expert_dtype")


@dataclass(frozen=True, slots=True)
class Recipe:
    """What determines every byte of a made checkpoint; stored next to the weights."""

    preset: str
    seed: int
    format: str
    version: int = GENERATOR_VERSION


@dataclass(frozen=True, slots=True)
class MadeCheckpoint:
    """Result of `make_checkpoint`. created: False when the directory already held this checkpoint."""

    path: Path
    created: bool


def make_checkpoint(
    preset: str,
    out: str | Path,
    *,
    seed: int = 0,
    fmt: CheckpointFormat = "official",
    console: Console | None = None,
) -> MadeCheckpoint:
    """Write weights, index, config and tokenizer files of a shape preset to `out`.

    The directory appears complete or not at all. It is left alone when it already holds the same recipe.
    console: shows progress there; None = silent.
    Raises: ConfigError for an unknown preset or format, a directory with other contents, or too little disk space.
    """
    if fmt not in get_args(CheckpointFormat):
        raise ConfigError(f"format is {fmt!r}, expected one of {', '.join(get_args(CheckpointFormat))}")
    recipe, out = Recipe(preset, seed, fmt), Path(out)
    config = preset_config(preset)
    if _holds(out, recipe):
        return MadeCheckpoint(out, created=False)
    out.parent.mkdir(parents=True, exist_ok=True)
    stored = _stored_specs(config, fmt)
    _check_space(out.parent, sum(spec.num_bytes for spec in stored.values()))
    temporary = Path(tempfile.mkdtemp(prefix=f".{out.name}.", dir=out.parent))
    try:
        _write_weights(temporary, inventory(config), stored, recipe, console)
        _write_side_files(temporary, config, recipe)
        temporary.chmod(0o755)
        return MadeCheckpoint(out, created=_publish(temporary, out, recipe))
    finally:
        shutil.rmtree(temporary, ignore_errors=True)


def _holds(out: Path, recipe: Recipe) -> bool:
    """True when `out` is this very checkpoint, False when it is free. Raises: ConfigError when it holds another."""
    if not out.exists() or (out.is_dir() and not any(out.iterdir())):
        return False
    marker = out / MARKER_FILE
    try:
        found = json.loads(marker.read_text())
    except (OSError, ValueError):
        raise ConfigError(f"{out} is not empty and was not made by this tool; choose another directory") from None
    if found != asdict(recipe):
        raise ConfigError(f"{out} holds another checkpoint: {found}, wanted {asdict(recipe)}; remove it first")
    return True


def _stored_specs(config: ModelConfig, fmt: CheckpointFormat) -> dict[str, TensorSpec]:
    specs = inventory(config)
    if fmt == "official":
        return specs
    return {
        name: spec if spec.scale_block is None else as_stored(spec, "BF16")
        for name, spec in specs.items()
        if spec.scale_of is None
    }


def _check_space(directory: Path, num_bytes: int) -> None:
    free = shutil.disk_usage(directory).free
    if free < num_bytes:
        raise ConfigError(f"{directory} has {free:,} bytes free, the checkpoint needs {num_bytes:,}")


def _write_weights(
    directory: Path,
    specs: dict[str, TensorSpec],
    stored: dict[str, TensorSpec],
    recipe: Recipe,
    console: Console | None,
) -> None:
    entries = [TensorEntry(spec.name, spec.dtype, spec.shape) for spec in stored.values()]
    total = sum(entry.num_bytes for entry in entries)
    title = f"{recipe.preset} ({recipe.format}, seed {recipe.seed})"
    with (
        _progress(console, title, total) as advance,
        ShardedWriter(directory, entries, max_shard_bytes=_MAX_SHARD_BYTES) as writer,
    ):
        for name, entry in stored.items():
            spec = specs[name]
            plain = recipe.format == "bf16"
            writer.write(name, dummy_plain(spec, specs, recipe.seed) if plain else dummy_tensor(spec, recipe.seed))
            advance(entry.num_bytes)


@contextlib.contextmanager
def _progress(console: Console | None, title: str, total: int) -> Iterator[Callable[[int], None]]:
    if console is None:
        yield lambda _: None
        return
    columns = (TextColumn("{task.description}"), BarColumn(), DownloadColumn(), TimeRemainingColumn())
    with Progress(*columns, console=console, transient=True) as progress:
        task = progress.add_task(title, total=total)
        yield lambda num_bytes: progress.advance(task, num_bytes)


def _write_side_files(directory: Path, config: ModelConfig, recipe: Recipe) -> None:
    contents = preset_json(recipe.preset)
    if recipe.format == "bf16":
        contents = {key: value for key, value in contents.items() if key not in _QUANTISED_ONLY_KEYS}
    _write_json(directory / "config.json", contents)
    generation = {"bos_token_id": config.bos_token_id, "eos_token_id": config.eos_token_id}
    _write_json(
        directory / "generation_config.json", {**generation, "do_sample": True, "temperature": 1.0, "top_p": 1.0}
    )
    write_tokenizer(directory, config.vocab_size)
    _write_json(directory / MARKER_FILE, asdict(recipe))


def _write_json(path: Path, contents: dict[str, Any]) -> None:
    path.write_text(json.dumps(contents, indent=2) + "\n", encoding="utf-8")


def _publish(temporary: Path, out: Path, recipe: Recipe) -> bool:
    """Rename into place. Returns: False when another process put the same checkpoint there first."""
    try:
        os.rename(temporary, out)  # replaces an empty directory, fails on a filled one
    except OSError:
        if _holds(out, recipe):
            return False
        raise
    return True
