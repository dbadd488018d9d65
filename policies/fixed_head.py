"""Policies whose share of layer inputs is one formula: a head of every sequence, never changed.

KVPR and HybridServe differ in the formula alone. What readers get wrong: its times are those of a
placement without inputs, so it takes no part in what they free; ``mixed`` does look (``head``).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

from policies.cost.model import CostModel
from policies.drive import Decision, StepContext, with_inputs
from policies.head import Inputs, TokenTimes, heads_of, token_seconds
from policies.placement import Placement
from policies.plan.memory import place
from policies.spec.hardware import HardwareProfile
from policies.spec.model import ModelSpec
from policies.spec.workload import Block
from policies.step_ops import Zigzag

SCHEDULE = Zigzag(input_slots=2)  # without fences; double buffers of layers, of KV and of inputs


def place_heads(
    model: ModelSpec,
    hardware: HardwareProfile,
    blocks: Sequence[Block],
    mode: str,
    share: Callable[[TokenTimes], float],
) -> Placement:
    """By ``mode``; of each block the first ``share(times of a token)`` lie as layer inputs.

    A block without a decode step keeps none.
    """

    def placed(inputs: Inputs) -> Placement:
        return place(model, hardware, blocks, SCHEDULE.buffers, mode=mode, inputs=inputs)

    belief = CostModel(model, hardware, placed(()))
    return placed(
        tuple(
            (0,) * len(block.batches)
            if block.max_new < 2
            else heads_of(block, share(token_seconds(belief, block)))
            for block in blocks
        )
    )


def decide_head(ctx: StepContext) -> Decision:
    """Nothing is recomputed; the next layer's weights move, uncut, while batch 0 computes."""
    n = ctx.n_batches
    whole = Decision((0,) * n, (1,) + (0,) * (n - 1))
    return with_inputs(whole, ctx.placement.heads(ctx.block), ctx.n_stored, ctx.n_ctx())
