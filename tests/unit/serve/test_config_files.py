"""Config files and launch settings agree with what the code expects, and mistakes in them are named."""

import copy
import re
from pathlib import Path

import pytest
import yaml

from dsv4_cluster.config.load import load_serve_file
from dsv4_cluster.errors import ConfigError
from dsv4_cluster.serve.config_check import check_serve_keys
from dsv4_cluster.serve.environment import REQUIRED_SETTINGS, SINGLE_MACHINE_SETTINGS, missing_settings
from dsv4_cluster.serve.placement import MIN_BUNDLE_CPUS, check_placement, role_bundles

ROOT = Path(__file__).resolve().parents[3]
LAPTOP = ROOT / "configs" / "dsv4.yaml"


@pytest.fixture
def raw() -> dict:
    return yaml.safe_load(LAPTOP.read_text())


def test_the_laptop_config_is_fine_and_fits_on_two_cpus():
    raw, cluster = load_serve_file(LAPTOP)

    check_serve_keys(raw, source="dsv4.yaml")
    check_placement(cluster, [{"CPU": 2.0}])


def test_every_misspelt_key_is_named_with_a_suggestion(raw):
    raw["http_option"] = raw.pop("http_options")
    raw["logging_config"]["enable_acces_log"] = False
    raw["applications"][0]["deployments"] = [
        {"name": "Decode", "max_ongoing_request": 5, "ray_actor_options": {"num_cpu": 1}},
        {"name": "Prefil"},
    ]

    with pytest.raises(ConfigError) as caught:
        check_serve_keys(raw, source="x.yaml")

    message = caught.value.message
    assert message.startswith("x.yaml: ")
    assert "http_option: unknown key, did you mean 'http_options'?" in message
    assert "logging_config.enable_acces_log: unknown key" in message
    assert "deployments[0].max_ongoing_request: unknown key, did you mean 'max_ongoing_requests'?" in message
    assert "deployments[0].ray_actor_options.num_cpu: unknown key" in message
    assert "no deployment 'Prefil', did you mean 'Prefill'?" in message


def test_a_wrong_value_of_a_serve_key_is_named(raw):
    raw["http_options"]["port"] = "many"

    with pytest.raises(ConfigError, match=r"http_options\.port"):
        check_serve_keys(raw, source="x.yaml")


@pytest.mark.parametrize("port", [-1, 65536, 10**18])
def test_a_port_that_cannot_be_is_named(raw, port):
    raw["http_options"]["port"] = port

    with pytest.raises(ConfigError, match=rf"http_options\.port: {port} is not within 0\.\.65535"):
        check_serve_keys(raw, source="x.yaml")


@pytest.mark.parametrize(
    "change",
    [
        lambda raw: raw.update(http_options="x"),
        lambda raw: raw["applications"].append(5),
        lambda raw: raw["applications"].append({"name": "other"}),
        lambda raw: raw["applications"][0].update(deployments=[5]),
        lambda raw: raw["applications"][0].update(deployments=5),
    ],
    ids=["http-options", "application", "no-import-path", "deployment", "deployments"],
)
def test_a_value_where_fields_belong_is_a_config_error(raw, change):
    change(raw)

    with pytest.raises(ConfigError, match=r"x\.yaml"):
        check_serve_keys(raw, source="x.yaml")


@pytest.mark.parametrize("content", [b"\xff", b"[" * 5000, b"a: &a [*a]", b"5", b""])
def test_a_file_that_is_no_config_is_named(tmp_path, content):
    path = tmp_path / "config.yaml"
    path.write_bytes(content)

    with pytest.raises(ConfigError, match=r"config\.yaml"):
        load_serve_file(path)


def test_free_form_values_are_not_taken_for_keys(raw):
    changed = copy.deepcopy(raw)
    changed["applications"][0]["runtime_env"] = {"env_vars": {"ANYTHING": "1"}}

    check_serve_keys(changed, source="x.yaml")


def test_the_sum_of_what_is_asked_is_in_the_refusal():
    _, cluster = load_serve_file(LAPTOP)

    with pytest.raises(ConfigError, match=r"needs 0\.5 CPUs = router 1 x \(0\.1\) \+ .*, the cluster has 0\.4"):
        check_placement(cluster, [{"CPU": 0.2}, {"CPU": 0.2}])


def test_missing_gpus_are_refused_too():
    _, cluster = load_serve_file(LAPTOP)
    decode = cluster.decode.model_copy(update={"worker_num_gpus": 1.0, "num_replicas": 2})

    with pytest.raises(ConfigError, match=r"needs 2 GPUs = decode 2 x \(1\), the cluster has 1"):
        check_placement(cluster.model_copy(update={"decode": decode}), [{"CPU": 8.0, "GPU": 1.0}])


def test_a_process_larger_than_every_node_is_refused():
    _, cluster = load_serve_file(LAPTOP)
    decode = cluster.decode.model_copy(update={"worker_num_cpus": 3.0})

    with pytest.raises(ConfigError, match=r"one process asks for 3 CPUs, the largest node has 2"):
        check_placement(cluster.model_copy(update={"decode": decode}), [{"CPU": 2.0}, {"CPU": 2.0}])


def test_a_role_that_asks_for_nothing_still_gets_a_placement():
    _, cluster = load_serve_file(LAPTOP)
    role = cluster.decode.model_copy(update={"num_cpus": 0.0, "worker_num_cpus": 0.0})

    assert role_bundles(role) == [{"CPU": MIN_BUNDLE_CPUS}] * 2


def test_missing_throughput_settings_are_named():
    assert missing_settings({}) == ["RAY_SERVE_THROUGHPUT_OPTIMIZED=1"]
    assert missing_settings(REQUIRED_SETTINGS) == []


def test_the_launch_scripts_export_the_settings_that_the_command_sets():
    exported = dict(re.findall(r"^export (\w+)=(\S+)$", (ROOT / "launch" / "environment.sh").read_text(), re.MULTILINE))

    assert exported == REQUIRED_SETTINGS | SINGLE_MACHINE_SETTINGS
