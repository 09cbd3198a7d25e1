"""Read a Serve config file and return its application arguments as a checked ClusterConfig."""

from pathlib import Path
from typing import Any

import yaml
from pydantic import BaseModel, ValidationError
from pydantic_core import ErrorDetails

from dsv4_cluster.config.cluster_config import ClusterConfig
from dsv4_cluster.config.spelling import did_you_mean
from dsv4_cluster.errors import ConfigError

BUILDER = "dsv4_cluster.serve.app:build"


def load_serve_file(path: str | Path) -> tuple[dict[str, Any], ClusterConfig]:
    """Return (the whole parsed Serve file, the arguments of our application in it).

    Raises: ConfigError that names file, field and reason.
    """
    try:
        raw = yaml.safe_load(Path(path).read_text())
    except FileNotFoundError as err:
        raise ConfigError(f"no config file {path}") from err
    except IsADirectoryError as err:
        raise ConfigError(
            f"{path} is a directory, expected a Ray Serve config file like configs/dsv4.yaml; a checkpoint is named "
            "in such a file, in args.model.path of its application, and the port in http_options"
        ) from err
    except (OSError, UnicodeDecodeError, yaml.YAMLError) as err:
        raise ConfigError(f"cannot read {path}: {err}") from err
    except RecursionError as err:
        raise ConfigError(f"cannot read {path}: nested too deeply") from err
    applications = raw.get("applications") if isinstance(raw, dict) else None
    if not isinstance(applications, list):
        raise ConfigError(f"{path}: 'applications' is missing; expected a Ray Serve config file")
    ours = [app for app in applications if isinstance(app, dict) and app.get("import_path") == BUILDER]
    if len(ours) != 1:
        raise ConfigError(f"{path}: found {len(ours)} applications with import_path {BUILDER}, expected 1")
    return raw, parse_cluster_config(ours[0].get("args") or {}, source=str(path))


def parse_cluster_config(args: dict[str, Any], *, source: str = "args") -> ClusterConfig:
    """Validate application arguments. Raises: ConfigError with one line per wrong field."""
    try:
        return ClusterConfig.model_validate(args)
    except ValidationError as err:
        lines = [f"{'.'.join(str(part) for part in e['loc']) or 'args'}: {_reason(e)}" for e in err.errors()]
        raise ConfigError(f"{source}: " + "; ".join(lines)) from err


def _reason(error: ErrorDetails) -> str:
    """What is wrong with one field; for a key that does not exist, the one that may have been meant."""
    if error["type"] != "extra_forbidden":
        return error["msg"]
    *groups, key = error["loc"]
    settings: type[BaseModel] = ClusterConfig
    for group in groups:
        annotation = settings.model_fields[str(group)].annotation
        assert isinstance(annotation, type) and issubclass(annotation, BaseModel), (group, annotation)
        settings = annotation
    return f"unknown key{did_you_mean(key, settings.model_fields)}"
