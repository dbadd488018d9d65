"""SimPy, the max-plus recurrence of policies and the naive oracle give the same times."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from policies.plan.link import link
from policies.plan.op import Kind, Op, Slot, Tier
from policies.plan.predict import predict, predicted_makespan_s
from sim.engine import SimBackend
from tests.reference import fluid, hazards, max_plus
from tests.strategies import TableCosts, plans

GPU = Slot("buffer", Tier.GPU)


@settings(deadline=None)
@given(plans())
def test_simpy_and_predict_equal_the_oracle(plan):
    ops, costs = plan
    expected = max_plus(ops, costs.seconds)
    trace = SimBackend(costs).run(ops)
    for (start_s, end_s), span in zip(expected, trace.spans, strict=True):
        assert span.start_s == pytest.approx(start_s, rel=1e-9, abs=1e-12)
        assert span.end_s == pytest.approx(end_s, rel=1e-9, abs=1e-12)
    assert predict(link(ops), costs.seconds) == [(s.start_s, s.end_s) for s in trace.spans]
    assert predicted_makespan_s(link(ops), costs.seconds) == trace.makespan_s


@settings(deadline=None)
@given(plans(), st.sampled_from([0.5, 0.9, 0.97, 1.0]))
def test_simpy_equals_the_fluid_oracle_with_shared_links(plan, duplex):
    ops, costs = plan
    expected = fluid(ops, costs.seconds, duplex)
    spans = SimBackend(costs, duplex).run(ops).spans
    slack_s = 1e-9 * sum(costs.seconds(op) for op in ops)
    for (start_s, end_s), span in zip(expected, spans, strict=True):
        assert abs(span.start_s - start_s) <= slack_s
        assert abs(span.end_s - end_s) <= slack_s


@settings(deadline=None)
@given(plans())
def test_oracles_agree(plan):
    """Stepping through time and the recurrence are the same thing on independent lanes."""
    ops, costs = plan
    slack_s = 1e-9 * sum(costs.seconds(op) for op in ops)
    pairs = zip(fluid(ops, costs.seconds, 1.0), max_plus(ops, costs.seconds), strict=True)
    assert all(abs(a - b) <= slack_s for one, two in pairs for a, b in zip(one, two, strict=True))


def test_oracle_by_hand():
    """load 2 s | load 2 s; each forward of 3 s waits for its load and frees the buffer."""
    load = Op(Kind.LOAD_KV, 0, 0, 0, writes=(GPU,))
    forward = Op(Kind.FORWARD, 0, 0, 0, reads=(GPU,))
    ops = [load, forward, replace(load, layer=1), replace(forward, layer=1)]
    assert hazards(ops) == [[], [0], [0, 1], [0, 2]]
    costs = TableCosts({op.key: 2.0 if op.kind is Kind.LOAD_KV else 3.0 for op in ops}, {})
    expected = [(0.0, 2.0), (2.0, 5.0), (5.0, 7.0), (7.0, 10.0)]
    assert max_plus(ops, costs.seconds) == expected
    assert predict(link(ops), costs.seconds) == expected


def test_oracle_notices_a_linker_that_forgets_readers():
    """Without the write-after-read dependency the second load overtakes the first forward."""
    load = Op(Kind.LOAD_KV, 0, 0, 0, writes=(GPU,))
    forward = Op(Kind.FORWARD, 0, 0, 0, reads=(GPU,))
    ops = [load, forward, replace(load, layer=1)]
    costs = TableCosts(dict.fromkeys([op.key for op in ops], 1.0), {})
    broken = [item._replace(deps=()) if item.index == 2 else item for item in link(ops)]
    wrong = predict(broken, costs.seconds)
    assert wrong[2] == (1.0, 2.0)
    assert max_plus(ops, costs.seconds)[2] == (2.0, 3.0)


def test_predict_rejects_what_it_cannot_order():
    ops = [Op(Kind.FORWARD, 0, 0, 0), Op(Kind.FORWARD, 0, 0, 1)]
    linked = list(link(ops))
    with pytest.raises(ValueError, match=r"index 1, must be 0"):
        predict(linked[1:], lambda op: 1.0)
    with pytest.raises(ValueError, match=r"waits for op 1, must be in 0\.\.0"):
        predict([linked[0], linked[1]._replace(deps=(1,))], lambda op: 1.0)
