"""A client made of the OpenAPI document gets what the document says, whatever it sends: schemathesis over loopback."""

import json
import time
from collections import Counter
from collections.abc import Callable

import pytest
import schemathesis
from hypothesis import HealthCheck, Phase, given, seed, settings
from schemathesis.checks import not_a_server_error
from schemathesis.generation import GenerationMode
from schemathesis.specs.openapi.checks import (
    content_type_conformance,
    response_schema_conformance,
    status_code_conformance,
)

from tests.kit.clock import wait_until
from tests.kit.scripted_router import router_process

CHECKS = (not_a_server_error, status_code_conformance, content_type_conformance, response_schema_conformance)
TIMEOUT_S = 20.0  # an answer that takes longer is a hang
WARM_UP_S, LIMIT_S = 60.0, 600.0  # CPU time of client and server
USER = [{"role": "user", "content": "hi"}]
PROMPTS = {
    "/v1/chat/completions": {"messages": USER},
    "/v1/completions": {"prompt": "hi"},
    "/v1/messages": {"messages": USER},
    "/v1/responses": {"input": "hi"},
}
GROWTH_BYTES = 16 << 20  # of the server's memory between the warm-up and the end


def modes_of(operation) -> tuple[GenerationMode, ...]:
    """What may be sent; any text is a valid path."""
    is_open = operation.body or operation.query
    return (GenerationMode.POSITIVE, GenerationMode.NEGATIVE) if is_open else (GenerationMode.POSITIVE,)


def run_round(operations, number: int, *, num_examples: int, has_time: Callable[[], bool]) -> Counter[int]:
    """So many requests to every operation in every mode, unless the time is over. Returns: answers by status."""
    statuses: Counter[int] = Counter()
    options = settings(
        max_examples=num_examples,
        deadline=None,
        database=None,
        phases=(Phase.generate,),
        suppress_health_check=list(HealthCheck),
    )
    for operation in operations:
        for mode in modes_of(operation):

            @options
            @seed(number)
            @given(case=operation.as_strategy(generation_mode=mode))
            def ask(case):
                if has_time():
                    response = case.call(timeout=TIMEOUT_S)
                    statuses[response.status_code] += 1
                    case.validate_response(response, checks=CHECKS)

            ask()
    return statuses


def test_every_operation_answers_as_described(tmp_path):
    with router_process(tmp_path) as router:
        schema = schemathesis.openapi.from_url(f"{router.url}/openapi.json")
        every = [result.ok() for result in schema.get_all_operations()]
        operations = [one for one in every if not one.path.startswith("/anthropic")]  # the same functions again

        statuses = run_round(operations, 0, num_examples=3, has_time=lambda: True)

    assert statuses[200] > 10 and statuses[400] > 10, statuses


def test_whole_and_streamed_answers_are_as_described(base_url):
    schema = schemathesis.openapi.from_url(f"{base_url}/openapi.json")

    for path, prompt in PROMPTS.items():
        for is_stream in (False, True):
            body = {"model": "deepseek-v4-flash", "stream": is_stream, **prompt}
            case = schema[path]["POST"].Case(body=body, media_type="application/json")
            response = case.call_and_validate(checks=CHECKS, timeout=TIMEOUT_S)
            assert response.status_code == 200
            assert response.headers["content-type"][0].startswith("text/event-stream") == is_stream


def test_files_and_batches_are_answered_as_described(tmp_path):
    line = {"custom_id": "a", "method": "POST", "url": "/v1/completions", "body": {"model": "an-alias", "prompt": "hi"}}
    failing = {**line, "custom_id": "b", "body": {}}
    contents = "\n".join(map(json.dumps, (line, failing))).encode()
    with router_process(tmp_path) as router:
        schema = schemathesis.openapi.from_url(f"{router.url}/openapi.json")

        def ask(method: str, path: str, status: int = 200, **parts):
            media = "multipart/form-data" if path == "/v1/files" and method == "POST" else "application/json"
            case = schema[path][method].Case(media_type=media if "body" in parts else None, **parts)
            response = case.call_and_validate(checks=CHECKS, timeout=TIMEOUT_S)
            assert response.status_code == status, response.text
            return response

        def batch_object():
            return ask("GET", "/v1/batches/{batch_id}", path_parameters={"batch_id": batch_id}).json()

        file_id = ask("POST", "/v1/files", body={"file": contents, "purpose": "batch"}).json()["id"]
        fields = {"endpoint": "/v1/completions", "completion_window": "24h", "metadata": {"a": "b"}}
        batch_id = ask("POST", "/v1/batches", body={"input_file_id": file_id, **fields}).json()["id"]
        wait_until(lambda: batch_object()["status"] == "completed", limit_s=20)
        done = batch_object()
        broken_id = ask("POST", "/v1/files", body={"file": b"{", "purpose": "batch"}).json()["id"]
        batch_id = ask("POST", "/v1/batches", body={"input_file_id": broken_id, **fields}).json()["id"]
        wait_until(lambda: batch_object()["status"] == "failed", limit_s=20)
        pages = [ask("GET", path, query={"limit": 1}).json() for path in ("/v1/files", "/v1/batches")]
        for name in (file_id, done["output_file_id"], done["error_file_id"]):
            for path in ("/v1/files/{file_id}", "/v1/files/{file_id}/content"):
                ask("GET", path, path_parameters={"file_id": name})
        ask("POST", "/v1/batches/{batch_id}/cancel", 409, path_parameters={"batch_id": batch_id})
        ask("DELETE", "/v1/files/{file_id}", path_parameters={"file_id": file_id})
        ask("GET", "/v1/files/{file_id}", 404, path_parameters={"file_id": file_id})

    assert done["request_counts"] == {"total": 2, "completed": 1, "failed": 1}
    assert done["usage"]["output_tokens"] == 1 and done["model"] == "an-alias"
    assert all(len(page["data"]) == 1 and page["has_more"] for page in pages)


@pytest.mark.slow
@pytest.mark.timeout(7200)
def test_ten_minutes_of_requests_leave_the_server_as_it_was(tmp_path, record_property):
    with router_process(tmp_path) as router:
        started_s = time.process_time()
        schema = schemathesis.openapi.from_url(f"{router.url}/openapi.json")
        operations = [result.ok() for result in schema.get_all_operations()]

        def used_s() -> float:
            return time.process_time() - started_s + router.cpu_s()

        statuses: Counter[int] = Counter()
        number, after_warm_up = 0, 0
        while used_s() < LIMIT_S:
            statuses += run_round(operations, number, num_examples=20, has_time=lambda: used_s() < LIMIT_S)
            number += 1
            if not after_warm_up and used_s() >= min(WARM_UP_S, LIMIT_S / 2):
                after_warm_up = router.resident_bytes()
        grown = router.resident_bytes() - after_warm_up

    record_property("answers", dict(statuses))
    record_property("grown_bytes", grown)
    assert grown < GROWTH_BYTES, f"{grown} bytes more than after the warm-up; {statuses}"
