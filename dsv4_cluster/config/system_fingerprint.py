"""One short name for everything that may change an answer to the same seed: weights, code, engine settings."""

import hashlib
from pathlib import Path

from dsv4_cluster import __version__
from dsv4_cluster.errors import CheckpointError

_SAMPLE_BYTES = 4096
_SAMPLES_PER_FILE = 16


def system_fingerprint(checkpoint_dir: str | Path, settings: object) -> str:
    """`fp_` and 16 hexadecimal digits. settings: of the engines; their `repr` counts.

    It reads samples of each weight file, not all of it. Raises: CheckpointError when a file cannot be read.
    """
    digest = hashlib.sha256(f"{__version__}|{settings!r}".encode())
    try:
        for path in sorted(Path(checkpoint_dir).iterdir()):
            if path.suffix == ".json":
                digest.update(path.name.encode() + path.read_bytes())
            elif path.suffix == ".safetensors":
                digest.update(path.name.encode() + _sample(path))
    except OSError as err:
        raise CheckpointError(f"cannot read {checkpoint_dir}: {err}") from err
    return f"fp_{digest.hexdigest()[:16]}"


def _sample(path: Path) -> bytes:
    """The size, and blocks spread evenly from the header to the end."""
    size = path.stat().st_size
    parts = [f":{size};".encode()]
    with path.open("rb") as file:
        for index in range(_SAMPLES_PER_FILE):
            file.seek(max(0, size - _SAMPLE_BYTES) * index // (_SAMPLES_PER_FILE - 1))
            parts.append(file.read(_SAMPLE_BYTES))
    return b"".join(parts)
