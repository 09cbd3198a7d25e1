"""The `dsv4` command from the outside: output, exit codes, one clear line for a mistake."""

import json
import socket
import subprocess
import sys
from importlib.metadata import version
from pathlib import Path

import pytest
import yaml
from typer.testing import CliRunner

from dsv4_cluster.cli.main import app
from dsv4_cluster.config.api_config import ApiConfig
from dsv4_cluster.frontend.auth import hash_key

ROOT = Path(__file__).resolve().parents[3]
CONFIG = ROOT / "configs" / "dsv4.yaml"


def dsv4(*arguments: object):
    """Result of a command in this process."""
    return CliRunner().invoke(app, [str(argument) for argument in arguments])


@pytest.fixture
def config_file(toy_dir, tmp_path):
    """write(change) -> path of the laptop config, served from the toy checkpoint, with a change applied."""

    def write(change=lambda raw: None) -> Path:
        raw = yaml.safe_load(CONFIG.read_text())
        raw["applications"][0]["args"]["model"]["path"] = str(toy_dir)
        change(raw)
        path = tmp_path / "config.yaml"
        path.write_text(yaml.safe_dump(raw))
        return path

    return write


def speculate(raw: dict, num_draft_tokens: int | str, headroom: int) -> None:
    """Ask for drafts and set the rings' headroom of both roles."""
    args = raw["applications"][0]["args"]
    args["speculation"] = {"num_draft_tokens": num_draft_tokens}
    for role in ("prefill", "decode"):
        args[role]["kv"]["speculation_headroom"] = headroom


def test_help_imports_neither_torch_nor_ray():
    code = (
        "import sys; from dsv4_cluster.cli.main import app\n"
        "try: app(['--help'])\n"
        "except SystemExit: print(sorted({'torch', 'ray', 'transformers'} & set(sys.modules)))"
    )
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)

    assert result.stdout.splitlines()[-1] == "[]"
    assert "make-checkpoint" in result.stdout


def test_the_version_is_that_of_the_installed_package():
    result = dsv4("--version")

    assert (result.exit_code, result.stdout.strip()) == (0, version("dsv4-cluster"))


def test_make_checkpoint_is_done_once(tmp_path):
    out = tmp_path / "toy"

    assert dsv4("make-checkpoint", "--preset", "toy", "--out", out).output.strip().endswith(f"made {out}")
    assert "is there already" in dsv4("make-checkpoint", "--preset", "toy", "--out", out).output


@pytest.mark.parametrize("option", [("--preset", "huge"), ("--preset", "toy", "--format", "int3")])
def test_make_checkpoint_refuses_what_it_does_not_know(tmp_path, option):
    result = dsv4("make-checkpoint", "--out", tmp_path / "x", *option)

    assert result.exit_code == 2
    assert result.stderr.startswith("error: ")
    assert len(result.stderr.strip().splitlines()) == 1


def test_inspect_shows_a_directory_or_a_shape(toy_dir):
    assert "F8_E4M3" in dsv4("inspect", toy_dir).output
    assert "69,187" in dsv4("inspect", "--shape", "flash").output


def test_inspect_wants_exactly_one_thing(toy_dir):
    assert dsv4("inspect").exit_code == 2
    assert dsv4("inspect", toy_dir, "--shape", "toy").exit_code == 2


def test_generate_is_reproducible_with_a_seed(toy_dir):
    run = ("generate", toy_dir, "--prompt", "hi", "--max-tokens", 6, "--seed", 3, "--dtype", "float32", "--json")

    first, second = (json.loads(dsv4(*run).output) for _ in range(2))

    assert len(first["token_ids"]) == 6
    assert first["token_ids"] == second["token_ids"]
    drafted = json.loads(dsv4(*run, "--num-draft-tokens", "auto").output)
    assert (drafted["token_ids"], drafted["num_drafted"] > 0) == (first["token_ids"], True)


