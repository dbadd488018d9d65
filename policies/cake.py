"""Cake for offline jobs: recompute the front of the cache while its back is loaded.

Both ends work towards each other, a chunk at a time, and where they meet is decided by their speeds
(Cake, arXiv 2410.03065; ``policies.prefix`` has it for serving). The first tokens attend to nothing
but themselves, so a front is cheaper to recompute than a tail of the same size. What readers get
wrong: all KV is stored at home, so unlike a tail's the size of the front is free in every step; and
Cake has its weights on the GPU. Here they are on the same link, and it does not look at them: the
loading side is later than it believes, which is what ``mixed`` and ``tightllm`` plan for.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

from policies.drive import Decision, StepContext
from policies.placement import Placement
from policies.plan.memory import Buffers, place
from policies.plan.op import Kind, Op
from policies.schedule import zigzag
from policies.spec.hardware import HardwareProfile
from policies.spec.model import ModelSpec
from policies.spec.workload import Block
from policies.step_ops import Zigzag

_SCHEDULE = Zigzag()


@dataclass(frozen=True, slots=True)
class Cake:
    """``chunk_tokens``: what either end takes at a time, of every sequence of the block.

    Small beside the context, or the ends meet in a coarse place.
    """

    chunk_tokens: int = 32
    placement: str = "host"
    name: str = "cake"

    def __post_init__(self) -> None:
        if self.chunk_tokens < 1:
            raise ValueError(f"policy.chunk_tokens: {self.chunk_tokens} must be >= 1")

    @property
    def buffers(self) -> Buffers:
        """Double buffers of whole layers."""
        return _SCHEDULE.buffers

    def blocks(self, blocks: Sequence[Block]) -> tuple[Block, ...]:
        """Blocks as given."""
        return tuple(blocks)

    def place(
        self, model: ModelSpec, hardware: HardwareProfile, blocks: Sequence[Block]
    ) -> Placement:
        """By ``placement``; all KV has a home."""
        return place(model, hardware, blocks, self.buffers, mode=self.placement)

    def decide(self, ctx: StepContext) -> Decision:
        """The same front for all batches, all of the context where that is shorter."""
        none = (0,) * ctx.n_batches
        front = 0 if ctx.is_prefill else self.chunk_tokens * self._n_chunks(ctx)
        n_front = tuple(min(front, n_ctx) for n_ctx in ctx.n_ctx())
        return Decision(none, (1, *none[1:]), n_front=n_front)

    def step(self, ctx: StepContext, now: Decision, then: Decision | None) -> Iterator[Op]:
        """One step of the zig-zag schedule."""
        return zigzag(ctx, now, then, _SCHEDULE)

    def _n_chunks(self, ctx: StepContext) -> int:
        """Chunks that are computed by the time at which all behind them are loaded.

        Computing takes longer the further it gets and loading the rest less long, so where they
        meet is found by bisection. A chunk whose load would end sooner is loaded.
        """
        ends = _Ends(ctx)
        low, high = 0, -(-max(ctx.n_ctx()) // self.chunk_tokens)
        while low < high:
            middle = (low + high + 1) // 2
            front = middle * self.chunk_tokens
            if ends.compute_s(front) <= ends.load_s(front):
                low = middle
            else:
                high = middle - 1
        return low


class _Ends:
    """Seconds that each end needs for one layer of all batches."""

    def __init__(self, ctx: StepContext) -> None:
        self.seconds = ctx.belief.seconds
        # Layers cost alike but for experts, and every layer decides alike: the last stands for all.
        layer = ctx.model.n_layers - 1
        self.base = Op(Kind.FORWARD, ctx.block.index, ctx.step, layer, n_new=1)
        sizes = (batch.n_seqs for batch in ctx.block.batches)
        self.batches = Counter(zip(sizes, ctx.n_ctx(), strict=True))

    def compute_s(self, front: int) -> float:
        """What recomputing the first ``front`` tokens adds to the forwards."""
        total = 0.0
        for (n_seqs, n_ctx), times in self.batches.items():
            op = replace(self.base, n_seqs=n_seqs, n_ctx=n_ctx)
            again = replace(op, n_front=min(front, n_ctx))
            total += times * (self.seconds(again) - self.seconds(op))
        return total

    def load_s(self, front: int) -> float:
        """Loading all tokens behind ``front``, from disk and over the link at the same time."""
        link_s = disk_s = 0.0
        for (n_seqs, n_ctx), times in self.batches.items():
            op = replace(self.base, n_seqs=n_seqs, start=min(front, n_ctx), stop=n_ctx)
            link_s += times * self.seconds(replace(op, kind=Kind.LOAD_KV))
            disk_s += times * self.seconds(replace(op, kind=Kind.READ_KV))
        return max(link_s, disk_s)
