"""TightLLM: recompute a tail of the KV instead of loading it, and spread weight loads over batches.

Per decode step an integer program picks, for every batch, how many cached tokens to recompute from
their token ids (KV distributor) and how many pieces of the next layer's weights move while it
computes (weight loader), so that compute and transfer end together (IEEE TC 74(7), 2025). What its
summary leaves open: the objective is a sum over batches of a maximum, which is exact for a schedule
that synchronises after every batch. This one does not, so among the program's optimum and those of
its restrictions the decision with the shortest predicted time of a few layers is taken.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import chain

from policies.cost.model import CostModel
from policies.drive import Decision, StepContext
from policies.ilp import plan
from policies.placement import Placement
from policies.plan.link import link
from policies.plan.memory import Buffers, place
from policies.plan.op import Attention, Kind, Op, Scope
from policies.plan.predict import predict
from policies.schedule import Zigzag, zigzag
from policies.slot_problem import SlotProblem, Solution
from policies.solver import SOLVERS
from policies.spec.hardware import HardwareProfile
from policies.spec.model import ModelSpec
from policies.spec.workload import Block

_MIN_SLICE_BYTES = 16 * 2**20  # below this a copy's latency shows
_PREDICTED_LAYERS = 8  # layers of the shorter model that predicts a step


@dataclass(frozen=True, slots=True)
class TightLLM:
    """``distributor`` and ``loader`` off are the paper's ablations.

    ``n_slices`` null: four per batch, at least 16 MiB each. Decisions are shared by steps whose
    context falls into the same bucket of ``bucket_tokens``. ``serial_links`` adds disk and H2D
    times as the paper's formula does; they are different links and overlap.
    """

    distributor: bool = True
    loader: bool = True
    n_slices: int | None = None
    bucket_tokens: int = 32
    serial_links: bool = False
    solver: str = "auto"
    placement: str = "host"
    attention: str = "fused"
    name: str = "tightllm"

    def __post_init__(self) -> None:
        if self.attention not in ("fused", "unfused"):
            raise ValueError(
                f"policy.attention: {self.attention!r} is neither 'fused' nor 'unfused'"
            )
        if self.n_slices is not None and self.n_slices < 1:
            raise ValueError(f"policy.n_slices: {self.n_slices} must be >= 1 or null")
        if self.solver not in SOLVERS:
            raise ValueError(f"policy.solver: {self.solver!r} is none of {', '.join(SOLVERS)}")
        if self.bucket_tokens < 1:
            raise ValueError(f"policy.bucket_tokens: {self.bucket_tokens} must be >= 1")

    @property
    def schedule(self) -> Zigzag:
        """The zig-zag schedule without fences."""
        return Zigzag(attention=Attention(self.attention))

    @property
    def buffers(self) -> Buffers:
        """Double buffers of whole layers."""
        return self.schedule.buffers

    def blocks(self, blocks: Sequence[Block]) -> tuple[Block, ...]:
        """Blocks as given."""
        return tuple(blocks)

    def place(
        self, model: ModelSpec, hardware: HardwareProfile, blocks: Sequence[Block]
    ) -> Placement:
        """By ``placement``."""
        return place(model, hardware, blocks, self.buffers, mode=self.placement)

    def step(self, ctx: StepContext, now: Decision, then: Decision | None) -> Iterator[Op]:
        """One step of the zig-zag schedule."""
        return zigzag(ctx, now, then, self.schedule)

    # ---- decisions ------------------------------------------------------------------------

    def decide(self, ctx: StepContext) -> Decision:
        """The decision for a step, solved once for all steps of a context bucket."""
        context = tuple(self._bucket(n) for n in ctx.n_ctx())
        kv = ctx.placement.kv[ctx.block.index]
        # A decode step sees a prompt as context: blocks of equal batches share their decisions.
        batches = ctx.block.batches
        sizes = batches if ctx.is_prefill else tuple(batch.n_seqs for batch in batches)
        key = (ctx.is_prefill, sizes, context, kv)
        decision = known = ctx.memo.get(key)
        if decision is None:
            decision = self._solve(ctx, context)
            ctx.memo[key] = Decision(decision.n_recompute, decision.slices, decision.solver)
        # All of a bucket's context means all of each step's: a few loaded tokens save nothing.
        chosen = zip(decision.n_recompute, context, ctx.n_ctx(), strict=True)
        n_recompute = tuple(n_ctx if n == known_ctx else n for n, known_ctx, n_ctx in chosen)
        spent = decision.solve_s if known is None else 0.0
        return Decision(n_recompute, decision.slices, decision.solver, spent)

    def _bucket(self, n_ctx: int) -> int:
        return n_ctx - n_ctx % self.bucket_tokens if n_ctx >= self.bucket_tokens else n_ctx

    def _solve(self, ctx: StepContext, context: tuple[int, ...]) -> Decision:
        tables = _Tables(self, ctx, context)
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
        horizon = _Horizon(self.schedule, ctx)
        best = min(decisions, key=horizon.step_s)
        return Decision(best.n_recompute, best.slices, best.solver, spent)


class _Horizon:
    """Predicts the length of a step under a decision by running a shorter model through it.

    A step is layers, all alike, and an edge: its first layers find their inputs fetched, its last
    ones have nothing to fetch for, and no batch starts before its last token is sampled. So a few
    layers are run for two steps and the length is extended to the model's depth.
    """

    def __init__(self, schedule: Zigzag, ctx: StepContext) -> None:
        self.schedule = schedule
        self.depth = ctx.model.n_layers
        alike = len(set(ctx.placement.weights)) == 1 and not (
            ctx.model.n_experts and ctx.model.n_dense_layers
        )
        if alike and self.depth > _PREDICTED_LAYERS:
            model = replace(ctx.model, n_layers=_PREDICTED_LAYERS)
            placement = replace(ctx.placement, weights=ctx.placement.weights[:_PREDICTED_LAYERS])
            belief = CostModel(model, ctx.hardware, placement)
            ctx = replace(ctx, model=model, placement=placement, belief=belief)
        self.ctx = ctx

    def step_s(self, decision: Decision) -> float:
        """Seconds from the end of one step to the end of the next, all deciding the same."""
        first = self._context(self.ctx.step, decision)
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
        reach = zip(ctx.n_ctx(), decision.n_recompute, strict=True)
        return replace(ctx, n_stored=tuple(n_ctx - n_recompute for n_ctx, n_recompute in reach))


class _Tables:
    """Tabulated costs of a step's slots: what the integer program knows."""

    def __init__(self, policy: TightLLM, ctx: StepContext, context: tuple[int, ...]) -> None:
        self.policy, self.ctx, self.context = policy, ctx, context
        model, placement = ctx.model, ctx.placement
        sizes = [placement.streamed_bytes(model, i, Scope.LAYER) for i in range(model.n_layers)]
        self.layer = max(range(model.n_layers), key=sizes.__getitem__)
        self.n_slices = 0
        if sizes[self.layer]:
            wanted = policy.n_slices or 4 * ctx.n_batches
            self.n_slices = max(1, min(wanted, sizes[self.layer] // _MIN_SLICE_BYTES))

    def sliced(self, candidates: tuple[tuple[int, ...], ...]) -> SlotProblem:
        """Pieces of the layer's weights are free to move in any slot."""
        return self._problem(candidates, self.n_slices)

    def unsliced(self, candidates: tuple[tuple[int, ...], ...]) -> SlotProblem:
        """The whole layer moves in batch 0's slot, beside the KV of the batch after it."""
        return self._problem(candidates, 0)

    def _problem(self, candidates: tuple[tuple[int, ...], ...], n_slices: int) -> SlotProblem:
        n = len(self.context)
        h2d = [[self._kv_s(Kind.LOAD_KV, b, c) for c in candidates[b]] for b in range(n)]
        disk = [[self._kv_s(Kind.READ_KV, b, c) for c in candidates[b]] for b in range(n)]
        if not n_slices:
            after = 1 % n
            h2d[after] = [t + self._weight_s(Kind.LOAD_WEIGHT, 1) for t in h2d[after]]
            disk[after] = [t + self._weight_s(Kind.READ_WEIGHT, 1) for t in disk[after]]
        return SlotProblem(
            candidates=candidates,
            compute_s=tuple(tuple(self._compute_s(b, c) for c in candidates[b]) for b in range(n)),
            kv_h2d_s=tuple(map(tuple, h2d)),
            kv_disk_s=tuple(map(tuple, disk)),
            slice_h2d_s=self._weight_s(Kind.LOAD_WEIGHT, n_slices) if n_slices else 0.0,
            slice_disk_s=self._weight_s(Kind.READ_WEIGHT, n_slices) if n_slices else 0.0,
            n_slices=n_slices,
            serial_links=self.policy.serial_links,
        )

    def _compute_s(self, b: int, n_recompute: int) -> float:
        batch = self.ctx.block.batches[b]
        return self.ctx.belief.seconds(
            Op(
                Kind.FORWARD,
                self.ctx.block.index,
                self.ctx.step,
                self.layer,
                n_seqs=batch.n_seqs,
                n_new=batch.prompt_len if self.ctx.is_prefill else 1,
                n_recompute=n_recompute,
                n_ctx=self.context[b],
                attention=Attention(self.policy.attention),
            )
        )

    def _kv_s(self, kind: Kind, b: int, n_recompute: int) -> float:
        n_seqs = self.ctx.block.batches[b].n_seqs
        load = self.context[b] - n_recompute
        g, s = self.ctx.block.index, self.ctx.step
        return self.ctx.belief.seconds(Op(kind, g, s, self.layer, n_seqs=n_seqs, stop=load))

    def _weight_s(self, kind: Kind, n_parts: int) -> float:
        g, s = self.ctx.block.index, self.ctx.step
        return self.ctx.belief.seconds(Op(kind, g, s, self.layer, n_parts=n_parts))
