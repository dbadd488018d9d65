"""Metrics of traces written by hand."""

from __future__ import annotations

import pytest

from policies.plan.op import LANE_OF, Kind, Lane, Op
from policies.trace.metrics import lane_totals_s, lower_bound_s, metrics
from policies.trace.span import Span, Trace
from tests.strategies import TableCosts


def span(kind, block, step, start_s, end_s, layer=0, nbytes=0):
    key = Op(kind, block, step, layer).key
    return Span(key, kind, LANE_OF[kind], start_s, end_s, nbytes, 0.0)


# Prefill: forwards end at 3, the last store at 5; meanwhile the prefetch of step 1 runs until 6.
BLOCK_0 = (
    span(Kind.LOAD_WEIGHT, 0, 0, 1.0, 2.0, nbytes=100),
    span(Kind.FORWARD, 0, 0, 2.0, 3.0),
    span(Kind.STORE_KV, 0, 0, 3.0, 5.0, nbytes=30),
    span(Kind.LOAD_WEIGHT, 0, 1, 4.0, 6.0, nbytes=100),
    span(Kind.FORWARD, 0, 1, 6.0, 7.0),
    span(Kind.FORWARD, 0, 1, 7.0, 8.0, layer=1),
    span(Kind.FORWARD, 0, 2, 8.0, 11.0),
    span(Kind.FENCE, 0, 2, 11.0, 12.0),
)
BLOCK_1 = (
    span(Kind.LOAD_WEIGHT, 1, 0, 12.0, 14.0, nbytes=100),
    span(Kind.FORWARD, 1, 0, 14.0, 16.0),
    span(Kind.FORWARD, 1, 1, 16.0, 20.0),
)


def test_two_blocks():
    result = metrics(Trace(BLOCK_0 + BLOCK_1))
    assert result.makespan_s == 20.0
    assert result.ttft_s == (5.0, 4.0)  # block 0 counts from 0, block 1 from its first span
    assert result.prefill_s == 9.0
    assert result.step_s == ((3.0, 3.0), (4.0,))
    assert result.decode_s == 7.0 + 4.0  # with the fence of block 0
    assert result.prefill_s + result.decode_s == result.makespan_s
    assert result.busy == {
        Lane.COMPUTE: pytest.approx(13.0 / 20.0),
        Lane.H2D: pytest.approx(5.0 / 20.0),
        Lane.D2H: pytest.approx(2.0 / 20.0),
        Lane.DISK: 0.0,
        Lane.CPU: 0.0,
    }
    assert result.nbytes == {
        (Lane.H2D, Kind.LOAD_WEIGHT): 300,
        (Lane.COMPUTE, Kind.FORWARD): 0,
        (Lane.D2H, Kind.STORE_KV): 30,
        (Lane.COMPUTE, Kind.FENCE): 0,
    }


@pytest.mark.parametrize(
    "kind",
    [
        Kind.FORWARD,
        Kind.STORE_KV,
        Kind.WRITE_KV,
        Kind.HOST_COPY,
        Kind.STORE_ACT,
        Kind.WRITE_ACT,
        Kind.CPU_ATTEND,
        Kind.FENCE,
    ],
)
def test_prefill_waits_for(kind):
    trace = Trace((span(Kind.FORWARD, 0, 0, 0.0, 1.0), span(kind, 0, 0, 1.0, 4.0, layer=1)))
    assert metrics(trace).prefill_s == 4.0


@pytest.mark.parametrize("kind", [Kind.LOAD_WEIGHT, Kind.LOAD_KV, Kind.READ_KV, Kind.LOAD_ACT])
def test_prefill_does_not_wait_for(kind):
    trace = Trace((span(Kind.FORWARD, 0, 0, 0.0, 1.0), span(kind, 0, 0, 1.0, 4.0)))
    assert metrics(trace).prefill_s == 1.0


def test_prefill_only():
    result = metrics(Trace((span(Kind.FORWARD, 0, 0, 0.0, 1.0),)))
    assert (result.step_s, result.decode_s) == (((),), 0.0)


def test_block_starts_with_its_earliest_span_in_any_order():
    late = span(Kind.FORWARD, 1, 0, 9.0, 10.0)
    early = span(Kind.LOAD_KV, 1, 0, 2.0, 9.0)
    trace = Trace((span(Kind.FORWARD, 0, 0, 1.0, 2.0), late, early))
    assert metrics(trace).ttft_s == (2.0, 8.0)


def test_trace_without_time():
    assert metrics(Trace((span(Kind.FORWARD, 0, 0, 0.0, 0.0),))).busy[Lane.COMPUTE] == 0.0


@pytest.mark.parametrize(
    ("spans", "message"),
    [
        ((), "has no spans"),
        ((span(Kind.LOAD_KV, 0, 0, 0.0, 1.0),), r"block 0 has forwards of steps \[\]"),
        ((span(Kind.FORWARD, 3, 1, 0.0, 1.0),), r"block 3 has forwards of steps \[1\]"),
    ],
)
def test_incomplete_trace(spans, message):
    with pytest.raises(ValueError, match=message):
        metrics(Trace(spans))


def test_lower_bound_is_the_longest_lane():
    ops = [Op(Kind.LOAD_KV, 0, 0), Op(Kind.LOAD_WEIGHT, 0, 0), Op(Kind.FORWARD, 0, 0)]
    costs = TableCosts(dict(zip([op.key for op in ops], (1.0, 2.0, 2.5), strict=True)), {})
    assert lane_totals_s(costs, ops)[Lane.H2D] == 3.0
    assert lower_bound_s(costs, ops) == 3.0
    assert lower_bound_s(costs, []) == 0.0
