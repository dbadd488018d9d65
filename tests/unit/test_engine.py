"""The SimPy executor: order, contention by hand, bad input, stalls."""

from __future__ import annotations

import pytest

import sim.engine
from policies.plan.link import LinkedOp, link
from policies.plan.op import Kind, Lane, Op, Slot, Tier
from sim.engine import SimBackend, Stalled
from tests.strategies import TableCosts

GPU = Slot("buffer", Tier.GPU)
H2D = Op(Kind.LOAD_KV, 0, 0)
D2H = Op(Kind.STORE_KV, 0, 0)


def run(seconds, duplex=1.0):
    """Times of ops given as a dict of op to seconds."""
    costs = TableCosts({op.key: s for op, s in seconds.items()}, {})
    return [(span.start_s, span.end_s) for span in SimBackend(costs, duplex).run(seconds).spans]


def test_empty_plan():
    trace = SimBackend(TableCosts({}, {})).run([])
    assert trace.spans == ()
    assert trace.makespan_s == 0.0


def test_span_carries_what_the_costs_say():
    backend = SimBackend(TableCosts({H2D.key: 2.0}, {H2D.key: 7}))
    (span,) = backend.run([H2D]).spans
    assert span == ("load_kv/g0/s0/l0/b0/p0", Kind.LOAD_KV, Lane.H2D, 0.0, 2.0, 7, 14.0)
    assert [item.op for item in backend.linked] == [H2D]


def test_head_of_line_blocking():
    """The second load could run at once; it waits behind the first, which waits for a forward."""
    forward = Op(Kind.FORWARD, 0, 0, 0, reads=(GPU,))
    blocked = Op(Kind.LOAD_KV, 0, 0, 1, writes=(GPU,))
    behind = Op(Kind.LOAD_KV, 0, 0, 2)
    assert run({forward: 3.0, blocked: 1.0, behind: 1.0}) == [(0, 3), (3, 4), (4, 5)]


def test_lanes_overlap():
    ops = [Op(kind, 0, 0) for kind in (Kind.FORWARD, Kind.LOAD_KV, Kind.STORE_KV, Kind.READ_KV)]
    assert run(dict.fromkeys(ops, 2.0)) == [(0.0, 2.0)] * 4


def test_fence_holds_all_lanes():
    fence = Op(Kind.FENCE, 0, 0)
    later = Op(Kind.STORE_KV, 0, 1)
    assert run({H2D: 2.0, D2H: 5.0, fence: 0.5, later: 1.0}) == [
        (0, 2),
        (0, 5),
        (5, 5.5),
        (5.5, 6.5),
    ]


@pytest.mark.parametrize("duplex", [0.5, 0.8, 1.0])
def test_equal_copies_take_t_over_f(duplex):
    assert run({H2D: 3.0, D2H: 3.0}, duplex) == [pytest.approx((0.0, 3.0 / duplex))] * 2


def test_staggered_copies_by_hand():
    """f = 0.5. The 4 s load runs alone for 1 s; then the 2 s store takes 4 s, until 5, in which the
    load does 2 of its 3 s; the last second it runs alone, until 6."""
    gate = Slot("gate", Tier.GPU)
    forward = Op(Kind.FORWARD, 0, 0, writes=(gate,))
    store = Op(Kind.STORE_KV, 0, 0, reads=(gate,))
    assert run({forward: 1.0, store: 2.0, H2D: 4.0}, 0.5) == [(0, 1), (1, 5), (0, 6)]


def test_copies_of_different_length_by_hand():
    """f = 0.8. Both until the 4 s store ends at 5; the load has done 4 of 10 s, ends at 11."""
    assert run({H2D: 10.0, D2H: 4.0}, 0.8) == [pytest.approx((0, 11)), pytest.approx((0, 5))]


def test_back_to_back_stores_slow_a_load_all_along():
    """f = 0.5. Four 1 s stores take 2 s each; the 6 s load does 4 s meanwhile and ends at 10."""
    stores = [Op(Kind.STORE_KV, 0, 0, layer) for layer in range(4)]
    times = run({H2D: 6.0, **dict.fromkeys(stores, 1.0)}, 0.5)
    assert times == [(0, 10), (0, 2), (2, 4), (4, 6), (6, 8)]


def test_contention_is_of_opposite_directions_only():
    others = [Op(kind, 0, 0) for kind in (Kind.FORWARD, Kind.READ_KV, Kind.HOST_COPY)]
    second = Op(Kind.LOAD_WEIGHT, 0, 0)
    times = run({H2D: 2.0, second: 2.0, **dict.fromkeys(others, 4.0)}, 0.5)
    assert times == [(0, 2), (2, 4), (0, 4), (0, 4), (0, 4)]


@pytest.mark.parametrize("duplex", [0.0, -0.5, 1.1, float("nan")])
def test_duplex_out_of_range(duplex):
    with pytest.raises(ValueError, match=r"duplex: .* must be in \(0, 1\]"):
        SimBackend(TableCosts({}, {}), duplex)


@pytest.mark.parametrize("seconds", [-1.0, float("nan"), float("inf")])
def test_cost_that_is_no_time(seconds):
    with pytest.raises(ValueError, match=r"seconds: .* load_kv/g0/s0/l0/b0/p0, must be finite"):
        run({H2D: seconds})


def test_stall_lists_who_waits_for_what():
    load = LinkedOp(0, H2D, (1,))
    forward = LinkedOp(1, Op(Kind.FORWARD, 0, 0), (0,))
    done = LinkedOp(2, D2H, ())
    behind = LinkedOp(3, Op(Kind.LOAD_KV, 0, 0, 1), ())
    with pytest.raises(Stalled, match=r"stalled after 1 of 4 ops") as caught:
        SimBackend(TableCosts({}, {})).run_linked([load, forward, done, behind])
    assert caught.value.heads == {
        Lane.COMPUTE: (forward.op.key, (H2D.key,)),
        Lane.H2D: (H2D.key, (forward.op.key,)),
    }
    assert f"compute: {forward.op.key} waits for {H2D.key}" in str(caught.value)


def test_linked_plan_must_be_whole():
    linked = list(link([H2D, D2H]))
    backend = SimBackend(TableCosts({}, {}))
    with pytest.raises(ValueError, match="has index 1, must be 0"):
        backend.run_linked(linked[1:])
    with pytest.raises(ValueError, match=r"waits for op 9, must be in 0\.\.1"):
        backend.run_linked([linked[0], linked[1]._replace(deps=(9,))])


def test_progress_counts_ended_ops(monkeypatch):
    monkeypatch.setattr(sim.engine, "PROGRESS_OPS", 4)
    ops = [Op(Kind.FORWARD, 0, 0, layer) for layer in range(10)]
    seen = []
    SimBackend(TableCosts({}, {}), progress=seen.append).run(ops)
    assert seen == [4, 8, 10]


def test_backend_can_run_again():
    backend = SimBackend(TableCosts({H2D.key: 1.0}, {}))
    assert backend.run([H2D]) == backend.run([H2D])
