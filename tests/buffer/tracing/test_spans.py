"""The ids and times of spans, and the variables of OpenTelemetry."""

from hypothesis import given
from hypothesis import strategies as st

from rollq.buffer.tracing.spans import NO_PARENT, trace_of
from rollq.buffer.tracing.variables import endpoint_of, other_protocol, redacted, shown_endpoint

RUN = ("sums", "0" * 32)
ENDPOINT = "OTEL_EXPORTER_OTLP_ENDPOINT"


def test_every_role_finds_the_same_trace_of_a_group_and_another_one_of_any_other() -> None:
    trace = trace_of(*RUN, "math", 7)
    assert trace == trace_of(*RUN, "math", 7)
    others = [trace_of(*RUN, "math", 8), trace_of(*RUN, "code", 7), trace_of("sums", "1" * 32, "math", 7)]
    assert len({trace.trace_id, *(other.trace_id for other in others)}) == 4
    ids = [trace.life_id, trace.attempt_id(1), trace.attempt_id(2), trace.id_of("put", 1), others[0].life_id]
    assert len(set(ids)) == 5
    assert all(0 < one < 1 << 64 for one in ids)
    assert 0 < trace.trace_id < 1 << 128


def test_spans_share_the_facts_of_their_group_and_belong_to_its_life() -> None:
    trace = trace_of(*RUN, "math", 7)
    life, part = trace.life(1000, 5000, {"rollq.step": 3}), trace.part("waiting", 3, 2000, 3000, {})
    assert (life.parent_id, part.parent_id, part.trace_id) == (NO_PARENT, life.span_id, life.trace_id)
    assert part.attributes == {"rollq.run": "sums", "rollq.task": "math", "rollq.group": 7}
    assert life.attributes == {**part.attributes, "rollq.step": 3}


def test_no_span_ends_before_it_starts() -> None:
    assert trace_of(*RUN, "math", 7).part("queued", 1, 2000, 1999, {}).end_ms == 2000


def test_only_a_named_collector_turns_traces_on() -> None:
    assert endpoint_of({}) == endpoint_of({ENDPOINT: ""}) == ("", "")
    assert endpoint_of({ENDPOINT: "http://a"}) == (ENDPOINT, "http://a")
    both = {ENDPOINT: "http://a", "OTEL_EXPORTER_OTLP_TRACES_ENDPOINT": "http://b"}
    assert endpoint_of(both) == ("OTEL_EXPORTER_OTLP_TRACES_ENDPOINT", "http://b")
    assert endpoint_of({**both, "OTEL_SDK_DISABLED": "True"}) == ("", "")
    assert endpoint_of({**both, "OTEL_TRACES_EXPORTER": "none"}) == ("", "")


def test_a_protocol_that_rollq_lacks_is_known() -> None:
    assert other_protocol({}) == other_protocol({"OTEL_EXPORTER_OTLP_PROTOCOL": "http/protobuf"}) == ("", "")
    assert other_protocol({"OTEL_EXPORTER_OTLP_PROTOCOL": "grpc"}) == ("OTEL_EXPORTER_OTLP_PROTOCOL", "grpc")


def test_an_endpoint_is_shown_without_its_secrets() -> None:
    assert shown_endpoint("https://me:pass@host:4318/v1/traces?key=abc") == "https://host:4318/v1/traces"
    assert shown_endpoint("http://[") == "the collector"


@given(st.text(st.characters(min_codepoint=48, max_codepoint=122, exclude_characters=":;<=>?@[\\]^_`"), min_size=3))
def test_nothing_that_is_said_has_a_secret(secret: str) -> None:
    secret = f"s3{secret}"
    for environ in (
        {ENDPOINT: f"http://user:{secret}@host"},
        {ENDPOINT: f"http://host/v1?key={secret}&a=b"},
        {"OTEL_EXPORTER_OTLP_HEADERS": f"api-key={secret}, other=x"},
        {"OTEL_EXPORTER_OTLP_TRACES_HEADERS": f"authorization=Bearer%20{secret}"},
        {"OTEL_EXPORTER_OTLP_HEADERS": secret},
    ):
        for said in (*environ.values(), f"cannot use Bearer {secret}", f"no {secret}!"):
            assert secret not in redacted(said, environ)
