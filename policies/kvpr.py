"""KVPR: keep a head of every sequence as layer inputs, project its K and V, load the other KV.

arXiv 2411.17089. The split is a linear program in one variable, solved for the middle decode step
(``policies.cost.kvpr``). What readers get wrong: here the head's inputs are stored *instead of* its
KV, so the split is decided once, before the prompt is stored, and later tokens are stored as KV.
The paper has both and may move the split from step to step, which takes 1.5 times the host memory.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from policies.drive import Decision, StepContext
from policies.fixed_head import SCHEDULE, decide_head, place_heads
from policies.head import kvpr_share
from policies.placement import Placement
from policies.plan.memory import Buffers
from policies.plan.op import Op
from policies.schedule import zigzag
from policies.spec.hardware import HardwareProfile
from policies.spec.model import ModelSpec
from policies.spec.workload import Block


@dataclass(frozen=True, slots=True)
class Kvpr:
    """``placement`` gpu holds all weights there (row by row, for latency); host streams them layer
    by layer for all batches (column by column, for throughput).
    """

    placement: str = "host"
    name: str = "kvpr"

    def __post_init__(self) -> None:
        if self.placement not in ("host", "gpu"):
            raise ValueError(f"policy.placement: {self.placement!r} is neither 'host' nor 'gpu'")

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
        """By ``placement``, with the heads of the linear program."""
        return place_heads(model, hardware, blocks, self.placement, kvpr_share)

    def decide(self, ctx: StepContext) -> Decision:
        """Nothing is recomputed; the next layer's weights move, uncut, while batch 0 computes."""
        return decide_head(ctx)

    def step(self, ctx: StepContext, now: Decision, then: Decision | None) -> Iterator[Op]:
        """One step of the zig-zag schedule without fences."""
        return zigzag(ctx, now, then, SCHEDULE)
