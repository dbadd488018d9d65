"""Oracles: what a plan means, said again in as few words as possible and sharing no code.

The linker keeps at most one dependency per foreign lane and drops what a fence covers; the hazard
analysis here compares every pair of ops and keeps everything. If both give the same times, what
the linker dropped was implied.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

from policies.errors import PlanError
from policies.plan.op import Kind, Lane, Op
from policies.trace.span import Trace


def conflicts(earlier: Op, later: Op) -> bool:
    """Whether two ops may not run at once: a fence, a shared slot that one of them writes."""
    if Kind.FENCE in (earlier.kind, later.kind):
        return True
    written, read = set(earlier.writes), set(earlier.reads)
    return bool(written & set(later.reads) or (written | read) & set(later.writes))


def hazards(ops: Sequence[Op]) -> list[list[int]]:
    """For each op all earlier ops, of any lane, that it conflicts with. O(n^2)."""
    return [[j for j in range(i) if conflicts(ops[j], ops[i])] for i in range(len(ops))]


def max_plus(ops: Sequence[Op], seconds: Callable[[Op], float]) -> list[tuple[float, float]]:
    """Start and end of every op on independent lanes, from the full hazard analysis."""
    times: list[tuple[float, float]] = []
    for i, before in enumerate(hazards(ops)):
        same_lane = [j for j in range(i) if ops[j].lane is ops[i].lane]
        start_s = max((times[j][1] for j in [*before, *same_lane]), default=0.0)
        times.append((start_s, start_s + seconds(ops[i])))
    return times


def fluid(
    ops: Sequence[Op], seconds: Callable[[Op], float], duplex: float
) -> list[tuple[float, float]]:
    """The same with H2D and D2H slowed to ``duplex`` while both run: step from end to end."""
    left = [seconds(op) for op in ops]
    start: list[float | None] = [None] * len(ops)
    end: list[float | None] = [None] * len(ops)
    before = hazards(ops)
    now = 0.0
    while None in end:
        running: dict[Lane, int] = {}
        for lane in Lane:
            head = next((i for i, op in enumerate(ops) if op.lane is lane and end[i] is None), None)
            if head is not None and all(end[j] is not None for j in before[head]):
                running[lane] = head
                start[head] = now if start[head] is None else start[head]
        both = Lane.H2D in running and Lane.D2H in running
        rate = {lane: duplex if both and lane in (Lane.H2D, Lane.D2H) else 1.0 for lane in running}
        passed = {lane: left[i] / rate[lane] for lane, i in running.items()}
        step = min(passed.values())
        now += step
        for lane, i in running.items():
            left[i] -= step * rate[lane]
            if passed[lane] == step:
                end[i] = now
    return [(s, e) for s, e in zip(start, end, strict=True) if s is not None and e is not None]


def check_hazards(trace: Trace, ops: Sequence[Op], slack_s: float) -> None:
    """L2 without the linker: of two ops that conflict the later one starts after the other ends."""
    for i, before in enumerate(hazards(ops)):
        for j in before:
            if trace.spans[i].start_s < trace.spans[j].end_s - slack_s:
                raise PlanError(ops[i].key, f"L2 causality: starts before {ops[j].key} ends")


def check_monotone(before: Trace, after: Trace, slack_s: float) -> None:
    """L10: with some op shortened, no op ends later than it did."""
    for old, new in zip(before.spans, after.spans, strict=True):
        if new.end_s > old.end_s + slack_s:
            raise PlanError(new.key, f"L10 monotone: ends at {new.end_s}, before {old.end_s} s")
