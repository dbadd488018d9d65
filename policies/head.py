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

from policies.cost.model import CostModel
from policies.drive import StepContext
from policies.errors import OutOfMemory
from policies.homes import Homes
from policies.placement import Placement
from policies.plan.memory import Buffers, check_run
from policies.spec.hardware import HardwareProfile
from policies.spec.model import ModelSpec
from policies.spec.workload import Block
from policies.step_tables import StepTables

Inputs = tuple[tuple[int, ...], ...]
Place = Callable[[Sequence[Block], Inputs], Placement]

_GRID = 16  # shares of the first round
_ROUNDS = 2  # further rounds, each twice as fine around the best
_TAILS = 64  # shares of the context that may be recomputed
_BUCKET = 64  # tokens: blocks whose lengths fall into the same buckets share a choice


@dataclass(frozen=True, slots=True)
class HeadSearch:
    """Searches the share; ``place`` places blocks with given homes of inputs."""

    model: ModelSpec
    hardware: HardwareProfile
    place: Place
    buffers: Buffers
    recompute: bool

    def heads(self, blocks: Sequence[Block]) -> Inputs:
        """Tokens of each batch of each block whose homes hold layer inputs."""
        known: dict[object, float] = {}
        out = []
        for block in blocks:
            sizes = tuple((b.n_seqs, b.prompt_len // _BUCKET) for b in block.batches)
            key = (sizes, block.max_new // _BUCKET)
            if key not in known:
                known[key] = self.share(replace(block, index=0))
            out.append(heads_of(block, known[key]))
        return tuple(out)

    def share(self, block: Block) -> float:
        """The best share of a block's tokens, from 0 to 1; 0 where nothing is decoded."""
        if block.max_new < 2:
            return 0.0
        seen: dict[int, float] = {}
        finest = _GRID << _ROUNDS
        costs: dict[object, CostModel] = {}

        def seconds(step: int) -> float:
            if step not in seen:
                seen[step] = self._decode_s(block, step / finest, costs)
            return seen[step]

        tried = list(range(0, finest + 1, finest // _GRID))
        for fineness in range(1, _ROUNDS + 2):
            best = min(tried, key=seconds)  # of equal ones the least
            gap = (finest // _GRID) >> fineness
            tried = [i for i in (best - gap, best, best + gap) if gap and 0 <= i <= finest] or tried
        return min(seen, key=lambda i: (seen[i], i)) / finest

    def _decode_s(self, block: Block, share: float, costs: dict[object, CostModel]) -> float:
        """Seconds of one layer over the decode steps; infinite if the homes fit no tier."""
        heads = heads_of(block, share)
        placement = self.place([block], (heads,))
        try:
            check_run(self.model, self.hardware, placement, self.buffers, [block])
        except OutOfMemory:
            return float("inf")
        key = (placement.weights, placement.kv)
        belief = costs.setdefault(key, CostModel(self.model, self.hardware, placement))
        last = block.max_new - 1
        steps = sorted({1, (1 + last) // 2, last})
        weights = {1: (1.0,), 2: (0.5, 0.5), 3: (1 / 6, 4 / 6, 1 / 6)}[len(steps)]
        each = (self._step_s(block, step, heads, belief) for step in steps)
        return last * sum(w * s for w, s in zip(weights, each, strict=True))

    def _step_s(self, block: Block, step: int, heads: tuple[int, ...], belief: CostModel) -> float:
        homes = (Homes(),) * len(block.batches)
        ctx = StepContext(
            step, block, self.model, self.hardware, belief.placement, belief, homes, {}
        )
        tables = StepTables(
            ctx, ctx.n_ctx(), heads, attention=self.buffers.attention, n_slices=None,
            serial_links=False,
        )  # fmt: skip

        def bound_s(tail: int) -> float:
            return tables.bound_s(tuple(n * tail // _TAILS for n in ctx.n_ctx()))

        if not self.recompute:
            return bound_s(0)
        # Compute grows with the tail and transfers fall: the bound has one valley.
        low, high = 0, _TAILS
        while high - low > 2:
            left, right = low + (high - low) // 3, high - (high - low) // 3
            if bound_s(left) <= bound_s(right):
                high = right
            else:
                low = left
        return min(bound_s(tail) for tail in range(low, high + 1))


def heads_of(block: Block, share: float) -> tuple[int, ...]:
    """A share of the tokens that every sequence of a batch reaches, rounded."""
    longest = (batch.prompt_len + block.max_new - 1 for batch in block.batches)
    return tuple(round(share * tokens) for tokens in longest)
