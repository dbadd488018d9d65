"""Trace files: Chrome JSON for Perfetto and the JSON lines that are read back."""

from __future__ import annotations

import json

import pytest
from hypothesis import given, settings

from policies.plan.op import Kind, Lane
from policies.trace.chrome import chrome_events, write_chrome
from policies.trace.jsonl import dump_span, parse_span, read_jsonl, write_jsonl
from policies.trace.span import Span, Trace
from sim.engine import SimBackend
from tests.strategies import plans

SPANS = (
    Span("load_kv/g0/s1/l2/b3/p4", Kind.LOAD_KV, Lane.H2D, 0.1, 0.30000000000000004, 5, 0.0),
    Span("forward/g0/s1/l2/b3/p0", Kind.FORWARD, Lane.COMPUTE, 0.3, 1.5, 0, 2.5e12),
)


def test_chrome_file_by_hand(tmp_path):
    path = tmp_path / "trace.chrome.json"
    write_chrome(SPANS, path)
    events = json.loads(path.read_text())["traceEvents"]
    tracks = {e["tid"]: e["args"]["name"] for e in events if e["name"] == "thread_name"}
    assert tracks == dict(enumerate(["compute", "h2d", "d2h", "disk", "cpu"]))
    load, forward = [e for e in events if e["ph"] == "X"]
    assert (load["name"], load["cat"], tracks[load["tid"]]) == (
        "load_kv s1 l2 b3",
        "load_kv",
        "h2d",
    )
    assert load["ts"] == pytest.approx(100_000.0)  # microseconds
    assert load["dur"] == pytest.approx(200_000.0)
    assert load["args"] == {"key": "load_kv/g0/s1/l2/b3/p4", "bytes": 5, "flops": 0.0}
    assert forward["args"] == {"key": "forward/g0/s1/l2/b3/p0", "bytes": 0, "flops": 2.5e12}


def test_keep_filters_spans_and_no_track(tmp_path):
    path = tmp_path / "trace.chrome.json"
    write_chrome(SPANS, path, keep=lambda span: span.kind is Kind.FORWARD)
    events = json.loads(path.read_text())["traceEvents"]
    assert [e["cat"] for e in events if e["ph"] == "X"] == ["forward"]
    assert sum(e["name"] == "thread_name" for e in events) == len(Lane)
    lines = tmp_path / "trace.jsonl"
    write_jsonl(SPANS, lines, keep=lambda span: span.kind is Kind.FORWARD)
    assert read_jsonl(lines) == Trace(SPANS[1:])


def test_no_spans_is_still_a_document(tmp_path):
    path = tmp_path / "trace.chrome.json"
    write_chrome((), path)
    assert len(json.loads(path.read_text())["traceEvents"]) == 1 + 2 * len(Lane)


def test_not_a_number_is_refused(tmp_path):
    bad = SPANS[0]._replace(end_s=float("nan"))
    with pytest.raises(ValueError, match="JSON compliant"):
        write_chrome([bad], tmp_path / "trace.chrome.json")
    with pytest.raises(ValueError, match="JSON compliant"):
        dump_span(bad)


@settings(deadline=None)
@given(plans())
def test_round_trip_and_stable_order(plan):
    ops, costs = plan
    spans = SimBackend(costs, 0.9).run(ops).spans
    assert tuple(parse_span(dump_span(span)) for span in spans) == spans
    bars = [event for event in chrome_events(spans) if event["ph"] == "X"]
    assert [bar["args"]["key"] for bar in bars] == [span.key for span in spans]
    for bar, span in zip(bars, spans, strict=True):
        assert bar["ts"] == pytest.approx(span.start_s * 1e6)
        assert bar["ts"] + bar["dur"] == pytest.approx(span.end_s * 1e6)


def test_file_read_back_is_equal(tmp_path):
    path = tmp_path / "trace.jsonl"
    write_jsonl(SPANS, path)
    assert path.read_text().count("\n") == 2
    assert json.loads(path.read_text().splitlines()[0]) == {
        "key": "load_kv/g0/s1/l2/b3/p4",
        "kind": "load_kv",
        "lane": "h2d",
        "start_s": 0.1,
        "end_s": 0.30000000000000004,
        "nbytes": 5,
        "flops": 0.0,
    }
    assert read_jsonl(path) == Trace(SPANS)


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ("{", "trace.jsonl:2: "),
        ("[1]", "trace.jsonl:2: span: has fields list, must have key, kind"),
        ('{"key":"a"}', "trace.jsonl:2: span: has fields key, must have key, kind"),
        (dump_span(SPANS[0]).replace('"h2d"', '"pcie"'), "trace.jsonl:2: 'pcie' is not a valid"),
        (dump_span(SPANS[0]).replace("0.1", '"soon"'), "trace.jsonl:2: span.start_s: 'soon'"),
    ],
)
def test_bad_line_is_named(tmp_path, line, message):
    path = tmp_path / "trace.jsonl"
    path.write_text(f"{dump_span(SPANS[0])}\n{line}\n")
    with pytest.raises(ValueError, match=message.replace("[", r"\[")):
        read_jsonl(path)
