"""The laws that every trace obeys, whoever made it: L1, L2, L3, L6 and L7 of the design.

A checker compares a trace with the linked plan that it claims to have run and raises ``PlanError``
at the first op that breaks a law. Times are compared to ``TOLERANCE`` of the makespan, because sums
of floats depend on their order; a trace off by more is wrong, not imprecise.
"""

from __future__ import annotations

from collections.abc import Sequence

from policies.cost.protocol import Costs
from policies.errors import PlanError
from policies.plan.link import LinkedOp
from policies.plan.op import LANE_OF, Lane
from policies.trace.metrics import lower_bound_s
from policies.trace.span import Trace

TOLERANCE = 1e-9


def check_trace(trace: Trace, linked: Sequence[LinkedOp], costs: Costs) -> None:
    """Raise ``PlanError(key, "L1 clock: ...")`` and the like for the first law broken.

    ``costs`` are those that were charged. L7 takes the longest lane from them and the sum from the
    spans: copies that slow each other down last longer than their costs say, and at every moment
    some op still runs.
    """
    slack_s = TOLERANCE * trace.makespan_s
    check_keys(trace, linked)
    check_clock(trace, slack_s)
    check_causality(trace, linked, slack_s)
    check_bytes(trace, linked, costs)
    check_makespan(trace, linked, costs, slack_s)


def check_keys(trace: Trace, linked: Sequence[LinkedOp]) -> None:
    """L3: one span per op, in program order, of its key, kind and lane; keys are unique."""
    seen: set[str] = set()
    for span, item in zip(trace.spans, linked, strict=False):
        op = item.op
        if span.key != op.key:
            raise PlanError(op.key, f"L3 one span per op: found {span.key} in its place")
        if span.kind is not op.kind or span.lane is not LANE_OF[op.kind]:
            raise PlanError(op.key, f"L3 one span per op: ran as {span.kind} on {span.lane}")
        if span.key in seen:
            raise PlanError(op.key, "L3 one span per op: two ops have this key")
        seen.add(span.key)
    n_spans, n_ops = len(trace.spans), len(linked)
    if n_spans < n_ops:
        raise PlanError(linked[n_spans].op.key, "L3 one span per op: it has no span")
    if n_spans > n_ops:
        raise PlanError(trace.spans[n_ops].key, "L3 one span per op: no op of the plan")


def check_clock(trace: Trace, slack_s: float) -> None:
    """L1: no span starts before 0, ends before it starts or overlaps its lane's previous one."""
    free_s = dict.fromkeys(Lane, 0.0)
    for span in trace.spans:
        if not span.start_s >= free_s[span.lane] - slack_s:
            raise PlanError(
                span.key,
                f"L1 clock: starts at {span.start_s} s, {span.lane} is free at "
                f"{free_s[span.lane]} s",
            )
        if not span.end_s >= span.start_s:
            raise PlanError(span.key, f"L1 clock: ends at {span.end_s}, starts at {span.start_s} s")
        free_s[span.lane] = span.end_s


def check_causality(trace: Trace, linked: Sequence[LinkedOp], slack_s: float) -> None:
    """L2: every op starts after all that it depends on has ended."""
    for span, item in zip(trace.spans, linked, strict=True):
        for dep in item.deps:
            if not span.start_s >= trace.spans[dep].end_s - slack_s:
                raise PlanError(
                    span.key,
                    f"L2 causality: starts at {span.start_s} s, {trace.spans[dep].key} ends at "
                    f"{trace.spans[dep].end_s} s",
                )


def check_bytes(trace: Trace, linked: Sequence[LinkedOp], costs: Costs) -> None:
    """L6: spans carry the plan's bytes, op by op, so also per lane and kind."""
    for span, item in zip(trace.spans, linked, strict=True):
        planned = costs.nbytes(item.op)
        if span.nbytes != planned:
            raise PlanError(span.key, f"L6 bytes: moved {span.nbytes}, the plan says {planned}")


def check_makespan(trace: Trace, linked: Sequence[LinkedOp], costs: Costs, slack_s: float) -> None:
    """L7: longest lane <= makespan <= sum of durations."""
    if not trace.spans:
        return
    last = max(trace.spans, key=lambda span: span.end_s)
    longest_s = lower_bound_s(costs, (item.op for item in linked))
    total_s = sum(span.end_s - span.start_s for span in trace.spans)
    if not last.end_s >= longest_s - slack_s:
        raise PlanError(
            last.key, f"L7 makespan: {last.end_s} s is below the longest lane, {longest_s} s"
        )
    if not last.end_s <= total_s + slack_s:
        raise PlanError(
            last.key, f"L7 makespan: {last.end_s} s is above the sum of durations, {total_s} s"
        )
