"""Predicted length of a step under a decision: what several candidate decisions are compared by.

The integer program's objective is exact for a schedule that synchronises after every batch; this is
the max-plus time of the schedule that really runs. What readers get wrong: nothing is measured. The
plan of a shorter model is run through the recurrence of ``plan.predict`` with the policy's belief.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import replace
from itertools import chain

from policies.cost.model import CostModel
from policies.drive import Decision, StepContext, drive_steps, with_inputs
from policies.homes import Homes
from policies.plan.link import link
from policies.plan.op import Kind, Op
from policies.plan.predict import predict
from policies.schedule import zigzag
from policies.step_ops import Zigzag

PREDICTED_LAYERS = 8  # layers of the shorter model that predicts a step
_FEW = 64  # layers of all decode steps of a block: in so few its beginning and end count


class Horizon:
    """Predicts the length of a step under a decision by running a shorter model through it.

    A step is layers, all alike, and an edge: its first layers find their inputs fetched, its last
    ones have nothing to fetch for, and no batch starts before its last token is sampled. So a few
    layers are run for two steps and the length is extended to the model's depth.
    """

    def __init__(
        self,
        schedule: Zigzag,
        ctx: StepContext,
        heads: tuple[int, ...],
        context: tuple[int, ...],
    ) -> None:
        """Decisions are for ``context``: recomputing all of it means all of each step's."""
        self.schedule, self.heads, self.context = schedule, heads, context
        self.depth = ctx.model.n_layers
        alike = len(set(ctx.placement.weights)) == 1 and not (
            ctx.model.n_experts and ctx.model.n_dense_layers
        )
        if alike and self.depth > PREDICTED_LAYERS:
            model = replace(ctx.model, n_layers=PREDICTED_LAYERS)
            placement = replace(ctx.placement, weights=ctx.placement.weights[:PREDICTED_LAYERS])
            belief = CostModel(model, ctx.hardware, placement)
            ctx = replace(ctx, model=model, placement=placement, belief=belief)
        self.ctx = ctx

    def step_s(self, decision: Decision) -> float:
        """Seconds from the end of one step to the end of the next, all deciding the same."""
        if self.ctx.step > 0 and (self.ctx.block.max_new - 1) * self.depth <= _FEW:
            return self._few_steps_s(decision)
        step = self.ctx.step
        steps = (step,) if self.ctx.is_prefill else (step, step + 1)
        held = [self.at(decision, s) for s in (*steps, steps[-1] + 1)]
        plan = []
        for s, now, then in zip(steps, held, held[1:], strict=False):
            ctx = self._context(s, now)
            then = with_inputs(then, self.heads, ctx.n_stored, ctx.n_ctx(s + 1))
            plan.append(zigzag(ctx, now, then, self.schedule))
        ends = self._ends(chain.from_iterable(plan))
        return self._length_s(ends, steps[-1])

    def _few_steps_s(self, decision: Decision) -> float:
        """Mean seconds of a decode step where edges count: the whole block is run."""
        held, block = _Held(self, decision), self.ctx.block
        ends = self._ends(chain.from_iterable(drive_steps(held, [block], self.ctx.belief)))
        steps = range(1, block.max_new)
        return sum(self._length_s(ends, step) for step in steps) / len(steps)

    def _ends(self, plan: Iterable[Op]) -> dict[tuple[int, int], float]:
        """Ends of the last forward by step and layer."""
        linked = list(link(plan))
        ends: dict[tuple[int, int], float] = {}
        for item, (_, end_s) in zip(linked, predict(linked, self.ctx.belief.seconds), strict=True):
            if item.op.kind is Kind.FORWARD:
                ends[item.op.step, item.op.layer] = end_s
        return ends

    def _length_s(self, ends: dict[tuple[int, int], float], step: int) -> float:
        """Seconds of a step, extended to the depth of the model."""
        layers = self.ctx.model.n_layers
        length_s = ends[step, layers] - ends.get((step - 1, layers), 0.0)
        if layers < self.depth:
            inner = ends[step, layers - 2] - ends[step, 1]
            length_s += (self.depth - layers) * inner / (layers - 3)
        return length_s

    def at(self, decision: Decision, step: int) -> Decision:
        """The decision as ``step`` takes it."""
        tails = whole_tails(decision.n_recompute, self.context, self.ctx.n_ctx(step))
        return replace(decision, n_recompute=tails)

    def _context(self, step: int, decision: Decision) -> StepContext:
        ctx = replace(self.ctx, step=step)
        # Steps before decided the same, too: each step stores one token, not all of the prompt.
        reach = zip(self.heads, ctx.n_ctx(), decision.n_recompute, strict=True)
        return replace(ctx, homes=tuple(Homes.headed(head, n - n_r) for head, n, n_r in reach))


class _Held:
    """Decides the same in every step."""

    def __init__(self, horizon: Horizon, decision: Decision) -> None:
        self._horizon, self._decision = horizon, decision

    def decide(self, ctx: StepContext) -> Decision:
        """The decision, as the step takes it."""
        now = self._horizon.at(self._decision, ctx.step)
        return with_inputs(now, self._horizon.heads, ctx.n_stored, ctx.n_ctx())

    def step(self, ctx: StepContext, now: Decision, then: Decision | None) -> Iterator[Op]:
        """One step of the schedule."""
        return zigzag(ctx, now, then, self._horizon.schedule)


def whole_tails(
    n_recompute: tuple[int, ...], context: tuple[int, ...], n_ctx: tuple[int, ...]
) -> tuple[int, ...]:
    """Tails decided for ``context``, at ``n_ctx``: all of it means all, few loads save nothing."""
    chosen = zip(n_recompute, context, n_ctx, strict=True)
    return tuple(n if tail == whole else min(tail, n) for tail, whole, n in chosen)
