"""HybridServe: as many tokens as layer inputs as can be projected while a layer's weights arrive.

arXiv 2501.01792 (its abstract; code and full text were not at hand): the cache is a mix of KV and
activations in host memory, in a ratio that hides the projection behind the weight stream. What
readers get wrong: the ratio looks at weights and compute only. Where the KV takes the link longer
than the weights, more inputs would still be hidden, and ``mixed`` takes them.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from policies.cost.model import CostModel
from policies.drive import Decision, StepContext, with_inputs
from policies.head import Inputs, heads_of, hybridserve_share, token_seconds
from policies.placement import Placement
from policies.plan.memory import Buffers, place
from policies.plan.op import Op
from policies.schedule import zigzag
from policies.spec.hardware import HardwareProfile
from policies.spec.model import ModelSpec
from policies.spec.workload import Block
from policies.step_ops import Zigzag

_SCHEDULE = Zigzag(input_slots=2)


@dataclass(frozen=True, slots=True)
class HybridServe:
    """``placement`` as in ``TightLLM``."""

    placement: str = "host"
    name: str = "hybridserve"

    @property
    def buffers(self) -> Buffers:
        """Double buffers of whole layers, of KV and of layer inputs."""
        return _SCHEDULE.buffers

    def blocks(self, blocks: Sequence[Block]) -> tuple[Block, ...]:
        """Blocks as given."""
        return tuple(blocks)

    def place(
        self, model: ModelSpec, hardware: HardwareProfile, blocks: Sequence[Block]
    ) -> Placement:
        """By ``placement``; the share of inputs is weight time over projection time, at most 1.

        Where an input is no smaller than KV, no token is kept as one.
        """

        def placed(inputs: Inputs) -> Placement:
            return place(model, hardware, blocks, self.buffers, mode=self.placement, inputs=inputs)

        belief = CostModel(model, hardware, placed(()))
        return placed(tuple(_heads(belief, block) for block in blocks))

    def decide(self, ctx: StepContext) -> Decision:
        """Nothing is recomputed; the next layer's weights move, uncut, while batch 0 computes."""
        n = ctx.n_batches
        heads = ctx.placement.inputs[ctx.block.index]
        return with_inputs(
            Decision((0,) * n, (1,) + (0,) * (n - 1)), heads, ctx.n_stored, ctx.n_ctx()
        )

    def step(self, ctx: StepContext, now: Decision, then: Decision | None) -> Iterator[Op]:
        """One step of the zig-zag schedule without fences."""
        return zigzag(ctx, now, then, _SCHEDULE)


def _heads(belief: CostModel, block: Block) -> tuple[int, ...]:
    if block.max_new < 2:
        return (0,) * len(block.batches)
    return heads_of(block, hybridserve_share(token_seconds(belief, block)))
