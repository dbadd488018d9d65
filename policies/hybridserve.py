"""HybridServe: as many tokens as layer inputs as can be projected while a layer's weights arrive.

arXiv 2501.01792 (its abstract; code and full text were not at hand): the cache is a mix of KV and
activations in host memory, in a ratio that hides the projection behind the weight stream. What
readers get wrong: the ratio looks at weights and compute only. Where the KV takes the link longer
than the weights, more inputs would still be hidden, and ``mixed`` takes them.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from policies.drive import Decision, StepContext
from policies.fixed_head import SCHEDULE, decide_head, place_heads
from policies.head import hybridserve_share
from policies.placement import Placement
from policies.plan.memory import Buffers
from policies.plan.op import Op
from policies.schedule import zigzag
from policies.spec.hardware import HardwareProfile
from policies.spec.model import ModelSpec
from policies.spec.workload import Block


@dataclass(frozen=True, slots=True)
class HybridServe:
    """``placement`` as in ``TightLLM``."""

    placement: str = "host"
    name: str = "hybridserve"

    @property
    def buffers(self) -> Buffers:
        """Double buffers of whole layers, of KV and of layer inputs."""
        return SCHEDULE.buffers

    def blocks(self, blocks: Sequence[Block]) -> tuple[Block, ...]:
        """Blocks as given."""
        return tuple(blocks)

    def place(
        self, model: ModelSpec, hardware: HardwareProfile, blocks: Sequence[Block]
    ) -> Placement:
        """By ``placement``; the share of inputs is weight time over projection time, at most 1.

        Where an input is no smaller than KV, no token is kept as one.
        """
        return place_heads(model, hardware, blocks, self.placement, hybridserve_share)

    def decide(self, ctx: StepContext) -> Decision:
        """Nothing is recomputed; the next layer's weights move, uncut, while batch 0 computes."""
        return decide_head(ctx)

    def step(self, ctx: StepContext, now: Decision, then: Decision | None) -> Iterator[Op]:
        """One step of the zig-zag schedule without fences."""
        return zigzag(ctx, now, then, SCHEDULE)
