"""L2: no op starts before what it depends on has ended, by an analysis that is not the linker's."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from policies.errors import PlanError
from policies.plan.op import Kind, Op, Slot, Tier
from policies.trace.check import check_trace
from policies.trace.span import Trace
from sim.engine import SimBackend
from tests.reference import check_hazards, hazards
from tests.strategies import TableCosts, plans

GPU = Slot("buffer", Tier.GPU)


@settings(deadline=None)
@given(plans(), st.sampled_from([1.0, 0.9, 0.5]))
def test_conflicting_ops_run_in_program_order(plan, duplex):
    ops, costs = plan
    backend = SimBackend(costs, duplex)
    trace = backend.run(ops)
    check_hazards(trace, ops, slack_s=1e-9 * trace.makespan_s)
    check_trace(trace, backend.linked, costs)


@settings(deadline=None)
@given(plans())
def test_linked_dependencies_are_hazards_on_other_lanes(plan):
    """The linker waits for nothing that the naive analysis does not ask for."""
    ops, costs = plan
    backend = SimBackend(costs)
    backend.run(ops)
    for item, before in zip(backend.linked, hazards(ops), strict=True):
        lanes = [ops[dep].lane for dep in item.deps]
        assert set(item.deps) <= set(before)
        assert item.op.lane not in lanes
        assert len(set(lanes)) == len(lanes)


@pytest.mark.parametrize(
    ("first", "second"),
    [
        (Op(Kind.LOAD_KV, 0, 0, writes=(GPU,)), Op(Kind.FORWARD, 0, 0, reads=(GPU,))),
        (Op(Kind.FORWARD, 0, 0, reads=(GPU,)), Op(Kind.LOAD_KV, 0, 0, writes=(GPU,))),
        (Op(Kind.FORWARD, 0, 0, writes=(GPU,)), Op(Kind.LOAD_KV, 0, 0, writes=(GPU,))),
        (Op(Kind.LOAD_KV, 0, 0), Op(Kind.FENCE, 0, 0)),
        (Op(Kind.FENCE, 0, 0), Op(Kind.LOAD_KV, 0, 0)),
    ],
    ids=["read after write", "write after read", "write after write", "to fence", "from fence"],
)
def test_too_early_is_named(first, second):
    costs = TableCosts({first.key: 1.0, second.key: 2.0}, {})
    backend = SimBackend(costs)
    one, two = backend.run([first, second]).spans
    assert two.start_s == 1.0
    early = Trace((one, two._replace(start_s=0.5)))
    with pytest.raises(PlanError, match=r"L2 causality: starts at 0\.5") as caught:
        check_trace(early, backend.linked, costs)
    assert caught.value.key == second.key
    with pytest.raises(PlanError, match="L2 causality"):
        check_hazards(early, [first, second], slack_s=0.0)
