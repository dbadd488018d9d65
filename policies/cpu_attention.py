"""CPU attention: part of a block's batches is attended on the CPU, where its KV lies.

Their KV never crosses the link; queries go out and attention's output comes back. As in FlexGen's
``cpu_cache_compute`` the CPU attends over KV in host memory, and as in NEO (MLSys 2025) only part
of the sequences goes there, as many as are hidden behind what the others need. What readers get
wrong: how fast the CPU is decides how many, not whether. Its memory is read while the link is busy
with weights and with the KV of the others.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

from policies.cpu_split import best_split
from policies.cpu_step import cpu_step, spread
from policies.drive import Decision, StepContext
from policies.placement import Placement
from policies.plan.memory import Buffers, place
from policies.plan.op import Attention, Op, Scope
from policies.spec.hardware import HardwareProfile
from policies.spec.model import ModelSpec
from policies.spec.workload import Batch, Block
from policies.step_ops import Zigzag


@dataclass(frozen=True, slots=True)
class CpuAttention:
    """``cpu_share``: share of the batches that the CPU attends, rounded; null: as many as pay.

    ``parts`` cuts every batch of a block into so many of nearly equal size, though none smaller
    than a sequence: finer shares, for more kernels. ``attention`` is that of the other batches.
    """

    cpu_share: float | None = None
    parts: int = 1
    attention: str = "fused"
    placement: str = "host"
    name: str = "cpu-attention"

    def __post_init__(self) -> None:
        if self.cpu_share is not None and not 0.0 <= self.cpu_share <= 1.0:
            raise ValueError(f"policy.cpu_share: {self.cpu_share} must be in [0, 1] or null")
        if self.parts < 1:
            raise ValueError(f"policy.parts: {self.parts} must be >= 1")
        if self.attention not in ("fused", "unfused"):
            raise ValueError(
                f"policy.attention: {self.attention!r} is neither 'fused' nor 'unfused'"
            )

    @property
    def schedule(self) -> Zigzag:
        """Buffers, and how batches attend on the GPU."""
        return Zigzag(attention=Attention(self.attention))

    @property
    def buffers(self) -> Buffers:
        """Double buffers of whole layers; queries and outputs are a token a sequence."""
        return self.schedule.buffers

    def blocks(self, blocks: Sequence[Block]) -> tuple[Block, ...]:
        """Batches cut into parts, in order."""
        return tuple(
            replace(block, batches=tuple(part for b in block.batches for part in self._cut(b)))
            for block in blocks
        )

    def _cut(self, batch: Batch) -> Iterator[Batch]:
        n = min(self.parts, batch.n_seqs)
        for i in range(n):
            n_seqs = batch.n_seqs * (i + 1) // n - batch.n_seqs * i // n
            yield replace(batch, n_seqs=n_seqs)

    def place(
        self, model: ModelSpec, hardware: HardwareProfile, blocks: Sequence[Block]
    ) -> Placement:
        """By ``placement``; all KV in host memory, what overflows it on disk."""
        return place(model, hardware, blocks, self.buffers, mode=self.placement)

    def decide(self, ctx: StepContext) -> Decision:
        """Who attends on the CPU, by the belief; the weights' slices follow from that."""
        none = (0,) * ctx.n_batches
        if ctx.is_prefill:
            return Decision(none, (1, *none[1:]))
        kv = ctx.placement.kv[ctx.block.index]
        key = (tuple(batch.n_seqs for batch in ctx.block.batches), ctx.n_ctx(), kv)
        known = ctx.memo.get(key)
        if known is None:
            known = ctx.memo[key] = self._split(ctx)
        return known

    def _split(self, ctx: StepContext) -> Decision:
        n_cpu = None if self.cpu_share is None else round(self.cpu_share * ctx.n_batches)
        split = best_split(ctx, self.schedule.attention, n_cpu)
        layer = ctx.belief.heaviest_layer()
        layer_bytes = ctx.placement.streamed_bytes(ctx.model, layer, Scope.LAYER)
        slices = spread(split.on_cpu, layer_bytes, split.cpu_bound)
        return Decision((0,) * ctx.n_batches, slices, on_cpu=split.on_cpu)

    def step(self, ctx: StepContext, now: Decision, then: Decision | None) -> Iterator[Op]:
        """One step; prefill is the plain zig-zag."""
        return cpu_step(ctx, now, then, self.schedule)
