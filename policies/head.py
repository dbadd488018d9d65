"""How many first tokens of every batch to keep as layer inputs: decided before a block is stored.

A home is chosen once and constrains all later steps, so the share is chosen for the block: the one
with which its decode steps take least, each with the best tail recomputed, under perfect overlap.
What readers get wrong: memory takes part. Layer inputs are half of the KV of multi-head attention
and several times that of grouped-query attention, so the share decides what fits the host, and a
share that would push KV to the disk is priced with the disk.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from math import log2
from typing import NamedTuple

from policies.cost.kvpr import kvpr_split
from policies.cost.model import CostModel
from policies.drive import step_context
from policies.errors import OutOfMemory
from policies.placement import ACT_BYTES_PER_ELEM, Placement
from policies.plan.memory import check_run
from policies.plan.op import Kind, Op, Scope
from policies.planner import Planner
from policies.spec.hardware import HardwareProfile
from policies.spec.model import ModelSpec
from policies.spec.workload import Block
from policies.step_tables import StepTables

Inputs = tuple[tuple[int, ...], ...]
Place = Callable[[Sequence[Block], Inputs], Placement]

_GRID = 16  # shares of the first round
_ROUNDS = 2  # further rounds, each twice as fine around the best
_ALIKE = 1.002  # predicted steps within 0.2 % are alike
_PER_OCTAVE = 3  # lengths in an octave: blocks of about the same lengths share a choice


@dataclass(frozen=True, slots=True)
class HeadSearch:
    """Searches the share; ``place`` places blocks with given homes of inputs."""

    model: ModelSpec
    hardware: HardwareProfile
    place: Place
    planner: Planner

    def heads(self, blocks: Sequence[Block]) -> Inputs:
        """Tokens of each batch of each block whose homes hold layer inputs."""
        known: dict[object, float] = {}
        out = []
        for block in blocks:
            mean = sum(b.prompt_len for b in block.batches) / len(block.batches)
            sizes = tuple(b.n_seqs for b in block.batches)
            key = (sizes, round(_PER_OCTAVE * log2(mean)), round(_PER_OCTAVE * log2(block.max_new)))
            if key not in known:
                known[key] = self.share(replace(block, index=0))
            out.append(heads_of(block, known[key]))
        return tuple(out)

    def share(self, block: Block) -> float:
        """The best share of a block's tokens, from 0 to 1; 0 where nothing is decoded.

        The share of least bound and those of other policies are compared by a predicted step in
        the middle of the generation, because no schedule overlaps perfectly. Of steps that are
        alike the one that computes least is taken: it is the safer one if the belief is wrong.
        """
        if block.max_new < 2:
            return 0.0
        corners = self.corners(block)
        bounds = self._bounds(block, corners)
        least = min(bounds.values())
        if least == float("inf"):
            inputs = self.model.d_model * ACT_BYTES_PER_ELEM
            small = inputs < self.model.kv_bytes_per_token_layer
            return float(small)  # it fits nowhere: as little as may be, and the memory plan says so
        best = min(bounds, key=lambda share: (bounds[share], share))
        fitting = (share for share in corners if bounds[share] < float("inf"))
        tried = sorted({best, *fitting})
        if len(tried) == 1:
            return tried[0]
        found = {share: self._predicted(block, share) for share in tried}
        shortest = min(step_s for step_s, _ in found.values())
        alike = [share for share in tried if found[share][0] <= _ALIKE * shortest]
        return min(alike, key=lambda share: (found[share][1], share))

    def _bounds(self, block: Block, corners: tuple[float, ...]) -> dict[float, float]:
        """Seconds of one layer over the decode steps under perfect overlap, by share tried."""
        seen: dict[float, float] = {}
        costs: dict[object, CostModel] = {}

        def seconds(share: float) -> float:
            if share not in seen:
                seen[share] = self._decode_s(block, share, costs)
            return seen[share]

        tried = [i / _GRID for i in range(_GRID + 1)]
        gap = 1.0 / _GRID
        for _ in range(_ROUNDS):
            best = min(tried, key=seconds)  # of equal ones the least
            gap /= 2
            tried = [share for share in (best - gap, best, best + gap) if 0 <= share <= 1]
        for share in (*tried, *corners):
            seconds(share)
        return seen

    def _predicted(self, block: Block, share: float) -> tuple[float, float]:
        """Seconds of a step in the middle, and of its compute alone."""
        heads = heads_of(block, share)
        belief = CostModel(self.model, self.hardware, self.place([block], (heads,)))
        return self.planner.predicted(step_context(block.max_new // 2, block, belief), heads)

    def corners(self, block: Block) -> tuple[float, ...]:
        """Shares that other policies would take: none, KVPR's and HybridServe's."""
        belief = CostModel(self.model, self.hardware, self.place([block], ()))
        tokens = token_seconds(belief, block)
        return (0.0, kvpr_share(tokens), hybridserve_share(tokens))

    def _decode_s(self, block: Block, share: float, costs: dict[object, CostModel]) -> float:
        """Seconds of one layer over the decode steps; infinite if the homes fit no tier."""
        heads = heads_of(block, share)
        placement = self.place([block], (heads,))
        try:
            check_run(self.model, self.hardware, placement, self.planner.schedule.buffers, [block])
        except OutOfMemory:
            return float("inf")
        key = (placement.weights, placement.kv)
        if key not in costs:
            costs[key] = CostModel(self.model, self.hardware, placement)
        belief = costs[key]
        last = block.max_new - 1
        steps = sorted({1, (1 + last) // 2, last})
        weights = {1: (1.0,), 2: (0.5, 0.5), 3: (1 / 6, 4 / 6, 1 / 6)}[len(steps)]
        each = (self._step_s(block, step, heads, belief) for step in steps)
        return last * sum(w * s for w, s in zip(weights, each, strict=True))

    def _step_s(self, block: Block, step: int, heads: tuple[int, ...], belief: CostModel) -> float:
        ctx = step_context(step, block, belief)
        tables = StepTables(
            ctx, ctx.n_ctx(), heads, attention=self.planner.schedule.attention, n_slices=None,
            serial_links=False,
        )  # fmt: skip

        tails = tables.even_tails() if self.planner.distributor else (0,) * len(block.batches)
        return tables.bound_s(tails)


def heads_of(block: Block, share: float) -> tuple[int, ...]:
    """A share of the tokens that every sequence of a batch reaches, rounded."""
    longest = (batch.prompt_len + block.max_new - 1 for batch in block.batches)
    return tuple(round(share * tokens) for tokens in longest)


def kvpr_share(tokens: TokenTimes) -> float:
    """Share of the context that KVPR projects while weights are streamed."""
    split = kvpr_split(
        tokens.n_ctx,
        tokens.load_kv_s,
        tokens.load_input_s,
        tokens.project_s,
        tokens.weights_s,
        "row" if tokens.weights_s == 0 else "column",
    )
    return split.n_project / tokens.n_ctx


def hybridserve_share(tokens: TokenTimes) -> float:
    """Share of the context whose projection lasts as long as the weights; 0 if inputs are large."""
    if tokens.load_input_s >= tokens.load_kv_s:
        return 0.0
    return min(1.0, tokens.weights_s / (tokens.project_s * tokens.n_ctx))


class TokenTimes(NamedTuple):
    """Mean seconds of one cached token of all sequences of a block, in one layer.

    ``n_ctx`` is the mean context of its middle decode step; ``weights_s`` is the layer's on the
    link.
    """

    n_ctx: int
    load_kv_s: float
    load_input_s: float
    project_s: float
    weights_s: float


def token_seconds(belief: CostModel, block: Block) -> TokenTimes:
    """Times per token, each kind priced for whole batches: a copy's latency counts once."""
    step = block.max_new // 2
    n_seqs = sum(batch.n_seqs for batch in block.batches)
    rows = sum(batch.n_seqs * (batch.prompt_len + step - 1) for batch in block.batches)
    n_ctx = max(1, rows // n_seqs)
    layer = belief.heaviest_layer()

    def each(kind: Kind, scope: Scope) -> float:
        total = 0.0
        for batch in block.batches:
            tokens = batch.prompt_len + step - 1
            op = Op(kind, block.index, step, layer, scope=scope, n_seqs=batch.n_seqs, stop=tokens)
            total += belief.seconds(op)
        return total / n_ctx

    project_s = sum(
        belief.projection_seconds(batch.n_seqs * (batch.prompt_len + step - 1))
        for batch in block.batches
    )
    weights = Op(Kind.LOAD_WEIGHT, block.index, step, layer)
    return TokenTimes(
        n_ctx,
        each(Kind.LOAD_KV, Scope.LAYER),
        each(Kind.LOAD_ACT, Scope.INPUT),
        project_s / n_ctx,
        belief.seconds(weights),
    )
