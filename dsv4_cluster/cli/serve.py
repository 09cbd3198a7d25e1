"""`dsv4 check` and `dsv4 serve`: the Serve graph of a config file, looked at or run."""

import socket
import tempfile
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from dsv4_cluster.cli.output import reports_errors
from dsv4_cluster.errors import ConfigError

if TYPE_CHECKING:
    from dsv4_cluster.config.cluster_config import ClusterConfig

ConfigArgument = Annotated[
    Path, typer.Argument(metavar="CONFIG", help="Ray Serve config file, like configs/dsv4.yaml.")
]

# Unix socket names end at 107 bytes and Ray adds about 75 of its own, so the system's temporary directory may not do.
RAY_DIR_PARENT = "/tmp"


@reports_errors
def check(
    config: ConfigArgument,
    port_free: Annotated[bool, typer.Option("--port-free", help="Also require that the HTTP port is free.")] = False,
) -> None:
    """Check a config file without starting anything.

    Finds what Ray Serve accepts in silence: misspelt deployment keys, unknown deployments, wrong values in our own
    part, a checkpoint that is missing or of another model, limits it cannot hold. Exit code 0 = fine, 2 = not.

    Example: dsv4 check configs/dsv4.yaml
    """
    raw, _ = _checked(config)
    if port_free:
        _require_free_port(raw, config)
    print(f"{config} is fine")


@reports_errors
def serve(
    config: ConfigArgument,
    port: Annotated[str | None, typer.Option("--port", hidden=True)] = None,
) -> None:
    """Run the graph of a config file on a Ray instance of its own; Ctrl-C stops both.

    Sets Ray's throughput settings, which `serve run` leaves to you. For a cluster of several machines start Ray there
    with these settings (see launch/environment.sh) and use `serve deploy`.

    Example: dsv4 serve configs/dsv4.yaml
    """
    from dsv4_cluster.serve.environment import prepare_single_machine

    with tempfile.TemporaryDirectory(prefix="dsv4.", dir=RAY_DIR_PARENT) as ray_dir:
        prepare_single_machine(ray_temp_dir=ray_dir)  # before anything imports Ray
        raw, cluster = _checked(config)
        if port is not None:  # an option of other servers: known here to say where it belongs
            raise ConfigError(f"dsv4 serve takes no --port: set http_options.port to {port} in {config}")
        _require_free_port(raw, config)
        from dsv4_cluster.serve.runner import run_until_signal

        print(f"logs of every process, while it runs: {ray_dir}/ray/session_latest/logs")
        run_until_signal(config, raw, cluster, say=print)


def _checked(path: Path) -> "tuple[dict[str, Any], ClusterConfig]":
    """(the parsed file, the arguments of our application in it). Raises: ConfigError, CheckpointError."""
    from dsv4_cluster.config.limits import check_drafter, check_headroom, shortest_max_model_len
    from dsv4_cluster.config.load import load_serve_file
    from dsv4_cluster.config.model_config import ModelConfig
    from dsv4_cluster.serve.config_check import check_serve_keys

    raw, cluster = load_serve_file(path)
    check_serve_keys(raw, source=str(path))
    engines = [(role.engine, role.kv) for role in (cluster.prefill, cluster.decode)]
    model = ModelConfig.from_checkpoint(cluster.model.path)
    shortest_max_model_len(model, engines)
    check_drafter(model, cluster.speculation)
    for _, kv in engines:
        check_headroom(cluster.speculation, kv)
    return raw, cluster


def _require_free_port(raw: dict[str, Any], path: Path) -> None:
    """Raises: ConfigError when something listens on the HTTP port already."""
    http = raw.get("http_options") or {}
    host, port = http.get("host", "127.0.0.1"), http.get("port", 8000)
    with socket.socket() as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind((host, port))
        except OSError as err:
            raise ConfigError(
                f"cannot listen on {host}:{port} ({err.strerror}): stop what listens there, or change "
                f"http_options in {path}"
            ) from err
