"""Critical-path attribution: which share of the makespan waits on which resource.

The walk starts at the span that ends last and jumps, op by op, to the predecessor that held it
back: the lane's previous op or a dependency, whichever ended last. Each op on this path is charged
to a category. What readers get wrong: a lane may be busy all the time and have a share of 0, if
nothing ever waited for it; busy shares and these shares answer different questions.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from enum import StrEnum

from policies.plan.op import Kind, Lane
from policies.trace.span import Span


class Category(StrEnum):
    """What a piece of the critical path waits on."""

    H2D_WEIGHTS = "h2d_weights"
    H2D_KV = "h2d_kv"  # KV and activations
    D2H = "d2h"
    DISK = "disk"
    COMPUTE = "compute"
    HOST = "host"  # the CPU lane
    SYNC = "sync"  # fences
    IDLE = "idle"  # no op at all; 0 unless an executor adds delays of its own


CATEGORY_OF: dict[Kind, Category] = {
    Kind.READ_WEIGHT: Category.DISK,
    Kind.LOAD_WEIGHT: Category.H2D_WEIGHTS,
    Kind.READ_KV: Category.DISK,
    Kind.WRITE_KV: Category.DISK,
    Kind.LOAD_KV: Category.H2D_KV,
    Kind.STORE_KV: Category.D2H,
    Kind.READ_ACT: Category.DISK,
    Kind.WRITE_ACT: Category.DISK,
    Kind.LOAD_ACT: Category.H2D_KV,
    Kind.STORE_ACT: Category.D2H,
    Kind.HOST_COPY: Category.HOST,
    Kind.FORWARD: Category.COMPUTE,
    Kind.CPU_ATTEND: Category.HOST,
    Kind.FENCE: Category.SYNC,
}


@dataclass(frozen=True, slots=True)
class Attribution:
    """Shares of the makespan, all categories, summing to 1; ``bottleneck`` has the largest.

    ``path`` holds the positions of the ops on the critical path, in program order.
    """

    shares: dict[Category, float]
    bottleneck: Category
    path: tuple[int, ...]


def attribute(spans: Sequence[Span], deps: Sequence[tuple[int, ...]]) -> Attribution:
    """Attribution of spans in program order; ``deps[i]`` are the positions that op i waited for.

    Measured spans may overlap a predecessor by a timer's error: an op is charged only up to the
    start of the op it held back. Of predecessors that end together the lane's own comes first.
    ``ValueError`` if there is nothing to attribute or an op waits for a later one.
    """
    if len(spans) != len(deps):
        raise ValueError(f"deps: {len(deps)} entries for {len(spans)} spans, must be as many")
    makespan_s = max((span.end_s for span in spans), default=0.0)
    if makespan_s <= 0.0:
        raise ValueError(f"spans: end at {makespan_s} s, there is no time to attribute")
    before = _lane_predecessors(spans)
    charged_s = dict.fromkeys(Category, 0.0)
    path: list[int] = []
    cursor_s = makespan_s  # all time after it is charged
    current = max(range(len(spans)), key=lambda i: spans[i].end_s)
    while True:
        span = spans[current]
        path.append(current)
        if span.end_s < cursor_s:
            charged_s[Category.IDLE] += cursor_s - span.end_s
            cursor_s = span.end_s
        if span.start_s < cursor_s:
            charged_s[CATEGORY_OF[span.kind]] += cursor_s - span.start_s
            cursor_s = span.start_s
        candidates = (before[current], *deps[current]) if before[current] >= 0 else deps[current]
        if not candidates:
            break
        binding = max(candidates, key=lambda i: spans[i].end_s)
        if not 0 <= binding < current:
            raise ValueError(f"deps: op {span.key} waits for op {binding}, must be before it")
        current = binding
    charged_s[Category.IDLE] += cursor_s
    shares = {category: s / makespan_s for category, s in charged_s.items()}
    return Attribution(shares, max(shares, key=lambda c: shares[c]), tuple(reversed(path)))


def _lane_predecessors(spans: Sequence[Span]) -> list[int]:
    """Position of the op before each op on its lane, -1 for a lane's first."""
    last: dict[Lane, int] = {}
    before = []
    for index, span in enumerate(spans):
        before.append(last.get(span.lane, -1))
        last[span.lane] = index
    return before
