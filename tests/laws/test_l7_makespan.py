"""L7: longest lane <= makespan <= sum of durations."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from policies.errors import PlanError
from policies.plan.op import Kind, Op
from policies.trace.check import check_makespan, check_trace
from policies.trace.metrics import lower_bound_s
from policies.trace.span import Trace
from sim.engine import SimBackend
from tests.strategies import TableCosts, plans


@settings(deadline=None)
@given(plans())
def test_makespan_is_bounded(plan):
    ops, costs = plan
    makespan_s = SimBackend(costs).run(ops).makespan_s
    total_s = sum(costs.seconds(op) for op in ops)
    assert lower_bound_s(costs, ops) <= makespan_s * (1 + 1e-9)
    assert makespan_s <= total_s * (1 + 1e-9)


@settings(deadline=None)
@given(plans(), st.sampled_from([0.9, 0.5]))
def test_contention_stays_between_the_bounds(plan, duplex):
    """Slowed copies last at most 1/duplex as long, so the sum bounds the makespan with them."""
    ops, costs = plan
    backend = SimBackend(costs, duplex)
    trace = backend.run(ops)
    check_makespan(trace, backend.linked, costs, slack_s=1e-9 * trace.makespan_s)
    assert trace.makespan_s <= sum(costs.seconds(op) for op in ops) / duplex * (1 + 1e-9)


@pytest.fixture
def run():
    ops = [Op(Kind.FORWARD, 0, 0, 0), Op(Kind.FORWARD, 0, 0, 1)]
    costs = TableCosts({op.key: 1.0 for op in ops}, {})
    backend = SimBackend(costs)
    return backend.run(ops).spans, backend.linked, costs


def test_idle_time_with_nothing_running_is_named(run):
    (first, second), linked, costs = run
    late = Trace((first, second._replace(start_s=5.0, end_s=6.0)))
    with pytest.raises(PlanError, match=r"L7 makespan: 6.0 s is above .* 2.0 s") as caught:
        check_trace(late, linked, costs)
    assert caught.value.key == second.key


def test_faster_than_its_longest_lane_is_named(run):
    (first, second), linked, costs = run
    fast = Trace((first, second._replace(end_s=1.5)))
    with pytest.raises(PlanError, match=r"L7 makespan: 1.5 s is below the longest lane, 2.0 s"):
        check_trace(fast, linked, costs)
