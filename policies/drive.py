"""The generation loop: one function that turns a policy into a plan for every executor.

A policy decides step s+1 while step s is being emitted, because what step s stores depends on what
step s+1 will recompute. So the loop hands a policy two decisions: the one in force and the next.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from itertools import chain
from typing import Protocol

from policies.cost.model import CostModel
from policies.feedback import Refit
from policies.homes import Homes, Source
from policies.placement import Placement
from policies.plan.memory import Buffers
from policies.plan.op import Kind, Op
from policies.spec.hardware import HardwareProfile
from policies.spec.model import ModelSpec
from policies.spec.workload import Block
from policies.trace.span import Span, Trace


@dataclass(frozen=True, slots=True)
class Decision:
    """What a policy chose for one step.

    ``n_recompute[b]`` cached tokens (the tail, N_r) of batch b are recomputed, and so are the
    first ``n_front[b]``; the others come from their homes. Of the tokens that the step before
    stores, the first ``n_inputs[b]`` are stored as layer inputs, not as KV. ``on_cpu[b]`` is 1
    where the batch attends on the CPU. ``slices[b]`` pieces of the next layer's weights move while
    batch b computes; their sum is the number of pieces that a layer is cut into. ``solver`` and
    ``solve_s`` say who decided and what that took (0 when the decision was cached). Tuples that
    are left out are all 0.
    """

    n_recompute: tuple[int, ...]
    slices: tuple[int, ...]
    solver: str = ""
    solve_s: float = 0.0
    n_front: tuple[int, ...] = ()
    n_inputs: tuple[int, ...] = ()
    on_cpu: tuple[int, ...] = ()

    def __post_init__(self) -> None:
        n = len(self.slices)
        if len(self.n_recompute) != n:
            raise ValueError(f"decision: {len(self.n_recompute)} recompute counts for {n} batches")
        if any(count < 0 for count in self.n_recompute):
            raise ValueError(f"decision.n_recompute: {self.n_recompute} must be >= 0")
        for name in ("n_front", "n_inputs", "on_cpu"):
            counts = getattr(self, name)
            if not counts:
                object.__setattr__(self, name, (0,) * n)
            elif len(counts) != n or any(count < 0 for count in counts):
                raise ValueError(f"decision.{name}: {counts} must be {n} counts >= 0")
        if any(n < 0 for n in self.slices) or sum(self.slices) < 1:
            raise ValueError(f"decision.slices: {self.slices} must be >= 0 and sum to >= 1")


@dataclass(frozen=True, slots=True)
class StepContext:
    """All that a policy may know. No clock and no true output length.

    ``memo`` is scratch memory for decisions, valid for one run and one belief: what a policy keeps
    there it must key by everything else that the decision depends on.
    """

    step: int
    block: Block
    model: ModelSpec
    hardware: HardwareProfile
    placement: Placement
    belief: CostModel
    homes: tuple[Homes, ...]
    memo: dict[Hashable, Decision] = field(compare=False)

    @property
    def is_prefill(self) -> bool:
        """Whether this is step 0, which computes the prompts."""
        return self.step == 0

    @property
    def is_last(self) -> bool:
        """Whether no step follows."""
        return self.step == self.block.max_new - 1

    @property
    def n_batches(self) -> int:
        """Batches of the block."""
        return len(self.block.batches)

    @property
    def n_stored(self) -> tuple[int, ...]:
        """Tokens that have a home, per batch: the first so many."""
        return tuple(homes.n_stored for homes in self.homes)

    def n_from(self, source: Source, batch: int, decision: Decision) -> int:
        """Tokens of a batch that this step takes from homes of KV, or from those of inputs."""
        start, stop = decision.n_front[batch], self.n_ctx()[batch] - decision.n_recompute[batch]
        held = self.homes[batch].ranges(start, stop)
        return sum(piece.stop - piece.start for piece in held if piece.source is source)

    def n_ctx(self, step: int | None = None) -> tuple[int, ...]:
        """Tokens cached before a step, per batch: 0 in prefill, prompt_len + s - 1 in decode."""
        s = self.step if step is None else step
        return tuple(b.prompt_len + s - 1 if s else 0 for b in self.block.batches)


class Decider(Protocol):
    """What the generation loop asks of a policy."""

    def decide(self, ctx: StepContext) -> Decision:
        """The decision for step ``ctx.step``."""
        ...

    def step(self, ctx: StepContext, now: Decision, then: Decision | None) -> Iterator[Op]:
        """Ops of one step under ``now``; ``then`` is the next step's decision, if there is one."""
        ...


