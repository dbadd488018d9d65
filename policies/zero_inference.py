"""ZeRO-Inference: weights streamed layer by layer ahead of use, one batch as large as it gets.

DeepSpeed fetches the parameters of coming layers while the current one computes and needs no
synchronisation of its own; KV stays in GPU memory, or it lies in host memory and is attended there
by the CPU (``--kv-offload``). What readers get wrong: a layer's weights move once for all sequences
of a step, so a larger batch costs the link nothing, and GPU memory, where the KV is, sets the
limit. Host memory is pinned here, which DeepSpeed leaves off by default.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

from policies.cpu_step import cpu_step, turns
from policies.drive import Decision, StepContext
from policies.placement import Placement
from policies.plan.memory import Buffers, place
from policies.plan.op import Attention, Op
from policies.schedule import zigzag
from policies.spec.hardware import HardwareProfile
from policies.spec.model import ModelSpec
from policies.spec.workload import Batch, Block
from policies.step_ops import Zigzag


@dataclass(frozen=True, slots=True)
class ZeroInference:
    """``kv``: ``gpu`` keeps it there, ``cpu`` has it in host memory, attended by the CPU in decode.

    ``batches``: ``big`` merges a block's batches into one, padded to the longest prompt; ``given``
    leaves them, and each layer serves one after another. ``attention`` is that on the GPU.
    """

    kv: str = "gpu"
    batches: str = "big"
    attention: str = "fused"
    placement: str = "host"
    name: str = "zero-inference"

    def __post_init__(self) -> None:
        for field, value, allowed in (
            ("kv", self.kv, ("gpu", "cpu")),
            ("batches", self.batches, ("big", "given")),
            ("attention", self.attention, ("fused", "unfused")),
        ):
            if value not in allowed:
                raise ValueError(
                    f"policy.{field}: {value!r} is neither {allowed[0]!r} nor {allowed[1]!r}"
                )

    @property
    def schedule(self) -> Zigzag:
        """The zig-zag schedule without fences."""
        return Zigzag(attention=Attention(self.attention))

    @property
    def buffers(self) -> Buffers:
        """Two layers of weights: one in use, one on its way."""
        return self.schedule.buffers

    def blocks(self, blocks: Sequence[Block]) -> tuple[Block, ...]:
        """Blocks as given, or with all their batches merged."""
        if self.batches == "given":
            return tuple(blocks)
        return tuple(replace(block, batches=(_merged(block.batches),)) for block in blocks)

    def place(
        self, model: ModelSpec, hardware: HardwareProfile, blocks: Sequence[Block]
    ) -> Placement:
        """Weights in host memory, KV where ``kv`` says."""
        on_gpu = self.kv == "gpu"
        return place(model, hardware, blocks, self.buffers, mode=self.placement, kv_on_gpu=on_gpu)

    def decide(self, ctx: StepContext) -> Decision:
        """Nothing to weigh: the next layer, uncut, before this one's first batch."""
        none = (0,) * ctx.n_batches
        there = (int(self.kv == "cpu" and not ctx.is_prefill),) * ctx.n_batches
        first = turns(there)[0]
        slices = tuple(int(b == first) for b in range(ctx.n_batches))
        return Decision(none, slices, on_cpu=there)

    def step(self, ctx: StepContext, now: Decision, then: Decision | None) -> Iterator[Op]:
        """One step of the schedule."""
        if self.kv == "cpu":
            return cpu_step(ctx, now, then, self.schedule)
        return zigzag(ctx, now, then, self.schedule)


def _merged(batches: Sequence[Batch]) -> Batch:
    return Batch(sum(b.n_seqs for b in batches), max(b.prompt_len for b in batches))
