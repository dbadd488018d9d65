"""The max-plus recurrence: when each op of a linked plan starts and ends on independent lanes.

An op starts when its lane is free and all that it depends on has ended:
``start[i] = max(end of the lane's previous op, end[d] for d in deps[i])``, ``end = start +
seconds``. This is the whole semantics of an executor as long as lanes do not slow each other down;
with a duplex factor below 1 the recurrence is a lower bound and only an executor knows the times.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable

from policies.plan.link import LinkedOp
from policies.plan.op import LANE_OF, Lane, Op


def predict(
    linked: Iterable[LinkedOp], seconds: Callable[[Op], float]
) -> list[tuple[float, float]]:
    """Start and end in seconds of every op, in program order.

    ``ValueError`` if the ops are not numbered 0, 1, 2, ... or an op waits for a later one: the
    recurrence needs every predecessor before its successors.
    """
    free = dict.fromkeys(Lane, 0.0)
    times: list[tuple[float, float]] = []
    for index, op, deps in linked:
        if index != len(times):
            raise ValueError(
                f"linked: op {op.key} has index {index}, must be {len(times)}: link a plan from "
                "its first op"
            )
        lane = LANE_OF[op.kind]
        start_s = free[lane]
        for dep in deps:
            if not 0 <= dep < index:
                raise ValueError(f"deps: op {op.key} waits for op {dep}, must be in 0..{index - 1}")
            if times[dep][1] > start_s:
                start_s = times[dep][1]
        end_s = start_s + seconds(op)
        free[lane] = end_s
        times.append((start_s, end_s))
    return times


def predicted_makespan_s(linked: Iterable[LinkedOp], seconds: Callable[[Op], float]) -> float:
    """End of the last op under ``predict``; 0 for an empty plan."""
    return max((end_s for _, end_s in predict(linked, seconds)), default=0.0)
