"""Metrics of a trace: one definition each, for simulated and measured traces alike.

Blocks of requests follow one another, separated by a FENCE, so a job's prefill time is a sum over
blocks. What readers get wrong: prefill does not end with its last forward but when the prompt's KV
is in its home too; the loads that step 1 prefetches meanwhile belong to decode. Tokens are not in
a trace: who knows the real token counts divides by these times.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field
from itertools import pairwise

from policies.cost.protocol import Costs
from policies.plan.op import LANE_OF, Kind, Lane, Op
from policies.trace.span import Span, Trace, parse_key

# What must have ended before a block's first tokens exist and its prompt KV is stored.
PREFILL_KINDS = frozenset(
    {
        Kind.FORWARD,
        Kind.STORE_KV,
        Kind.WRITE_KV,
        Kind.HOST_COPY,
        Kind.STORE_ACT,
        Kind.WRITE_ACT,
        Kind.CPU_ATTEND,
        Kind.FENCE,
    }
)


@dataclass(frozen=True, slots=True)
class TraceMetrics:
    """Times in seconds; blocks in order of their index.

    ``ttft_s[i]`` is prefill end less start of block i (queueing behind earlier blocks excluded),
    ``prefill_s`` their sum. ``decode_s`` sums block end less prefill end. ``step_s[i][j]`` is the
    j-th decode step of block i: from the end of the last FORWARD of the step before, for the first
    one from the prefill end, to that of its own. ``busy`` is the summed span time of a lane over
    the makespan, ``nbytes`` the bytes moved per lane and kind (only kinds that occur).
    """

    prefill_s: float
    decode_s: float
    makespan_s: float
    ttft_s: tuple[float, ...]
    step_s: tuple[tuple[float, ...], ...]
    busy: dict[Lane, float]
    nbytes: dict[tuple[Lane, Kind], int]


@dataclass(slots=True)
class _BlockTimes:
    """Times of one block while the trace is read."""

    start_s: float
    end_s: float
    prefill_end_s: float = -1.0
    forward_end_s: dict[int, float] = field(default_factory=dict)  # by step

    def add(self, span: Span, step: int) -> None:
        self.start_s = min(self.start_s, span.start_s)
        self.end_s = max(self.end_s, span.end_s)
        if step == 0 and span.kind in PREFILL_KINDS:
            self.prefill_end_s = max(self.prefill_end_s, span.end_s)
        if span.kind is Kind.FORWARD:
            self.forward_end_s[step] = max(self.forward_end_s.get(step, 0.0), span.end_s)

    def step_s(self, block: int) -> tuple[float, ...]:
        """Durations of the decode steps; ``ValueError`` if a step or prefill is missing."""
        steps = sorted(self.forward_end_s)
        if steps != list(range(len(steps))) or not steps:
            raise ValueError(
                f"trace: block {block} has forwards of steps {steps}, must be 0, 1, 2, ... "
                "(metrics need whole blocks)"
            )
        ends = [self.prefill_end_s, *(self.forward_end_s[step] for step in steps[1:])]
        return tuple(end - before for before, end in pairwise(ends))


def metrics(trace: Trace) -> TraceMetrics:
    """Metrics of a trace of whole blocks, in one pass.

    A block starts with its first span; the first block at 0, since what precedes its first span is
    waiting too. ``ValueError`` if the trace is empty or a block lacks prefill or a step.
    """
    if not trace.spans:
        raise ValueError("trace: has no spans, metrics need at least one block")
    blocks: dict[int, _BlockTimes] = {}
    lane_s = dict.fromkeys(Lane, 0.0)
    nbytes: dict[tuple[Lane, Kind], int] = {}
    for span in trace.spans:
        parts = parse_key(span.key)
        times = blocks.get(parts.block)
        if times is None:
            start_s = span.start_s if blocks else 0.0
            times = blocks[parts.block] = _BlockTimes(start_s, span.end_s)
        times.add(span, parts.step)
        lane_s[span.lane] += span.end_s - span.start_s
        moved = (span.lane, span.kind)
        nbytes[moved] = nbytes.get(moved, 0) + span.nbytes
    makespan_s = trace.makespan_s
    ordered = sorted(blocks.items())
    step_s = tuple(times.step_s(block) for block, times in ordered)
    ttft_s = tuple(times.prefill_end_s - times.start_s for _, times in ordered)
    return TraceMetrics(
        prefill_s=sum(ttft_s),
        decode_s=sum(times.end_s - times.prefill_end_s for _, times in ordered),
        makespan_s=makespan_s,
        ttft_s=ttft_s,
        step_s=step_s,
        busy={lane: s / makespan_s if makespan_s > 0 else 0.0 for lane, s in lane_s.items()},
        nbytes=nbytes,
    )


def lane_totals_s(costs: Costs, ops: Iterable[Op]) -> dict[Lane, float]:
    """Summed uncontended seconds of every lane, idle lanes included."""
    totals = dict.fromkeys(Lane, 0.0)
    for op in ops:
        totals[LANE_OF[op.kind]] += costs.seconds(op)
    return totals


def lower_bound_s(costs: Costs, ops: Iterable[Op]) -> float:
    """No schedule of these ops ends sooner: ``max`` over lanes of ``sum(seconds)``."""
    return max(lane_totals_s(costs, ops).values())
