"""Hugging Face Accelerate: weights of each module on demand, nothing overlaps.

A hook copies a module's weights to the GPU right before its forward, from pageable memory, and
drops them after it (accelerate ``AlignDevicesHook``; runtimes.md section 1). KV stays on the GPU.
One weight slot makes the alternation: a load waits for the forward that still reads the slot.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

from policies import slots
from policies.drive import Decision, StepContext
from policies.placement import Placement
from policies.plan.memory import Buffers, place
from policies.plan.op import Attention, Kind, Op, Scope
from policies.spec.hardware import HardwareProfile
from policies.spec.model import ModelSpec
from policies.spec.workload import Batch, Block

_SLOT = slots.weight_slot(0)


@dataclass(frozen=True, slots=True)
class Accelerate:
    """``batches``: ``seq`` runs a block's batches one after another, ``big`` as one big batch.

    ``pinned`` pins the host weights, which Accelerate itself does not do.
    """

    batches: str = "seq"
    pinned: bool = False
    placement: str = "host"
    attention: str = "fused"
    name: str = "accelerate"

    def __post_init__(self) -> None:
        if self.batches not in ("seq", "big"):
            raise ValueError(f"policy.batches: {self.batches!r} is neither 'seq' nor 'big'")
        if self.attention not in ("fused", "unfused"):
            raise ValueError(
                f"policy.attention: {self.attention!r} is neither 'fused' nor 'unfused'"
            )

    @property
    def buffers(self) -> Buffers:
        """One slot for the module in use; KV needs no transfer slots."""
        return Buffers(
            weight_slots=1,
            kv_in_slots=0,
            kv_out_slots=0,
            sep_layer=True,
            attention=Attention(self.attention),
        )

    def blocks(self, blocks: Sequence[Block]) -> tuple[Block, ...]:
        """One batch a block: each batch alone, or all of a block's batches merged."""
        out: list[Block] = []
        for block in blocks:
            if self.batches == "seq":
                groups = [(batch,) for batch in block.batches]
            else:
                n = sum(batch.n_seqs for batch in block.batches)
                groups = [(Batch(n, max(batch.prompt_len for batch in block.batches)),)]
            for group in groups:
                out.append(replace(block, index=len(out), batches=group))
        return tuple(out)

    def place(
        self, model: ModelSpec, hardware: HardwareProfile, blocks: Sequence[Block]
    ) -> Placement:
        """Weights in host memory, KV on the GPU."""
        return place(model, hardware, blocks, self.buffers, mode=self.placement, kv_on_gpu=True)

    def decide(self, ctx: StepContext) -> Decision:
        """Nothing to decide."""
        return Decision((0,) * ctx.n_batches, (1,) + (0,) * (ctx.n_batches - 1))

    def step(
        self,
        ctx: StepContext,
        now: Decision,  # noqa: ARG002
        then: Decision | None,  # noqa: ARG002
    ) -> Iterator[Op]:
        """Load, compute, load, compute: there is nothing that a decision could change."""
        for batch in range(ctx.n_batches):
            yield from self._forward(ctx, batch)

    def _forward(self, ctx: StepContext, b: int) -> Iterator[Op]:
        g, s, batch = ctx.block.index, ctx.step, ctx.block.batches[b]
        hidden = slots.hidden(b)
        for layer in range(ctx.model.n_layers):
            for part, scope in enumerate((Scope.ATTENTION, Scope.MLP)):
                weights = slots.resident_weights(layer)
                if ctx.placement.streamed_bytes(ctx.model, layer, scope):
                    weights = _SLOT
                    yield from self._load(ctx, layer, b, part, scope)
                touched: slots.Slots = (hidden,)
                if scope is Scope.ATTENTION:
                    touched = (hidden, slots.resident_kv(layer, b))
                yield Op(
                    Kind.FORWARD,
                    g,
                    s,
                    layer,
                    b,
                    scope=scope,
                    n_seqs=batch.n_seqs,
                    n_new=batch.prompt_len if ctx.is_prefill else 1,
                    n_ctx=ctx.n_ctx()[b],
                    attention=Attention(self.attention),
                    reads=(weights, *touched),
                    writes=touched,
                )
        yield Op(
            Kind.FORWARD,
            g,
            s,
            ctx.model.n_layers,
            b,
            scope=Scope.HEAD,
            n_seqs=batch.n_seqs,
            n_new=1,
            reads=(hidden,),
            writes=(hidden,),
        )

    def _load(self, ctx: StepContext, layer: int, b: int, part: int, scope: Scope) -> Iterator[Op]:
        """The module's weights: from disk first where that is their home."""
        g, s = ctx.block.index, ctx.step
        source = slots.host_weights(self.pinned)
        if ctx.placement.weight_bytes(ctx.model, layer, scope, "disk"):
            source = slots.staging(_SLOT)._replace(pinned=self.pinned)
            yield Op(
                Kind.READ_WEIGHT,
                g,
                s,
                layer,
                b,
                part,
                scope=scope,
                reads=(slots.DISK_WEIGHTS,),
                writes=(source,),
            )
        yield Op(
            Kind.LOAD_WEIGHT,
            g,
            s,
            layer,
            b,
            part,
            scope=scope,
            # Copies and kernels share a stream: a load waits for the LM head, which reads no slot.
            reads=(source, slots.hidden(b)),
            writes=(_SLOT,),
        )
