"""`dsv4 bench`: the group of measuring commands."""

import typer

from dsv4_cluster.cli.bench_engine import engine
from dsv4_cluster.cli.bench_kernels import kernels
from dsv4_cluster.cli.bench_overhead import overhead
from dsv4_cluster.cli.bench_serve import serve
from dsv4_cluster.cli.bench_transformers import compare_transformers

app = typer.Typer(
    no_args_is_help=True, help="Measure the engine or its GPU kernels in this process, or an endpoint under load."
)
app.command("engine")(engine)
app.command("kernels")(kernels)
app.command("serve")(serve)
app.command("overhead")(overhead)
app.command("compare-transformers")(compare_transformers)
