"""How commands talk: plain text on stdout, one clear line on stderr for an expected failure."""

import functools
import sys
from collections.abc import Callable
from typing import ParamSpec, TypeVar

import typer

from dsv4_cluster.errors import ConfigError, Dsv4Error, InvalidRequestError

P = ParamSpec("P")
T = TypeVar("T")

EXIT_FAILED = 1
EXIT_WRONG_INPUT = 2  # as for a misspelt option


def reports_errors(command: Callable[P, T]) -> Callable[P, T]:
    """Turn typed errors into one line and an exit code: 2 when the input is wrong, 1 when something failed."""

    @functools.wraps(command)
    def run(*args: P.args, **kwargs: P.kwargs) -> T:
        try:
            return command(*args, **kwargs)
        except Dsv4Error as err:
            print(f"error: {err.message}", file=sys.stderr)
            is_wrong_input = isinstance(err, ConfigError | InvalidRequestError)
            raise typer.Exit(EXIT_WRONG_INPUT if is_wrong_input else EXIT_FAILED) from err

    return run