@pytest.mark.parametrize(
    ("option", "code"),
    [
        (("--temperature", "-1"), 2),
        (("--max-tokens", "0"), 2),
        (("--dtype", "int8"), 2),
        (("--num-draft-tokens", "7"), 2),
    ],
    ids=["temperature", "max-tokens", "dtype", "drafts"],
)
def test_generate_explains_wrong_values_in_one_line(toy_dir, option, code):
    result = dsv4("generate", toy_dir, "--prompt", "hi", *option)

    assert result.exit_code == code
    assert result.stderr.startswith(f"error: {option[0].removeprefix('--').replace('-', '_')}")
    assert len(result.stderr.strip().splitlines()) == 1


def test_generate_without_a_checkpoint_fails_in_one_line(tmp_path):
    result = dsv4("generate", tmp_path, "--prompt", "hi")

    assert (result.exit_code, result.stderr.count("\n")) == (1, 1)
    assert "config.json" in result.stderr


def test_check_accepts_a_good_file(config_file):
    result = dsv4("check", config_file())

    assert (result.exit_code, result.stderr) == (0, "")


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (
            lambda raw: raw["applications"][0]["args"]["decode"].update(num_replica=2),
            "decode.num_replica: unknown key, did you mean 'num_replicas'?",
        ),
        (
            lambda raw: raw["applications"][0]["args"]["decode"]["kv"].update(num_pagez=2),
            "decode.kv.num_pagez: unknown key, did you mean 'num_pages'?",
        ),
        (lambda raw: raw["applications"][0].update(route_prefx="/"), "route_prefx: unknown key"),
        (lambda raw: raw["applications"][0]["args"]["decode"]["engine"].update(max_model_len=10**6), "max_model_len"),
        (lambda raw: raw.pop("applications"), "applications"),
        (lambda raw: speculate(raw, 5, 8), "num_draft_tokens"),
        (lambda raw: speculate(raw, "auto", 3), "speculation_headroom is 3"),
    ],
    ids=["our-key", "our-inner-key", "serve-key", "limit", "no-application", "drafts", "headroom"],
)
def test_check_names_what_is_wrong(config_file, change, message):
    result = dsv4("check", config_file(change))

    assert result.exit_code == 2
    assert message in result.stderr


def test_check_refuses_a_missing_checkpoint(config_file, tmp_path):
    path = config_file(lambda raw: raw["applications"][0]["args"]["model"].update(path=str(tmp_path / "none")))

    assert dsv4("check", path).exit_code == 1


@pytest.mark.parametrize("arguments", [["check"], ["serve"], ["serve", "--port", "9000"]])
def test_a_checkpoint_in_place_of_a_config_file_is_refused_with_where_it_belongs(arguments, toy_dir):
    result = dsv4(*arguments, toy_dir)

    assert result.exit_code == 2
    assert f"{toy_dir} is a directory, expected a Ray Serve config file like configs/dsv4.yaml" in result.stderr
    assert "args.model.path" in result.stderr and "http_options" in result.stderr


def test_a_port_on_the_command_line_is_refused_with_where_it_belongs(config_file):
    path = config_file()

    result = dsv4("serve", path, "--port", "9000")

    assert result.exit_code == 2
    assert f"set http_options.port to 9000 in {path}" in result.stderr


def test_a_taken_port_is_named(config_file):
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        path = config_file(lambda raw: raw["http_options"].update(port=port))

        result = dsv4("check", path, "--port-free")

    assert result.exit_code == 2
    assert f"127.0.0.1:{port}" in result.stderr
    assert f"change http_options in {path}" in result.stderr


def test_make_key_prints_a_key_and_the_entry_with_its_hash():
    printed = dsv4("make-key", "--name", "alice", "--tenant", "t").output

    key = printed.split("keep no copy:")[1].split()[0]
    entry = yaml.safe_load(printed.split("under router:\n\n")[1])["api"]
    config = ApiConfig.model_validate(entry)
    assert config.keys[0].sha256 == hash_key(key)
    assert (config.keys[0].name, config.keys[0].tenant_name) == ("alice", "t")
    assert key not in yaml.safe_dump(entry)
    assert dsv4("make-key", "--name", "a b").exit_code == 2
