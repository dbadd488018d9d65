"""The compiled executor: the same plan as ``sim.engine``, a hundred times as fast.

``run_program`` runs a block that is arrays already (``sim.program``), ``FastBackend`` any ops, one
by one. What readers get wrong: only a plan whose costs are fixed when it is emitted can be run
here. Costs that are drawn anew for every op need the SimPy executor.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass

import numpy as np

from policies.cost.protocol import Costs, checked_seconds
from policies.plan.op import LANE_OF, Lane, Op
from policies.trace.attribution import Category
from policies.trace.span import Span, Trace
from sim.arrays import (
    DONE,
    N_CATEGORIES,
    N_LANES,
    STALLED,
    Floats,
    Ints,
    Outcome,
    Program,
    new_state,
)
from sim.kernel import run_block
from sim.program import plain_program

NARROWEST = 1024


@dataclass(frozen=True, slots=True, eq=False)
class BlockRun:
    """What running a block gives, in seconds since its start.

    ``charged_s`` is the critical path by category; ``step_end_s[s]`` the end of the last FORWARD of
    step s. ``start_s``, ``end_s`` and ``waits_for`` are those of the recorded ops.
    """

    makespan_s: float
    prefill_end_s: float
    busy_s: dict[Lane, float]
    charged_s: dict[Category, float]
    step_end_s: Floats
    start_s: Floats
    end_s: Floats
    waits_for: Ints  # (n_recorded, lanes), see sim.arrays.Outcome
    width: int  # ops of a lane that were in memory at most

    def spans(self, ops: Iterable[Op], costs: Costs) -> Iterator[Span]:
        """Spans of the recorded ops; ``ops`` are the plan's first."""
        times = zip(self.start_s.tolist(), self.end_s.tolist(), strict=True)
        for op, (start_s, end_s) in zip(ops, times, strict=False):
            nbytes, flops = int(costs.nbytes(op)), float(costs.flops(op))
            yield Span(op.key, op.kind, LANE_OF[op.kind], start_s, end_s, nbytes, flops)


def run_program(program: Program, n_steps: int, duplex: float, n_recorded: int = 0) -> BlockRun:
    """Run a block; the first ``n_recorded`` ops are recorded one by one.

    ``duplex`` is the rate, as a share, of H2D and D2H while both are busy.
    """
    if not 0.0 < duplex <= 1.0:
        raise ValueError(f"duplex: {duplex} must be in (0, 1], 1 is full duplex")
    most = int(program.lane_ops.max(initial=0))
    width = max(NARROWEST, 1 << most.bit_length())
    while True:
        outcome = Outcome(
            times_s=np.zeros(2),
            busy_s=np.zeros(N_LANES),
            charged_s=np.zeros(N_CATEGORIES),
            step_end_s=np.zeros(n_steps),
            start_s=np.zeros(n_recorded),
            end_s=np.zeros(n_recorded),
            waits_for=np.zeros((n_recorded, N_LANES), np.int32),
        )
        status = run_block(program, new_state(program, width), outcome, duplex)
        if status == DONE:
            break
        if status == STALLED:
            raise AssertionError("plan: stalled, although a linked plan waits for earlier ops only")
        width *= 2
    return BlockRun(
        float(outcome.times_s[0]),
        float(outcome.times_s[1]),
        dict(zip(Lane, outcome.busy_s.tolist(), strict=True)),
        dict(zip(Category, outcome.charged_s.tolist(), strict=True)),
        outcome.step_end_s,
        outcome.start_s,
        outcome.end_s,
        outcome.waits_for,
        width,
    )


class FastBackend:
    """Runs any plan against ``costs``, compiled; a ``Backend``.

    Ops come one by one here, so it is the emitting that takes the time: for a whole job use
    ``run_program``.
    """

    def __init__(self, costs: Costs, duplex: float = 1.0) -> None:
        self._costs, self._duplex = costs, duplex
        self.last: BlockRun | None = None  # of the last run that had ops

    def run(self, ops: Iterable[Op]) -> Trace:
        """Spans of a plan, in program order; ``ValueError`` for a cost that is not a time."""
        plan = list(ops)
        if not plan:
            return Trace(())
        seconds = np.array([checked_seconds(self._costs, op) for op in plan])
        self.last = run_program(plain_program(plan, seconds), 1, self._duplex, len(plan))
        return Trace(tuple(self.last.spans(plan, self._costs)))
