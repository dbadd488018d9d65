"""Mixed: load, project or recompute, chosen for every token, and weight slices for every batch.

Of each sequence a head lies in its home as layer inputs, from which K and V are projected again,
the middle as KV, and a tail has no home and is recomputed from its token ids: one space of which
FlexGen, TightLLM, KVPR and HybridServe are corners. What readers get wrong: the two choices differ
in when they are made. A home is chosen for the block before anything is stored (``policies.head``);
the tail is free in every step (``policies.planner``).
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from policies.drive import Decision, StepContext
from policies.head import HeadSearch, Inputs
from policies.placement import Placement
from policies.plan.memory import Buffers, place
from policies.plan.op import Op
from policies.planner import Planner
from policies.schedule import zigzag
from policies.spec.hardware import HardwareProfile
from policies.spec.model import ModelSpec
from policies.spec.workload import Block
from policies.step_ops import Zigzag

_SCHEDULE = Zigzag(input_slots=2)


@dataclass(frozen=True, slots=True)
class Mixed:
    """Settings as in ``TightLLM``; ``recompute`` off leaves loading and projecting.

    With ``feedback`` tails and slices follow what is measured; homes stay as they were chosen.
    """

    recompute: bool = True
    loader: bool = True
    n_slices: int | None = None
    bucket_tokens: int = 32
    solver: str = "auto"
    placement: str = "host"
    feedback: bool = False
    name: str = "mixed"

    def __post_init__(self) -> None:
        _ = self.planner  # checks the settings

    @property
    def planner(self) -> Planner:
        """Who decides the tails and the slices."""
        return Planner(
            _SCHEDULE, self.recompute, self.loader, self.n_slices, self.bucket_tokens,
            serial_links=False, solver=self.solver,
        )  # fmt: skip

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
        """By ``placement``, with the homes of inputs that make decode fastest."""

        def placed(held: Sequence[Block], inputs: Inputs) -> Placement:
            return place(model, hardware, held, self.buffers, mode=self.placement, inputs=inputs)

        search = HeadSearch(model, hardware, placed, self.planner)
        return placed(blocks, search.heads(blocks))

    def decide(self, ctx: StepContext) -> Decision:
        """By integer program, given what the homes hold."""
        return self.planner.decide(ctx, ctx.placement.heads(ctx.block))

    def step(self, ctx: StepContext, now: Decision, then: Decision | None) -> Iterator[Op]:
        """One step of the zig-zag schedule."""
        return zigzag(ctx, now, then, _SCHEDULE)
