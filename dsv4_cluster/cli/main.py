"""The command tree. Commands import what they need when they run, so that `dsv4 --help` is quick."""

from typing import Annotated

import typer

from dsv4_cluster import __version__
from dsv4_cluster.cli.bench import app as bench_app
from dsv4_cluster.cli.checkpoint import inspect, make_checkpoint
from dsv4_cluster.cli.generate import generate
from dsv4_cluster.cli.keys import make_key
from dsv4_cluster.cli.serve import check, serve

app = typer.Typer(
    name="dsv4",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_show_locals=False,
    rich_markup_mode="rich",
    help=(
        "Serve DeepSeek V4 models on a Ray cluster.\n\n"
        "A first walk, on a laptop:\n\n"
        "  dsv4 make-checkpoint --preset tiny --out checkpoints/tiny\n\n"
        "  dsv4 inspect checkpoints/tiny\n\n"
        '  dsv4 generate checkpoints/tiny --prompt "Hello"\n\n'
        "  dsv4 check configs/dsv4.yaml\n\n"
        "  dsv4 serve configs/dsv4.yaml"
    ),
)


def _show_version(is_asked: bool) -> None:
    if is_asked:
        print(__version__)
        raise typer.Exit


@app.callback()
def root(
    _version: Annotated[
        bool, typer.Option("--version", callback=_show_version, is_eager=True, help="Show the version and exit.")
    ] = False,
) -> None:
    """Options that stand before a command."""


app.command("generate")(generate)
app.command("make-checkpoint")(make_checkpoint)
app.command("inspect")(inspect)
app.command("make-key")(make_key)
app.command("check")(check)
app.command("serve")(serve)
app.add_typer(bench_app, name="bench")
