"""Decisions by integer program: how much of the tail each batch recomputes, who carries slices.

Shared by TightLLM and ``mixed``, which differ in what the homes hold: ``heads[b]`` first tokens of
batch b lie as layer inputs, the others as KV. What readers get wrong: the program's objective is a
sum over batches of a maximum, exact for a schedule that synchronises after every batch. This one
does not, so among the program's optimum and those of its restrictions the decision with the
shortest predicted step is taken.
"""

from __future__ import annotations

from dataclasses import dataclass

from policies.drive import Decision, StepContext, with_inputs
from policies.horizon import Horizon, whole_tails
from policies.ilp import plan
from policies.slot_problem import Solution
from policies.solver import SOLVERS
from policies.step_ops import Zigzag
from policies.step_tables import StepTables


@dataclass(frozen=True, slots=True)
class Planner:
    """Settings of the program; as in ``TightLLM``."""

    schedule: Zigzag
    distributor: bool
    loader: bool
    n_slices: int | None
    bucket_tokens: int
    serial_links: bool
    solver: str

    def __post_init__(self) -> None:
        if self.n_slices is not None and self.n_slices < 1:
            raise ValueError(f"policy.n_slices: {self.n_slices} must be >= 1 or null")
        if self.solver not in SOLVERS:
            raise ValueError(f"policy.solver: {self.solver!r} is none of {', '.join(SOLVERS)}")
        if self.bucket_tokens < 1:
            raise ValueError(f"policy.bucket_tokens: {self.bucket_tokens} must be >= 1")

    def decide(self, ctx: StepContext, heads: tuple[int, ...]) -> Decision:
        """The decision for a step, solved once for all steps of a context bucket."""
        context = tuple(self._bucket(n) for n in ctx.n_ctx())
        kv = ctx.placement.kv[ctx.block.index]
        # A decode step sees a prompt as context: blocks of equal batches share their decisions.
        batches = ctx.block.batches
        sizes = batches if ctx.is_prefill else tuple(batch.n_seqs for batch in batches)
        held = tuple(map(min, heads, context))
        key = (ctx.is_prefill, sizes, context, held, kv)
        decision = known = ctx.memo.get(key)
        if decision is None:
            decision, _ = self._solve(ctx, self._tables(ctx, context, heads))
            ctx.memo[key] = Decision(decision.n_recompute, decision.slices, decision.solver)
        n_recompute = whole_tails(decision.n_recompute, context, ctx.n_ctx())
        spent = decision.solve_s if known is None else 0.0
        decided = Decision(n_recompute, decision.slices, decision.solver, spent)
        return with_inputs(decided, heads, ctx.n_stored, ctx.n_ctx())

    def _bucket(self, n_ctx: int) -> int:
        """The middle of a context's bucket; a context below one bucket stands for itself."""
        if n_ctx < self.bucket_tokens:
            return n_ctx
        return n_ctx - n_ctx % self.bucket_tokens + self.bucket_tokens // 2

    def predicted(self, ctx: StepContext, heads: tuple[int, ...]) -> tuple[float, float]:
        """Predicted seconds of step ``ctx.step``, were the homes ``heads``, and of its compute."""
        tables = self._tables(ctx, tuple(map(self._bucket, ctx.n_ctx())), heads)
        decision, step_s = self._solve(ctx, tables)
        return step_s, sum(tables.compute_s(b, n) for b, n in enumerate(decision.n_recompute))

    def _tables(
        self, ctx: StepContext, context: tuple[int, ...], heads: tuple[int, ...]
    ) -> StepTables:
        return StepTables(
            ctx, context, heads, attention=self.schedule.attention, n_slices=self.n_slices,
            serial_links=self.serial_links,
        )  # fmt: skip

    def _solve(self, ctx: StepContext, tables: StepTables) -> tuple[Decision, float]:
        """The best decision and the predicted seconds of its step."""
        context = tables.context
        longest = context if self.distributor else (0,) * len(context)
        whole = tuple(1 if b == 0 else 0 for b in range(ctx.n_batches))
        options: list[Solution] = []
        if self.loader and tables.n_slices:
            options.append(plan(tables.sliced, longest, self.solver))
            if any(longest):
                options.append(plan(tables.sliced, (0,) * len(context), self.solver))
        if any(longest) or not options:
            options.append(plan(tables.unsliced, longest, self.solver))
        spent = sum(option.solve_s for option in options)
        decisions = [
            Decision(o.n_recompute, o.slices if sum(o.slices) else whole, o.solver) for o in options
        ]
        if any(longest):
            decisions.append(Decision((0,) * len(context), whole, options[0].solver))
            if self.loader and tables.n_slices:
                even = _evenly(tables.n_slices, ctx.n_batches)
                decisions.append(Decision(tables.even_tails(), even, options[0].solver))
        horizon = Horizon(self.schedule, ctx, tables.heads, context)
        predicted = [(horizon.step_s(decision), decision) for decision in decisions]
        step_s, best = min(predicted, key=lambda found: found[0])
        return Decision(best.n_recompute, best.slices, best.solver, spent), step_s


def _evenly(n_slices: int, n_batches: int) -> tuple[int, ...]:
    """Slices spread over the batches, the first ones taking what is left over."""
    return tuple(n_slices // n_batches + (b < n_slices % n_batches) for b in range(n_batches))
