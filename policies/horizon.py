"""Predicted length of a step under a decision: what several candidate decisions are compared by.

The integer program's objective is exact for a schedule that synchronises after every batch; this is
the max-plus time of the schedule that really runs. What readers get wrong: nothing is measured. The
plan of a shorter model is run through the recurrence of ``plan.predict`` with the policy's belief.
"""

from __future__ import annotations

from dataclasses import replace
from itertools import chain

from policies.cost.model import CostModel
from policies.drive import Decision, StepContext, with_inputs
from policies.homes import Homes
from policies.plan.link import link
from policies.plan.op import Kind
from policies.plan.predict import predict
from policies.schedule import zigzag
from policies.step_ops import Zigzag

PREDICTED_LAYERS = 8  # layers of the shorter model that predicts a step


class Horizon:
    """Predicts the length of a step under a decision by running a shorter model through it.

    A step is layers, all alike, and an edge: its first layers find their inputs fetched, its last
    ones have nothing to fetch for, and no batch starts before its last token is sampled. So a few
    layers are run for two steps and the length is extended to the model's depth.
    """

    def __init__(self, schedule: Zigzag, ctx: StepContext, heads: tuple[int, ...]) -> None:
        self.schedule, self.heads = schedule, heads
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
        first = self._context(self.ctx.step, decision)
        decision = with_inputs(decision, self.heads, first.n_stored, first.n_ctx(first.step + 1))
        plan = [zigzag(first, decision, decision, self.schedule)]
        if not first.is_prefill:
            second = self._context(first.step + 1, decision)
            plan.append(zigzag(second, decision, decision, self.schedule))
        linked = list(link(chain.from_iterable(plan)))
        layers, last = self.ctx.model.n_layers, first.step + len(plan) - 1
        ends: dict[tuple[int, int], float] = {}  # (step, layer) -> end of its last batch
        for item, (_, end_s) in zip(linked, predict(linked, self.ctx.belief.seconds), strict=True):
            if item.op.kind is Kind.FORWARD:
                ends[item.op.step, item.op.layer] = end_s
        length_s = ends[last, layers] - ends.get((last - 1, layers), 0.0)
        if layers < self.depth:
            inner = ends[last, layers - 2] - ends[last, 1]
            length_s += (self.depth - layers) * inner / (layers - 3)
        return length_s

    def _context(self, step: int, decision: Decision) -> StepContext:
        ctx = replace(self.ctx, step=step)
        # Steps before decided the same, too: each step stores one token, not all of the prompt.
        reach = zip(self.heads, ctx.n_ctx(), decision.n_recompute, strict=True)
        return replace(ctx, homes=tuple(Homes.headed(head, n - n_r) for head, n, n_r in reach))
