"""L3: one span per op, keys match."""

from __future__ import annotations

import pytest
from hypothesis import given, settings

from policies.errors import PlanError
from policies.plan.link import link
from policies.plan.op import Kind, Lane, Op
from policies.trace.check import check_keys, check_trace
from policies.trace.span import Trace
from sim.engine import SimBackend
from tests.strategies import TableCosts, plans


@settings(deadline=None)
@given(plans())
def test_every_op_has_its_span(plan):
    ops, costs = plan
    trace = SimBackend(costs).run(iter(ops))
    assert [(s.key, s.kind, s.lane) for s in trace.spans] == [(o.key, o.kind, o.lane) for o in ops]
    check_keys(trace, list(link(ops)))


@pytest.fixture
def run():
    ops = [Op(Kind.FORWARD, 0, 0, 0), Op(Kind.LOAD_KV, 0, 0, 0), Op(Kind.STORE_KV, 0, 0, 0)]
    costs = TableCosts({}, {})
    backend = SimBackend(costs)
    return backend.run(ops).spans, backend.linked, costs


def test_missing_span_is_named(run):
    spans, linked, costs = run
    with pytest.raises(PlanError, match=r"L3 .* no span") as caught:
        check_trace(Trace(spans[:-1]), linked, costs)
    assert caught.value.key == "store_kv/g0/s0/l0/b0/p0"


def test_surplus_span_is_named(run):
    spans, linked, costs = run
    surplus = spans[0]._replace(key="forward/g0/s9/l0/b0/p0")
    with pytest.raises(PlanError, match=r"L3 .* no op") as caught:
        check_trace(Trace((*spans, surplus)), linked, costs)
    assert caught.value.key == surplus.key


def test_wrong_order_is_named(run):
    spans, linked, costs = run
    with pytest.raises(PlanError, match=r"L3 .* found load_kv/g0/s0/l0/b0/p0 in its place"):
        check_trace(Trace((spans[1], spans[0], spans[2])), linked, costs)


def test_wrong_lane_is_named(run):
    spans, linked, costs = run
    moved = spans[1]._replace(lane=Lane.D2H)
    with pytest.raises(PlanError, match=r"L3 .* ran as load_kv on d2h"):
        check_trace(Trace((spans[0], moved, spans[2])), linked, costs)


def test_duplicate_key_is_named():
    ops = [Op(Kind.FORWARD, 0, 0, 0), Op(Kind.FORWARD, 0, 0, 0)]
    costs = TableCosts({}, {})
    backend = SimBackend(costs)
    with pytest.raises(PlanError, match=r"L3 .* two ops have this key"):
        check_trace(backend.run(ops), backend.linked, costs)
