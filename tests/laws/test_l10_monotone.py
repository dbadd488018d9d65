"""L10: shortening any op never lengthens a fixed plan on independent lanes."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from policies.errors import PlanError
from policies.plan.op import Kind, Op, Slot, Tier
from sim.engine import SimBackend
from tests.reference import check_monotone
from tests.strategies import TableCosts, plans


@settings(deadline=None)
@given(plans(min_ops=1), st.data())
def test_shorter_op_delays_nobody(plan, data):
    ops, costs = plan
    op = data.draw(st.sampled_from(ops))
    share = data.draw(st.sampled_from([0.0, 0.5, 0.9]))
    shorter = costs.with_seconds(op.key, share * costs.seconds(op))
    before, after = SimBackend(costs).run(ops), SimBackend(shorter).run(ops)
    check_monotone(before, after, slack_s=1e-9 * before.makespan_s)
    assert after.makespan_s <= before.makespan_s * (1 + 1e-9)


def test_shared_link_breaks_it_and_is_named():
    """Why the law says independent lanes: a load that starts sooner may slow a critical store."""
    gate, kv = Slot("gate", Tier.GPU), Slot("kv", Tier.HOST)
    first = Op(Kind.FORWARD, 0, 0, 0, writes=(gate,))
    store = Op(Kind.STORE_KV, 0, 0, 0, writes=(kv,))
    load = Op(Kind.LOAD_KV, 0, 0, 1, reads=(gate,))
    attend = Op(Kind.CPU_ATTEND, 0, 0, 2, reads=(kv,))
    ops = [first, store, load, attend]
    slow = TableCosts(dict(zip([op.key for op in ops], (2.0, 2.0, 1.0, 9.0), strict=True)), {})
    fast = slow.with_seconds(first.key, 0.5)
    before, after = SimBackend(slow, 0.5).run(ops), SimBackend(fast, 0.5).run(ops)
    assert (before.makespan_s, after.makespan_s) == (11.0, 12.0)
    with pytest.raises(PlanError, match=r"L10 monotone: ends at 3\.0, before 2\.0") as caught:
        check_monotone(before, after, slack_s=0.0)
    assert caught.value.key == store.key
    check_monotone(SimBackend(slow).run(ops), SimBackend(fast).run(ops), slack_s=0.0)
