"""Shapes by name: the shipped models and the small ones for tests, as `config.json` contents in the official names.

The files live inside the package, so that an installed wheel has them too.
"""

import json
from importlib import resources
from typing import Any

from dsv4_cluster.config.model_config import ModelConfig
from dsv4_cluster.errors import ConfigError


def preset_names() -> tuple[str, ...]:
    """All shape presets, sorted."""
    files = resources.files(__name__).iterdir()
    return tuple(sorted(path.name.removesuffix(".json") for path in files if path.name.endswith(".json")))


def preset_json(name: str) -> dict[str, Any]:
    """The `config.json` contents of a preset. Raises: ConfigError for an unknown name, listing the known ones."""
    if name not in preset_names():
        raise ConfigError(f"unknown shape preset {name!r}; known: {', '.join(preset_names())}")
    contents = json.loads((resources.files(__name__) / f"{name}.json").read_text())
    assert isinstance(contents, dict), f"preset {name} holds {type(contents).__name__}"
    return contents


def preset_config(name: str) -> ModelConfig:
    """The model dimensions of a preset. Raises: ConfigError for an unknown name."""
    return ModelConfig.from_dict(preset_json(name), source=f"preset {name}")
