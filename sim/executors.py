"""The two executors of a job, block by block: SimPy, the reference, and the compiled one.

Both give the same ``BlockTimes``, and ``engine=auto`` takes the compiled one unless a policy's
steps cannot be turned into arrays or depend on how earlier ones went (``policy.feedback``). What
readers get wrong: the choice is one of speed only. Times are equal to 1e-9 relative, decisions and
bytes exactly (law L13).
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import groupby, islice

from policies.beliefs import CountsBeliefs
from policies.cost.model import CostModel
from policies.drive import (
    Decider,
    Decision,
    Observer,
    Policy,
    StepContext,
    drive,
    drive_steps,
    wants_feedback,
)
from policies.plan.link import LinkedOp
from policies.plan.op import Lane, Op
from policies.spec.workload import Block
from policies.trace.attribution import Category, attribute
from policies.trace.metrics import lane_totals_s, metrics
from policies.trace.span import Span, Trace
from sim.closed_loop import ClosedLoopBackend
from sim.engine import SimBackend
from sim.program_cache import ProgramCache

ENGINES = ("auto", "simpy", "fast")
EVERY_STEP = 2**62
NOT_KNOWN_BEFORE = (
    "policy.feedback: true needs engine=simpy or auto and a plain run: the compiled executor, and "
    "what replays a plan, must know all decisions before it runs"
)

StepsToKeep = Callable[[int], int]
"""Leading steps of a block whose spans are wanted, from the block's number of ops."""


@dataclass(frozen=True, slots=True)
class BlockTimes:
    """One block, in seconds since its start; ``lane_s`` are uncontended sums, ``waits_s`` the
    critical path by category. ``n_beliefs`` counts those that decided, from the first block on.
    """

    n_ops: int
    makespan_s: float
    prefill_s: float
    decode_s: float
    lane_s: dict[Lane, float]
    busy_s: dict[Lane, float]
    waits_s: dict[Category, float]
    spans: tuple[Span, ...]
    n_beliefs: int = 1


def simpy_blocks(
    policy: Policy,
    blocks: Sequence[Block],
    plant: CostModel,
    belief: CostModel,
    observe: Observer,
    keep: StepsToKeep,
) -> Iterator[BlockTimes]:
    """Blocks by the reference, op by op; for a policy with feedback, as they run."""
    asked = CountsBeliefs(policy)
    if wants_feedback(policy):
        ran = _closed_loop(asked, blocks, plant, belief, observe)
    else:
        ran = _open_loop(policy, blocks, plant, belief, observe)
    for ops, trace, linked in ran:
        measured = metrics(trace)
        makespan_s = measured.makespan_s
        waits = attribute(trace.spans, [item.deps for item in linked])
        n_steps = keep(len(ops))
        yield BlockTimes(
            len(ops),
            makespan_s,
            measured.prefill_s,
            measured.decode_s,
            lane_totals_s(plant, ops),
            {lane: share * makespan_s for lane, share in measured.busy.items()},
            {category: share * makespan_s for category, share in waits.shares.items()},
            _kept(trace.spans, ops, n_steps),
            max(1, asked.n_beliefs),
        )


Ran = tuple[Sequence[Op], Trace, Sequence[LinkedOp]]
"""A block that has run."""


def _open_loop(
    policy: Policy,
    blocks: Sequence[Block],
    plant: CostModel,
    belief: CostModel,
    observe: Observer,
) -> Iterator[Ran]:
    """A block's plan is known before it runs."""
    backend = SimBackend(plant, plant.hardware.duplex)
    for _, group in groupby(drive(policy, blocks, belief, observe), key=lambda op: op.block):
        ops = list(group)
        yield ops, backend.run(ops), backend.linked


def _closed_loop(
    policy: Decider,
    blocks: Sequence[Block],
    plant: CostModel,
    belief: CostModel,
    observe: Observer,
) -> Iterator[Ran]:
    """A step is planned when the step two before it has run."""
    backend = ClosedLoopBackend(plant, plant.hardware.duplex)
    steps = drive_steps(policy, blocks, belief, observe, backend.ended)
    for block in blocks:
        trace = backend.run(islice(steps, block.max_new))
        yield [item.op for item in backend.linked], trace, backend.linked


def _kept(spans: Iterable[Span], ops: Sequence[Op], n_steps: int) -> tuple[Span, ...]:
    """Spans of the ops that work for the first ``n_steps`` steps."""
    return tuple(span for span, op in zip(spans, ops, strict=True) if op.step < n_steps)


class KeptSteps:
    """A policy that decides as ever and emits nothing: its steps are kept instead."""

    def __init__(self, policy: Policy) -> None:
        if wants_feedback(policy):
            raise ValueError(NOT_KNOWN_BEFORE)
        self._policy = policy
        self.name, self.buffers = policy.name, policy.buffers
        self.blocks, self.place, self.decide = policy.blocks, policy.place, policy.decide
        self.taken: list[tuple[StepContext, Decision, Decision | None]] = []

    def step(self, ctx: StepContext, now: Decision, then: Decision | None) -> Iterator[Op]:
        """Keep the step."""
        self.taken.append((ctx, now, then))
        return iter(())


def fast_blocks(
    policy: Policy,
    blocks: Sequence[Block],
    plant: CostModel,
    belief: CostModel,
    observe: Observer,
    keep: StepsToKeep,
    known: ProgramCache | None = None,
) -> Iterator[BlockTimes]:
    """Blocks by the compiled executor; ``UntraceableError`` where a policy cannot be traced.

    ``known`` are templates of earlier runs, to use and to add to.
    """
    # Here, not above: loading the compiler takes half a second that a SimPy run does not need.
    from sim.fast import run_program

    steps = KeptSteps(policy)
    programs = (known or ProgramCache()).programs(policy, plant, belief)
    for fence in drive(steps, blocks, belief, observe):
        program = programs.of_block(steps.taken, fence)
        steps.taken = []
        n_steps = keep(program.n_ops)
        n_recorded = program.n_ops_before(n_steps)
        run = run_program(program.arrays, program.n_steps, plant.hardware.duplex, n_recorded)
        ops = list(islice(program.ops(), n_recorded))
        yield BlockTimes(
            program.n_ops,
            run.makespan_s,
            run.prefill_end_s,
            run.makespan_s - run.prefill_end_s,
            dict(zip(Lane, program.lane_s.tolist(), strict=True)),
            run.busy_s,
            run.charged_s,
            _kept(run.spans(ops, plant), ops, n_steps),
        )
