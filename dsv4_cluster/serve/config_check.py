"""Find what Serve's own schema lets pass in a config file: keys it does not know and deployments that do not exist."""

import types
from typing import Any, Union, get_args, get_origin

from pydantic import BaseModel, ValidationError
from ray.serve.schema import ServeDeploySchema

from dsv4_cluster.config.load import BUILDER
from dsv4_cluster.config.spelling import did_you_mean
from dsv4_cluster.errors import ConfigError
from dsv4_cluster.serve.names import DEPLOYMENTS


def check_serve_keys(raw: dict[str, Any], *, source: str) -> None:
    """Check a parsed Serve config file, except the arguments of our own application.

    Raises: ConfigError with every unknown key, a suggestion where one is near, and what Serve's schema refuses.
    """
    problems = _unknown_keys(raw, ServeDeploySchema, "")
    try:
        ServeDeploySchema.model_validate(raw)
    except ValidationError as err:
        # Unknown keys are in the list already, with a suggestion.
        others = [e for e in err.errors() if e["type"] != "extra_forbidden"]
        problems += [f"{'.'.join(str(part) for part in e['loc'])}: {e['msg']}" for e in others]
    for application in raw.get("applications") or []:
        if application.get("import_path") == BUILDER:
            names = [deployment.get("name") for deployment in application.get("deployments") or []]
            problems += [
                f"deployments: no deployment {name!r}{did_you_mean(name, DEPLOYMENTS)}"
                for name in names
                if name not in DEPLOYMENTS
            ]
    if problems:
        raise ConfigError(f"{source}: " + "; ".join(problems))


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
