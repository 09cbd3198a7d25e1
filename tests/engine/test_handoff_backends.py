"""A sequence handed over through any transport ends as one that stayed, at every kind of block remainder."""

import pytest

from dsv4_cluster.clock import MonotonicClock
from dsv4_cluster.config.transfer_config import TransferConfig
from dsv4_cluster.transfer.factory import create_transport

LENGTHS = (1, 3, 127, 128, 129, 130, 255, 256, 257, 258)  # every n mod 4; n mod 128 in 0, 1, 127


@pytest.fixture(scope="module")
def local_answers():
    """Answers of sequences that stayed, by length; filled on first use."""
    return {}


@pytest.mark.parametrize("backend", ["local", "shm", "grpc"])
def test_handoff_through_each_backend_equals_local(
    backend, make_engine, make_request, run, step_until_chunk, local_answers
):
    transport = create_transport(TransferConfig(backend=backend), clock=MonotonicClock())
    try:
        for length in LENGTHS:
            request = make_request("x", length, max_tokens=6)  # three steps after a block of four is complete
            prefill, decode = make_engine(), make_engine(num_pages=9)
            prefill.add(request, hold_after_prefill=True)
            first = step_until_chunk(prefill)
            export = prefill.export_sequence("x")
            layout_id = prefill.layout_id
            ticket = transport.publish(
                request_id="x", epoch=0, layout_id=layout_id, num_tokens=export.num_tokens, segments=export.segments
            )

            segments = transport.fetch(ticket, request_id="x", epoch=0, layout_id=layout_id)
            transport.release(ticket)
            assert decode.import_sequence(request, first.token_ids[0], segments)
            answer = run(decode)["x"]

            if length not in local_answers:
                local_answers[length] = run(make_engine(), request)["x"]
            expected = local_answers[length]
            assert [*first.token_ids, *answer.token_ids] == expected.token_ids
            for one, other in zip(answer.logprobs, expected.logprobs[1:], strict=True):
                assert max(abs(one[t] - other[t]) for t in one.keys() & other.keys()) <= 1e-4
        assert transport.num_leases == 0
    finally:
        transport.close()
