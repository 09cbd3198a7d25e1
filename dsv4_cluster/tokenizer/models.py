"""Served model names: what a client may write in `model`, and the canonical name behind it."""

from collections.abc import Sequence
from dataclasses import dataclass

from dsv4_cluster.errors import ConfigError, ModelNotFoundError


@dataclass(frozen=True, slots=True)
class ServedModels:
    """Names of the one model served here; the first is canonical. Names are case-sensitive."""

    names: tuple[str, ...]

    @classmethod
    def of(cls, names: Sequence[str]) -> "ServedModels":
        """Check and freeze. Raises: ConfigError when there is no name, an empty one or one twice."""
        if not names or not all(names) or len(set(names)) != len(names):
            raise ConfigError(f"served_names is {list(names)!r}: expected at least one name, none empty or repeated")
        return cls(tuple(names))

    @property
    def canonical(self) -> str:
        """The name used in logs and metrics."""
        return self.names[0]

    def resolve(self, name: str) -> str:
        """Return the canonical name. Raises: ModelNotFoundError that lists the served names."""
        if name not in self.names:
            raise ModelNotFoundError(f"The model {name!r} does not exist; served here: {', '.join(self.names)}")
        return self.canonical
