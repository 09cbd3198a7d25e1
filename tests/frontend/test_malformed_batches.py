"""Whatever is posted to the endpoints of files and batches, the answer is 200 or a 4xx: never a 500, never a hang."""

import json

import httpx
import pytest
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st

from dsv4_cluster.config.batches_config import BatchesConfig
from dsv4_cluster.config.router_config import RouterConfig
from dsv4_cluster.frontend.app import create_app
from tests.kit.codec import CONTEXT_LIMIT, load_codec
from tests.kit.http_server import serving
from tests.kit.scripted_service import ScriptedService

SETTINGS = settings(max_examples=60, deadline=None, suppress_health_check=[HealthCheck.too_slow])
VALUES = st.recursive(
    st.none() | st.booleans() | st.integers() | st.text(max_size=8) | st.sampled_from(["24h", "/v1/completions"]),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=4), inner, max_size=3),
    max_leaves=6,
)
FIELDS = st.sampled_from(["input_file_id", "endpoint", "completion_window", "metadata", "output_expires_after", "x"])
HEADER = st.sampled_from(
    [
        b'content-disposition: form-data; name="file"; filename="x"',
        b'content-disposition: form-data; name="purpose"',
        b"content-disposition: form-data",
        b"content-disposition: \xff",
        b"content-type: text/plain",
    ]
)
PIECES = st.lists(
    HEADER | st.sampled_from([b"--b", b"--b--", b"\r\n", b"\r\n\r\n", b"batch", b"\n"]) | st.binary(max_size=9)
)


@pytest.fixture(scope="module")
def http(tmp_path_factory):
    """A client of a server that keeps batches."""
    config = RouterConfig(batches=BatchesConfig(dir=str(tmp_path_factory.mktemp("batches")), max_files_per_tenant=20))
    app = create_app(ScriptedService(), load_codec(), config, max_model_len=CONTEXT_LIMIT)
    with serving(app) as url, httpx.Client(base_url=url, timeout=20) as client:
        yield client


@pytest.fixture(scope="module")
def file_id(http):
    """A stored file."""
    return http.post("/v1/files", files={"file": ("x", b"{}")}, data={"purpose": "batch"}).json()["id"]


def assert_answered(response):
    assert response.status_code == 200 or 400 <= response.status_code < 500, response.text
    if response.status_code != 200:
        assert sorted(response.json()["error"]) == ["code", "message", "param", "type"]


@SETTINGS
@given(fields=st.dictionaries(FIELDS, VALUES, max_size=3))
def test_any_fields_of_a_batch_are_answered(http, file_id, fields):
    good = {"input_file_id": file_id, "endpoint": "/v1/completions", "completion_window": "24h"}

    assert_answered(http.post("/v1/batches", content=json.dumps(good | fields).encode()))


@SETTINGS
@given(pieces=PIECES)
def test_any_form_is_answered(http, pieces):
    body = b"--b\r\n" + b"".join(pieces)

    assert_answered(http.post("/v1/files", content=body, headers={"content-type": "multipart/form-data; boundary=b"}))


@SETTINGS
@given(
    content=st.binary(max_size=50), kind=st.sampled_from(["", "multipart/form-data", "multipart/form-data; boundary="])
)
def test_arbitrary_bytes_are_400(http, content, kind):
    for path in ("/v1/files", "/v1/batches"):
        assert http.post(path, content=content, headers={"content-type": kind}).status_code == 400


@SETTINGS
@given(text=st.text(min_size=1, max_size=12), name=st.sampled_from(["limit", "after", "order", "purpose"]))
@example(text="/", name="limit")
def test_any_id_and_any_query_is_answered(http, text, name):
    quoted = "".join(f"%{byte:02x}" for byte in text.encode("utf-8", "replace"))

    for path in (
        f"/v1/files/{quoted}",
        f"/v1/batches/{quoted}",
        f"/v1/files?{name}={quoted}",
        f"/v1/batches?{name}={quoted}",
    ):
        assert_answered(http.get(path))
