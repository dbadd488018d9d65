"""FlexGen: a static zig-zag block schedule that drains the device after every (layer, batch).

The next layer's weights move wholly while batch 0 computes; attention and MLP count as separate
layers; every slot ends in a device-wide synchronisation (FlexLLMGen; runtimes.md section 1). As
shipped, host KV is pageable, so each load is a host copy on the issuing thread and then a DMA:
whoever compares with FlexGen compares with that. ``kv_pinned`` is the stronger baseline.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from policies.drive import Decision, StepContext
from policies.placement import Placement, flexgen_placement
from policies.plan.memory import Buffers, place
from policies.plan.op import Attention, Op
from policies.schedule import zigzag
from policies.spec.hardware import HardwareProfile
from policies.spec.model import ModelSpec
from policies.spec.workload import Block
from policies.step_ops import Zigzag


@dataclass(frozen=True, slots=True)
class FlexGen:
    """``percent``: weights, KV and activations on (GPU, CPU), rest on disk; null: all on the host.

    ``attention=cpu`` attends over host KV on the CPU in decode.
    """

    percent: tuple[float, ...] | None = None
    kv_pinned: bool = False
    sep_layer: bool = True
    fence: bool = True
    attention: str = "unfused"
    placement: str = "host"
    name: str = "flexgen"

    def __post_init__(self) -> None:
        if self.attention not in tuple(Attention):
            raise ValueError(
                f"policy.attention: {self.attention!r} is none of {', '.join(Attention)}"
            )
        if self.attention == "cpu" and not self.sep_layer:
            raise ValueError("policy.sep_layer: false must be true with policy.attention=cpu")
        if self.percent is not None:
            if self.attention == "cpu" and len(self.percent) > 2 and self.percent[2] > 0:
                raise ValueError(
                    f"policy.percent: {self.percent[2]} % of the KV on the GPU must be 0 with "
                    "policy.attention=cpu"
                )
            object.__setattr__(self, "percent", tuple(self.percent))
            if self.placement != "host":
                raise ValueError(
                    f"policy.placement: {self.placement!r} cannot be combined with policy.percent"
                )

    @property
    def schedule(self) -> Zigzag:
        """Its variant of the zig-zag schedule."""
        return Zigzag(
            sep_layer=self.sep_layer,
            fence=self.fence,
            attention=Attention(self.attention),
            kv_pinned=self.kv_pinned,
        )

    @property
    def buffers(self) -> Buffers:
        """Double buffers; a relay where KV is pageable."""
        return self.schedule.buffers

    def blocks(self, blocks: Sequence[Block]) -> tuple[Block, ...]:
        """Blocks as given."""
        return tuple(blocks)

    def place(
        self, model: ModelSpec, hardware: HardwareProfile, blocks: Sequence[Block]
    ) -> Placement:
        """By percentages as FlexGen honours them, else by ``placement``."""
        if self.percent is not None:
            return flexgen_placement(model, blocks, self.percent)
        return place(model, hardware, blocks, self.buffers, mode=self.placement)

    def decide(self, ctx: StepContext) -> Decision:
        """Load all KV; the next layer's weights, uncut, while batch 0 computes."""
        return Decision((0,) * ctx.n_batches, (1,) + (0,) * (ctx.n_batches - 1))

    def step(self, ctx: StepContext, now: Decision, then: Decision | None) -> Iterator[Op]:
        """One step of the zig-zag schedule."""
        return zigzag(ctx, now, then, self.schedule)
