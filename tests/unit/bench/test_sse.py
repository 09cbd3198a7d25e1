from dsv4_cluster.bench.sse import SSEDecoder

STREAM = b': keep-alive\n\ndata: {"a": 1}\n\nevent: x\ndata: first\ndata: second\r\n\r\ndata:tight\n\ndata: [DONE]\n\n'
EVENTS = [b'{"a": 1}', b"first\nsecond", b"tight", b"[DONE]"]


def test_events_do_not_depend_on_how_the_stream_is_cut():
    for cut in range(len(STREAM) + 1):
        decoder = SSEDecoder()
        assert decoder.feed(STREAM[:cut]) + decoder.feed(STREAM[cut:]) == EVENTS, cut


def test_single_bytes_give_the_same_events():
    decoder = SSEDecoder()

    events = [event for index in range(len(STREAM)) for event in decoder.feed(STREAM[index : index + 1])]

    assert events == EVENTS


def test_an_event_without_its_blank_line_is_not_delivered():
    assert SSEDecoder().feed(b"data: half\n") == []
