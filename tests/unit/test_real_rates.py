"""Rates that a run's record states beside its times."""

from __future__ import annotations

import pytest

from policies.plan.op import Kind, Lane
from policies.trace.span import Span, Trace
from real.run import h2d_rates


def span(kind: Kind, lane: Lane, step: int, seconds: float, nbytes: int, block: int = 0) -> Span:
    return Span(
        f"{kind.value}/g{block}/s{step}/l0/b0/p0", kind, lane, 1.0, 1.0 + seconds, nbytes, 0
    )


def test_a_slow_phase_of_the_link_shows_in_its_step() -> None:
    load, forward = (Kind.LOAD_KV, Lane.H2D), (Kind.FORWARD, Lane.COMPUTE)
    trace = Trace(
        (
            span(*forward, 0, 5.0, 0),
            span(*load, 1, 1.0, 50),
            span(*load, 1, 3.0, 150),
            span(*forward, 1, 9.0, 0),
            span(*load, 2, 2.0, 80),
            span(Kind.STORE_KV, Lane.D2H, 2, 1.0, 999),
            span(*load, 0, 2.0, 20, block=1),
        )
    )
    assert h2d_rates(trace) == [[None, pytest.approx(50.0), pytest.approx(40.0)], [10.0]]
