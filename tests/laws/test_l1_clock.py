"""L1: spans of a lane never overlap."""

from __future__ import annotations

from itertools import pairwise

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from policies.errors import PlanError
from policies.plan.op import Kind, Op
from policies.trace.check import check_clock, check_trace
from policies.trace.span import Trace
from sim.engine import SimBackend
from tests.strategies import TableCosts, plans


@settings(deadline=None)
@given(plans(), st.sampled_from([1.0, 0.9, 0.5]))
def test_lanes_run_one_op_at_a_time(plan, duplex):
    ops, costs = plan
    trace = SimBackend(costs, duplex).run(ops)
    check_clock(trace, slack_s=1e-9 * trace.makespan_s)
    for lane in {span.lane for span in trace.spans}:
        mine = [span for span in trace.spans if span.lane is lane]
        for before, after in pairwise(mine):
            assert 0.0 <= before.start_s <= before.end_s <= after.start_s


def broken(change):
    ops = [Op(Kind.FORWARD, 0, 0, layer) for layer in range(2)]
    costs = TableCosts({op.key: 1.0 for op in ops}, {})
    backend = SimBackend(costs)
    first, second = backend.run(ops).spans
    check_trace(Trace((first, second)), backend.linked, costs)
    return Trace((first, change(second))), backend.linked, costs


def test_overlap_is_named():
    trace, linked, costs = broken(lambda span: span._replace(start_s=0.5))
    with pytest.raises(PlanError, match=r"L1 clock: starts at 0\.5") as caught:
        check_trace(trace, linked, costs)
    assert caught.value.key == "forward/g0/s0/l1/b0/p0"


def test_end_before_start_is_named():
    trace, linked, costs = broken(lambda span: span._replace(end_s=0.5))
    with pytest.raises(PlanError, match=r"L1 clock: ends at 0\.5"):
        check_trace(trace, linked, costs)


def test_nan_is_named():
    trace, linked, costs = broken(lambda span: span._replace(start_s=float("nan")))
    with pytest.raises(PlanError, match="L1 clock"):
        check_trace(trace, linked, costs)
