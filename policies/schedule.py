"""The zig-zag block schedule: one load of a layer's weights serves every batch of the block.

For each layer, for each batch: issue the weight pieces that this batch carries (of the next layer),
the KV of the next batch, the store of the previous batch's KV, then this batch's compute. Policies
differ in the ``Decision`` they hand in and in three flags here. What readers get wrong: nothing in
this file waits. Order within a lane and slot hazards do all the waiting, and only ``fence`` adds a
device-wide synchronisation after every (layer, batch).
"""

from __future__ import annotations

from collections.abc import Iterator

from policies import slots
from policies.attend_ops import attend_op, head_op, output_ops, project_ops
from policies.drive import Decision, StepContext
from policies.plan.op import Attention, Kind, Op, Scope
from policies.slots import THREAD, Slots
from policies.step_ops import StepOps, Zigzag

_PLAIN = Zigzag()


def zigzag(
    ctx: StepContext, now: Decision, then: Decision | None, how: Zigzag = _PLAIN
) -> Iterator[Op]:
    """Ops of one step for all layers and batches of the block."""
    return _Step(ctx, now, then, how).ops()


class _Step(StepOps):
    """Emits one step."""

    # ---- the step -------------------------------------------------------------------------

    def ops(self) -> Iterator[Op]:
        """All stages in order, then the LM head."""
        if self.s == 0 and self.streamed[0]:
            yield from self.load_weights(0, 0, 0, 0, self.n_parts)
            if self.how.fence:
                yield self.fence(0, self.nb)
        pending: tuple[int, int] | None = None  # (layer, batch) whose KV is still to be stored
        for i, stage in enumerate(self.stages):
            carried = 0
            for k in range(self.nb):
                step, coming = self.coming(i)
                if coming is not None and self.streamed[coming]:
                    count = self.now.slices[k]
                    yield from self.load_weights(step, coming, k, carried, count)
                    carried += count
                yield from self.prefetch_kv(i, k)
                if self.acts_move and i > 0:
                    yield self.move_hidden(Kind.LOAD_ACT, i, k)
                if pending is not None:
                    yield from self.store_kv(*pending)
                    pending = None
                yield from self.compute(i, k)
                if self.acts_move and i + 1 < len(self.stages):
                    yield self.move_hidden(Kind.STORE_ACT, i, k)
                if stage.attends:
                    pending = (stage.layer, k)
                if self.how.fence:
                    yield self.fence(stage.layer, k, int(stage.scope is Scope.MLP))
        yield from self.head(pending)

    def coming(self, i: int) -> tuple[int, int | None]:
        """Step and stage whose weights arrive during stage i; after the last one, the next step's
        first, but between fences only behind the LM head.
        """
        if i + 1 < len(self.stages):
            return self.s, i + 1
        return self.s + 1, 0 if self.then is not None and not self.how.fence else None

    def head(self, pending: tuple[int, int] | None) -> Iterator[Op]:
        """The LM head, behind which the next step's first layer is fetched."""
        carried = 0
        for k in range(self.nb):
            if self.then is not None:
                if self.streamed[0] and self.how.fence:
                    count = self.now.slices[k]
                    yield from self.load_weights(self.s + 1, 0, k, carried, count)
                    carried += count
                if pending == (0, 0):  # one layer, one batch: stored here, loaded right below
                    yield from self.store_kv(*pending)
                    pending = None
                if k == self.nb - 1:
                    yield from self.load_kv(self.s + 1, 0, 0, self.then)
            if pending is not None:
                yield from self.store_kv(*pending)
                pending = None
            yield head_op(self, k)
            if self.how.fence:
                yield self.fence(self.n_layers, k)

    # ---- compute --------------------------------------------------------------------------

    def move_hidden(self, kind: Kind, i: int, k: int) -> Op:
        """Move a batch's hidden states where activations live on the host."""
        stage = self.stages[i]
        rows = self.n_new[k] + self.now.n_recompute[k] + self.now.n_front[k]
        home, slot = slots.host_hidden(k), slots.hidden(k)
        source, target = (home, slot) if kind is Kind.LOAD_ACT else (slot, home)
        part = int(stage.scope is Scope.MLP)
        return self.act_op(kind, stage.layer, k, part, Scope.LAYER, rows, (source,), (target,))

    def compute(self, i: int, k: int) -> Iterator[Op]:
        """One batch through one stage."""
        stage, hidden = self.stages[i], slots.hidden(k)
        reads: Slots = (self.weight_slot(self.s, i), hidden)
        writes: Slots = (hidden,)
        if self.partly_resident[i]:
            reads = (*reads, slots.resident_weights(stage.layer))
        if not self.how.kv_pinned:
            reads = (*reads, THREAD)
        if stage.attends and self.how.attention is Attention.CPU and not self.ctx.is_prefill:
            yield from self.attend_on_cpu(stage.layer, k, reads)
            return
        if stage.attends:
            writes = (hidden, self.kv_out(stage.layer, k))
            if self.kv.gpu > 0:
                resident = slots.resident_kv(stage.layer, k)
                reads = (*reads, resident)
                writes = writes if resident in writes else (*writes, resident)
            if self.kv.streamed > 0:
                reads = (*reads, *self.sources(stage.layer, k))
            if self.stores_inputs(k):
                writes = (*writes, self.inputs_out(stage.layer, k))
        attention = self.how.attention
        if attention is Attention.CPU:
            attention = Attention.UNFUSED  # the prefill of an engine that decodes on the CPU
        yield self.forward_op(stage.layer, k, stage.scope, attention, reads, writes)

    def attend_on_cpu(self, layer: int, k: int, reads: Slots) -> Iterator[Op]:
        """Project on the GPU, attend where the KV lies, bring the output back."""
        yield from project_ops(self, layer, k, reads)
        yield attend_op(self, layer, k)
        yield from output_ops(self, layer, k, reads)
