"""The generation loop: one function that turns a policy into a plan for every executor.

A policy decides step s+1 while step s is being emitted, because what step s stores depends on what
step s+1 will recompute. So the loop hands a policy two decisions: the one in force and the next.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Protocol

from policies.cost.model import CostModel
from policies.placement import Placement
from policies.plan.memory import Buffers
from policies.plan.op import Kind, Op
from policies.spec.hardware import HardwareProfile
from policies.spec.model import ModelSpec
from policies.spec.workload import Block
from policies.trace.span import Trace


@dataclass(frozen=True, slots=True)
class Decision:
    """What a policy chose for one step.

    ``n_recompute[b]`` cached tokens (the tail, N_r) of batch b are recomputed, the rest loaded.
    ``slices[b]`` pieces of the next layer's weights move while batch b computes; their sum is the
    number of pieces that a layer is cut into. ``solver`` and ``solve_s`` say who decided and what
    that took (0 when the decision was cached).
    """

    n_recompute: tuple[int, ...]
    slices: tuple[int, ...]
    solver: str = ""
    solve_s: float = 0.0

    def __post_init__(self) -> None:
        if len(self.n_recompute) != len(self.slices):
            raise ValueError(
                f"decision: {len(self.n_recompute)} recompute counts for {len(self.slices)} batches"
            )
        if any(n < 0 for n in self.n_recompute):
            raise ValueError(f"decision.n_recompute: {self.n_recompute} must be >= 0")
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
    n_stored: tuple[int, ...]
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

    def n_ctx(self, step: int | None = None) -> tuple[int, ...]:
        """Tokens cached before a step, per batch: 0 in prefill, prompt_len + s - 1 in decode."""
        s = self.step if step is None else step
        return tuple(b.prompt_len + s - 1 if s else 0 for b in self.block.batches)


class Policy(Protocol):
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

    def decide(self, ctx: StepContext) -> Decision:
        """The decision for step ``ctx.step``."""
        ...

    def step(self, ctx: StepContext, now: Decision, then: Decision | None) -> Iterator[Op]:
        """Ops of one step under ``now``; ``then`` is the next step's decision, if there is one."""
        ...


class Backend(Protocol):
    """An executor of plans."""

    def run(self, ops: Iterable[Op]) -> Trace:
        """Run the ops in program order of their lanes and report a span for each."""
        ...


Observer = Callable[[int, int, Decision], None]


def drive(
    policy: Policy,
    blocks: Sequence[Block],
    belief: CostModel,
    observe: Observer = lambda _block, _step, _decision: None,
) -> Iterator[Op]:
    """Ops of a whole job, block after block, a FENCE between them.

    ``observe(block, step, decision)`` is called once for each step, in order.
    """
    memo: dict[Hashable, Decision] = {}
    for block in blocks:
        yield from _drive_block(policy, block, belief, memo, observe)
        yield Op(
            Kind.FENCE, block.index, block.max_new - 1, belief.model.n_layers, len(block.batches)
        )


def _drive_block(
    policy: Policy,
    block: Block,
    belief: CostModel,
    memo: dict[Hashable, Decision],
    observe: Observer,
) -> Iterator[Op]:
    stored = (0,) * len(block.batches)

    def context(step: int) -> StepContext:
        return StepContext(
            step, block, belief.model, belief.hardware, belief.placement, belief, stored, memo
        )

    now = policy.decide(context(0))
    for step in range(block.max_new):
        ctx = context(step)
        then = policy.decide(context(step + 1)) if not ctx.is_last else None
        observe(block.index, step, now)
        yield from policy.step(ctx, now, then)
        if then is not None:
            reach = zip(stored, ctx.n_ctx(step + 1), then.n_recompute, strict=True)
            stored = tuple(max(have, n_ctx - n_r) for have, n_ctx, n_r in reach)
            now = then
