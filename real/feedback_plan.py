"""Plans of a request whose policy re-fits its belief while it runs.

What it may decide then is not known before, but bounded: a token's kind of home follows from the
placement, so only tails and weight slices are free. Plans with no tails and with whole ones, and
with tails that are dropped at once in one of the last steps, need at least as much of every buffer
as any plan in between. What readers get wrong: those plans are never run.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field

from policies.beliefs import CountsBeliefs
from policies.cost.model import CostModel
from policies.drive import (
    Decider,
    Decision,
    Ended,
    Observer,
    Policy,
    StepContext,
    drive_steps,
    with_inputs,
)
from policies.plan.op import Op
from policies.run_request import RunRequest
from policies.step_tables import n_slices_of


@dataclass(slots=True)
class FeedbackPlan:
    """The plan of ``request``, which starts from ``belief``.

    Of its last run: ``n_beliefs`` counts those that it took on; ``behind`` has the decisions
    (block, step, decision) of steps that were cut, but say what the last ones store.
    """

    request: RunRequest
    belief: CostModel
    n_beliefs: int = 0
    behind: list[tuple[int, int, Decision]] = field(default_factory=list)
    _last: dict[int, int] = field(default_factory=dict)  # step to run, by block

    def __post_init__(self) -> None:
        for block in self.request.policy.blocks(self.request.blocks):
            self._last[block.index] = self.request.last_step(block)

    def steps(self, ended: Ended, observe: Observer) -> Iterator[Iterator[Op]]:
        """The plan, step by step; a step that is cut is empty, and not observed."""
        asked = CountsBeliefs(_Kept(self.request.policy, self._last))

        def seen(block: int, step: int, decision: Decision) -> None:
            self.n_beliefs = asked.n_beliefs
            if step <= self._last[block]:
                observe(block, step, decision)
            elif step == self._last[block] + 1:
                self.behind.append((block, step, decision))

        self.behind.clear()
        return self._drive(asked, seen, ended)

    def bounds(self) -> Iterator[Iterator[Op]]:
        """Whole plans: the one in open loop, and those that bound the others."""
        policy = self.request.policy
        yield self.request.plan(self.belief)
        for slices in (1, None):
            yield self._forced(_Forced(policy, lambda _block, _step: False, slices))
        yield self._forced(_Forced(policy, lambda _block, _step: True, None))
        # A slot's largest store is that of the last step whose turn it is.
        turns = max(policy.buffers.kv_out_slots, policy.buffers.input_slots, 1)
        for before in range(turns + 1):
            yield self._forced(_Forced(policy, self._all_but(before), None))

    def _all_but(self, before: int) -> Callable[[int, int], bool]:
        """Tails in all steps but one: of the step after the last, so many before."""
        return lambda block, step: step != self._last[block] + 1 - before

    def _forced(self, policy: _Forced) -> Iterator[Op]:
        for ops in self._drive(_Kept(policy, self._last)):
            yield from ops

    def _drive(
        self,
        policy: Decider,
        observe: Observer = lambda _block, _step, _decision: None,
        ended: Ended | None = None,
    ) -> Iterator[Iterator[Op]]:
        blocks = self.request.policy.blocks(self.request.blocks)
        return drive_steps(policy, blocks, self.belief, observe, ended)


class _Wrapped:
    """The part of a policy that the generation loop uses."""

    def __init__(self, policy: Decider) -> None:
        self.policy = policy

    def decide(self, ctx: StepContext) -> Decision:
        """The policy's."""
        return self.policy.decide(ctx)

    def step(self, ctx: StepContext, now: Decision, then: Decision | None) -> Iterator[Op]:
        """The policy's."""
        return self.policy.step(ctx, now, then)


class _Kept(_Wrapped):
    """A policy without the steps behind ``last`` (by block). The decision of the step after the
    last one says what the last one stores.
    """

    def __init__(self, policy: Decider, last: dict[int, int]) -> None:
        super().__init__(policy)
        self._last = last

    def decide(self, ctx: StepContext) -> Decision:
        if ctx.step > self._last[ctx.block.index] + 1:
            return Decision(ctx.n_ctx(), (1, *(0,) * (ctx.n_batches - 1)))  # nothing comes of it
        return super().decide(ctx)

    def step(self, ctx: StepContext, now: Decision, then: Decision | None) -> Iterator[Op]:
        last = self._last[ctx.block.index]
        if ctx.step <= last:
            yield from (op for op in super().step(ctx, now, then) if op.step <= last)


class _Forced(_Wrapped):
    """A policy's steps with whole tails where ``whole(block, step)``, with none elsewhere.

    ``n_slices`` null: as many pieces of a layer's weights as its loader makes.
    """

    def __init__(
        self, policy: Policy, whole: Callable[[int, int], bool], n_slices: int | None
    ) -> None:
        super().__init__(policy)
        self._whole, self._n_slices = whole, n_slices

    def decide(self, ctx: StepContext) -> Decision:
        none = (0,) * ctx.n_batches
        tails = ctx.n_ctx() if self._whole(ctx.block.index, ctx.step) else none
        decision = Decision(tails, (self._slices(ctx), *none[1:]))
        return with_inputs(decision, ctx.placement.heads(ctx.block), ctx.n_stored, ctx.n_ctx())

    def _slices(self, ctx: StepContext) -> int:
        if self._n_slices is not None:
            return self._n_slices
        return max(1, n_slices_of(ctx, getattr(self.policy, "n_slices", None)))
