"""`dsv4 make-key`: an API key for one client."""

import re
from typing import Annotated

import typer

from dsv4_cluster.cli.output import reports_errors
from dsv4_cluster.errors import ConfigError


@reports_errors
def make_key(
    name: Annotated[str, typer.Option("--name", help="Name of the client, as logs and messages show it.")],
    tenant: Annotated[
        str | None, typer.Option("--tenant", help="Whose it is; keys of one tenant share fairness and cached prefixes.")
    ] = None,
) -> None:
    """Make an API key and print it once, with the entry for the config file, which holds only its hash.

    Example: dsv4 make-key --name alice
    """
    from dsv4_cluster.config.api_config import NAME_PATTERN
    from dsv4_cluster.frontend.auth import hash_key, new_key

    for option, value in (("--name", name), ("--tenant", tenant)):
        if value is not None and not re.fullmatch(NAME_PATTERN, value):
            raise ConfigError(f"{option} is {value!r}: letters, digits, '_', '.' and '-' will do, 64 at most")
    key = new_key()
    print(f"key, give it to the client and keep no copy:  {key}\n")
    print("in the config file, under router:\n")
    print(f"  api:\n    keys:\n      - name: {name}")
    if tenant:
        print(f"        tenant: {tenant}")
    print(f"        sha256: {hash_key(key)}")
