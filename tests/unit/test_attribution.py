"""Critical-path attribution by hand and on random plans."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from policies.plan.link import link
from policies.plan.op import Kind, Op, Slot, Tier
from policies.trace.attribution import CATEGORY_OF, Category, attribute
from policies.trace.metrics import metrics
from sim.engine import SimBackend
from tests.strategies import TableCosts, plans

WEIGHTS = [Slot(f"w{i}", Tier.GPU) for i in range(2)]


def simulate(seconds, duplex=1.0):
    costs = TableCosts({op.key: s for op, s in seconds.items()}, {})
    trace = SimBackend(costs, duplex).run(seconds)
    return trace, [item.deps for item in link(seconds)]


def layers(load_s, forward_s, n_layers=3):
    plan = {}
    for layer in range(n_layers):
        slot = (WEIGHTS[layer % 2],)
        plan[Op(Kind.LOAD_WEIGHT, 0, 0, layer, writes=slot)] = load_s
        plan[Op(Kind.FORWARD, 0, 0, layer, reads=slot)] = forward_s
    return plan


def test_transfer_bound_plan_waits_on_weights():
    """Loads 2 s back to back, 6 s, then the last forward of 1 s; the other forwards hide."""
    trace, deps = simulate(layers(2.0, 1.0))
    result = attribute(trace.spans, deps)
    assert result.bottleneck is Category.H2D_WEIGHTS
    assert result.shares[Category.H2D_WEIGHTS] == pytest.approx(6 / 7)
    assert result.shares[Category.COMPUTE] == pytest.approx(1 / 7)
    assert result.path == (0, 2, 4, 5)


def test_compute_bound_plan_has_busy_link_without_a_share():
    """The first load, then forwards back to back; the link's other loads delay nobody."""
    trace, deps = simulate(layers(2.0, 3.0))
    result = attribute(trace.spans, deps)
    assert result.bottleneck is Category.COMPUTE
    assert result.shares[Category.COMPUTE] == pytest.approx(9 / 11)
    assert result.shares[Category.H2D_WEIGHTS] == pytest.approx(2 / 11)
    assert result.path == (0, 1, 3, 5)
    assert metrics(trace).busy[trace.spans[0].lane] == pytest.approx(6 / 11)


def test_every_kind_is_charged_to_its_category():
    """A chain through one slot: each kind lasts as long as its number and waits for the last."""
    slot = (Slot("chain", Tier.HOST),)
    plan = {Op(kind, 0, 0, writes=slot): float(i + 1) for i, kind in enumerate(Kind)}
    trace, deps = simulate(plan)
    result = attribute(trace.spans, deps)
    total = sum(plan.values())
    assert trace.makespan_s == total
    for category in Category:
        mine = sum(s for op, s in plan.items() if CATEGORY_OF[op.kind] is category)
        assert result.shares[category] == pytest.approx(mine / total)


def test_gap_is_idle():
    trace, deps = simulate({Op(Kind.FORWARD, 0, 0, 0): 1.0, Op(Kind.FORWARD, 0, 0, 1): 1.0})
    first, second = trace.spans
    late = (first._replace(start_s=0.5, end_s=1.5), second._replace(start_s=3.0, end_s=4.0))
    result = attribute(late, deps)
    assert result.shares[Category.IDLE] == pytest.approx(2.0 / 4.0)
    assert result.shares[Category.COMPUTE] == pytest.approx(2.0 / 4.0)


def test_overlap_by_a_timer_error_is_charged_once():
    trace, deps = simulate({Op(Kind.FORWARD, 0, 0, 0): 1.0, Op(Kind.FORWARD, 0, 0, 1): 1.0})
    first, second = trace.spans
    result = attribute((first, second._replace(start_s=0.9)), deps)
    assert sum(result.shares.values()) == pytest.approx(1.0)
    assert result.shares[Category.COMPUTE] == pytest.approx(1.0)


@settings(deadline=None)
@given(plans(min_ops=1), st.sampled_from([1.0, 0.8]))
def test_shares_sum_to_one_and_nothing_is_idle(plan, duplex):
    ops, costs = plan
    backend = SimBackend(costs, duplex)
    trace = backend.run(ops)
    deps = [item.deps for item in backend.linked]
    if trace.makespan_s == 0.0:
        with pytest.raises(ValueError, match="no time to attribute"):
            attribute(trace.spans, deps)
        return
    result = attribute(trace.spans, deps)
    assert sum(result.shares.values()) == pytest.approx(1.0, rel=1e-9)
    assert result.shares[Category.IDLE] == pytest.approx(0.0, abs=1e-12)
    assert result.shares[result.bottleneck] == max(result.shares.values())
    on_path = sum(trace.spans[i].end_s - trace.spans[i].start_s for i in result.path)
    assert on_path == pytest.approx(trace.makespan_s, rel=1e-9)


def test_bad_input():
    trace, deps = simulate({Op(Kind.FORWARD, 0, 0, 0): 1.0, Op(Kind.LOAD_KV, 0, 0, 1): 1.0})
    with pytest.raises(ValueError, match="deps: 1 entries for 2 spans"):
        attribute(trace.spans, deps[:1])
    with pytest.raises(ValueError, match="waits for op 1, must be before it"):
        attribute(trace.spans, [(1,), ()])
    with pytest.raises(ValueError, match=r"end at 0\.0 s"):
        attribute((), ())
