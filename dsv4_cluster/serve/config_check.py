"""Find what Serve's own schema lets pass in a config file: keys it does not know and deployments that do not exist."""

import types
from typing import Any, Union, get_args, get_origin

from pydantic import BaseModel, ValidationError
from ray.serve.schema import ServeDeploySchema

from dsv4_cluster.config.load import BUILDER
from dsv4_cluster.config.spelling import did_you_mean
from dsv4_cluster.errors import ConfigError
from dsv4_cluster.serve.names import DEPLOYMENTS

MAX_PORT = 65535


def check_serve_keys(raw: dict[str, Any], *, source: str) -> None:
    """Check a parsed Serve config file, except the arguments of our own application.

    Raises: ConfigError with every unknown key, a suggestion where one is near, and what Serve's schema refuses.
    """
    unknown_keys = _unknown_keys(raw, ServeDeploySchema, "")
    wrong_values = _refused_by_serve(raw)
    if not wrong_values:  # otherwise fields may be missing where the next checks look for them
        wrong_values = _unknown_deployments(raw) + _impossible_port(raw)
    if unknown_keys or wrong_values:
        raise ConfigError(f"{source}: " + "; ".join(unknown_keys + wrong_values))


def _refused_by_serve(raw: dict[str, Any]) -> list[str]:
    try:
        ServeDeploySchema.model_validate(raw)
    except ValidationError as err:
        # Unknown keys are listed by `_unknown_keys`, with a suggestion.
        others = [e for e in err.errors() if e["type"] != "extra_forbidden"]
        return [f"{'.'.join(str(part) for part in e['loc'])}: {e['msg']}" for e in others]
    except AttributeError as err:  # validators of Serve's schema take every deployment for a mapping
        return [f"a value stands where fields belong: {err}"]
    return []


def _unknown_deployments(raw: dict[str, Any]) -> list[str]:
    ours = [application for application in raw["applications"] if application["import_path"] == BUILDER]
    names = [deployment.get("name") for application in ours for deployment in application.get("deployments") or []]
    return [
        f"deployments: no deployment {name!r}{did_you_mean(name, DEPLOYMENTS)}"
        for name in names
        if name not in DEPLOYMENTS
    ]


def _impossible_port(raw: dict[str, Any]) -> list[str]:
    port = int((raw.get("http_options") or {}).get("port", 0))
    return [] if 0 <= port <= MAX_PORT else [f"http_options.port: {port} is not within 0..{MAX_PORT}"]


def _unknown_keys(value: Any, annotation: Any, path: str) -> list[str]:
    """Walk a value along the types of its schema."""
    model, item = _expected(annotation)
    if model is not None and isinstance(value, dict):
        fields = {field.alias or name: field.annotation for name, field in model.model_fields.items()}
        found = []
        for key, inner in value.items():
            where = f"{path}.{key}" if path else str(key)
            if key in fields:
                found += _unknown_keys(inner, fields[key], where)
            else:
                found.append(f"{where}: unknown key{did_you_mean(key, fields)}")
        return found
    if item is not None and isinstance(value, list):
        return [found for index, inner in enumerate(value) for found in _unknown_keys(inner, item, f"{path}[{index}]")]
    return []


def _expected(annotation: Any) -> tuple[type[BaseModel] | None, Any]:
    """(the model an annotation allows, the item type of the list it allows); None where it allows none."""
    options = get_args(annotation) if get_origin(annotation) in (Union, types.UnionType) else (annotation,)
    models = [option for option in options if isinstance(option, type) and issubclass(option, BaseModel)]
    lists = [get_args(option)[0] for option in options if get_origin(option) is list and get_args(option)]
    return (models[0] if len(models) == 1 else None), (lists[0] if len(lists) == 1 else None)
