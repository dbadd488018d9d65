"""TightLLM: recompute a tail of the KV instead of loading it, and spread weight loads over batches.

Per decode step an integer program picks, for every batch, how many cached tokens to recompute from
their token ids (KV distributor) and how many pieces of the next layer's weights move while it
computes (weight loader), so that compute and transfer end together (IEEE TC 74(7), 2025). What its
summary leaves open: how decisions are compared (``policies.planner``) and shared over steps.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from policies.drive import Decision, StepContext
from policies.placement import Placement
from policies.plan.memory import Buffers, place
from policies.plan.op import Attention, Op
from policies.planner import Planner
from policies.schedule import zigzag
from policies.spec.hardware import HardwareProfile
from policies.spec.model import ModelSpec
from policies.spec.workload import Block
from policies.step_ops import Zigzag


@dataclass(frozen=True, slots=True)
class TightLLM:
    """``distributor`` and ``loader`` off are the paper's ablations.

    ``n_slices`` null: four per batch, at least 16 MiB each. Decisions are shared by steps whose
    context falls into the same bucket of ``bucket_tokens``. ``serial_links`` adds disk and H2D
    times as the paper's formula does; they are different links and overlap. With ``feedback`` the
    belief is re-fitted from what is measured (``policies.feedback``).
    """

    distributor: bool = True
    loader: bool = True
    n_slices: int | None = None
    bucket_tokens: int = 32
    serial_links: bool = False
    solver: str = "auto"
    placement: str = "host"
    attention: str = "fused"
    feedback: bool = False
    name: str = "tightllm"

    def __post_init__(self) -> None:
        if self.attention not in ("fused", "unfused"):
            raise ValueError(
                f"policy.attention: {self.attention!r} is neither 'fused' nor 'unfused'"
            )
        _ = self.planner  # checks the rest

    @property
    def schedule(self) -> Zigzag:
        """The zig-zag schedule without fences."""
        return Zigzag(attention=Attention(self.attention))

    @property
    def planner(self) -> Planner:
        """Who decides."""
        return Planner(
            self.schedule, self.distributor, self.loader, self.n_slices, self.bucket_tokens,
            self.serial_links, self.solver,
        )  # fmt: skip

    @property
    def buffers(self) -> Buffers:
        """Double buffers of whole layers."""
        return self.schedule.buffers

    def blocks(self, blocks: Sequence[Block]) -> tuple[Block, ...]:
        """Blocks as given."""
        return tuple(blocks)

    def place(
        self, model: ModelSpec, hardware: HardwareProfile, blocks: Sequence[Block]
    ) -> Placement:
        """By ``placement``."""
        return place(model, hardware, blocks, self.buffers, mode=self.placement)

    def step(self, ctx: StepContext, now: Decision, then: Decision | None) -> Iterator[Op]:
        """One step of the zig-zag schedule."""
        return zigzag(ctx, now, then, self.schedule)

    def decide(self, ctx: StepContext) -> Decision:
        """By integer program, once for all steps of a context bucket."""
        return self.planner.decide(ctx, (0,) * ctx.n_batches)