class Policy(Decider, Protocol):
    """A way to run an offloaded job."""

    @property
    def name(self) -> str:
        """Name as it appears in results."""
        ...

    @property
    def buffers(self) -> Buffers:
        """GPU slots and host buffers that its schedule needs."""
        ...

    def blocks(self, blocks: Sequence[Block]) -> tuple[Block, ...]:
        """The blocks as this policy runs them (it may split or merge batches)."""
        ...

    def place(
        self, model: ModelSpec, hardware: HardwareProfile, blocks: Sequence[Block]
    ) -> Placement:
        """Homes of weights, KV and activations for a run over these blocks."""
        ...


class Backend(Protocol):
    """An executor of plans."""

    def run(self, ops: Iterable[Op]) -> Trace:
        """Run the ops in program order of their lanes and report a span for each."""
        ...


IN_FLIGHT = 2
"""Steps of a closed loop that an executor has at once: one computes, the next one's ops are known.
"""

Observer = Callable[[int, int, Decision], None]

Ended = Callable[[int, int], Iterable[tuple[Op, Span]]]
"""``ended(block, step)``: ops that have ended since it was last asked and that work for steps up to
``step`` of ``block``, or for blocks before it.
"""


def drive(
    policy: Policy,
    blocks: Sequence[Block],
    belief: CostModel,
    observe: Observer = lambda _block, _step, _decision: None,
) -> Iterator[Op]:
    """Ops of a whole job, block after block, a FENCE between them.

    ``observe(block, step, decision)`` is called once for each step, in order.
    """
    for ops in drive_steps(policy, blocks, belief, observe):
        yield from ops


def drive_steps(
    policy: Decider,
    blocks: Sequence[Block],
    belief: CostModel,
    observe: Observer = lambda _block, _step, _decision: None,
    ended: Ended | None = None,
) -> Iterator[Iterator[Op]]:
    """The same, step by step: the ops of a step, a block's last one with the FENCE.

    A step is to be used up before the next is asked for. When step s is, the decision of step s+1
    is taken. A policy whose ``feedback`` is true then believes what ``ended`` shows of steps up to
    s-2, those that an executor has behind it with ``IN_FLIGHT`` steps. Without ``ended`` its
    loop stays open.
    """
    refit = Refit(belief) if ended is not None and wants_feedback(policy) else None
    memo: dict[Hashable, Decision] = {}
    for block in blocks:
        homes = (Homes(),) * len(block.batches)
        now = policy.decide(step_context(0, block, belief, homes, memo))
        for step in range(block.max_new):
            if refit is not None and ended is not None:
                found = refit.add(ended(block.index, step - IN_FLIGHT))
                if found is not belief:
                    belief, memo = found, {}
            ctx = step_context(step, block, belief, homes, memo)
            then = None
            if not ctx.is_last:
                then = policy.decide(step_context(step + 1, block, belief, homes, memo))
            observe(block.index, step, now)
            ops = policy.step(ctx, now, then)
            yield chain(ops, (_end_of(block, belief),)) if ctx.is_last else ops
            if then is not None:
                homes = stored_after(homes, ctx.n_ctx(step + 1), then)
                now = then


def wants_feedback(policy: Decider) -> bool:
    """Whether a policy's belief is to be re-fitted: ``feedback``, for those that have it."""
    return bool(getattr(policy, "feedback", False))


def step_context(
    step: int,
    block: Block,
    belief: CostModel,
    homes: tuple[Homes, ...] | None = None,
    memo: dict[Hashable, Decision] | None = None,
) -> StepContext:
    """What a policy knows in a step; with nothing stored or decided yet unless it is given."""
    held = (Homes(),) * len(block.batches) if homes is None else homes
    known = {} if memo is None else memo
    return StepContext(
        step, block, belief.model, belief.hardware, belief.placement, belief, held, known
    )


def _end_of(block: Block, belief: CostModel) -> Op:
    return Op(Kind.FENCE, block.index, block.max_new - 1, belief.model.n_layers, len(block.batches))


def stored_after(
    homes: tuple[Homes, ...], n_ctx: tuple[int, ...], then: Decision
) -> tuple[Homes, ...]:
    """Homes once a step has stored what the next one, of context ``n_ctx``, will not recompute."""
    reach = zip(homes, n_ctx, then.n_recompute, then.n_inputs, strict=True)
    return tuple(held.append(n - n_r, n_inputs) for held, n, n_r, n_inputs in reach)


def with_inputs(
    then: Decision, heads: tuple[int, ...], n_stored: tuple[int, ...], n_ctx: tuple[int, ...]
) -> Decision:
    """A decision whose head tokens are stored as layer inputs: token t of batch b if t < heads[b].

    ``n_stored`` tokens have a home already, ``n_ctx`` is the context of the decision's step.
    """
    reach = zip(heads, n_stored, n_ctx, then.n_recompute, strict=True)
    n_inputs = tuple(max(0, min(head, n - n_r) - stored) for head, stored, n, n_r in reach)
    return replace(then, n_inputs=n_inputs)
