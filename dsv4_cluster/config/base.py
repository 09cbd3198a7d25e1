"""The common base of all settings: frozen, and a misspelt key is an error."""

from pydantic import BaseModel, ConfigDict


class Settings(BaseModel):
    """A frozen group of settings. Raises: pydantic.ValidationError on unknown keys or values out of range."""

    model_config = ConfigDict(extra="forbid", frozen=True, protected_namespaces=())
