"""L6: bytes in spans equal bytes in the plan per lane and kind."""

from __future__ import annotations

from collections import Counter

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from policies.errors import PlanError
from policies.plan.op import Kind, Op
from policies.trace.check import check_bytes, check_trace
from policies.trace.span import Trace
from sim.engine import SimBackend
from tests.strategies import TableCosts, plans


@settings(deadline=None)
@given(plans(), st.sampled_from([1.0, 0.7]))
def test_no_byte_is_lost(plan, duplex):
    ops, costs = plan
    backend = SimBackend(costs, duplex)
    trace = backend.run(ops)
    moved, planned = Counter(), Counter()
    for span, op in zip(trace.spans, ops, strict=True):
        moved[span.lane, span.kind] += span.nbytes
        planned[op.lane, op.kind] += costs.nbytes(op)
    assert moved == planned
    check_bytes(trace, backend.linked, costs)


def test_lost_byte_is_named():
    ops = [Op(Kind.LOAD_KV, 0, 0, layer) for layer in range(2)]
    costs = TableCosts({}, {op.key: 10 for op in ops})
    backend = SimBackend(costs)
    first, second = backend.run(ops).spans
    with pytest.raises(PlanError, match="L6 bytes: moved 9, the plan says 10") as caught:
        check_trace(Trace((first, second._replace(nbytes=9))), backend.linked, costs)
    assert caught.value.key == second.key
