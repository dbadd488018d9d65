"""The zig-zag block schedule: one load of a layer's weights serves every batch of the block.

For each layer, for each batch: issue the weight pieces that this batch carries (of the next layer),
the KV of the next batch, the store of the previous batch's KV, then this batch's compute. Policies
differ in the ``Decision`` they hand in and in three flags here. What readers get wrong: nothing in
this file waits. Order within a lane and slot hazards do all the waiting, and only ``fence`` adds a
device-wide synchronisation after every (layer, batch).
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from itertools import accumulate

from policies import slots
from policies.drive import Decision, StepContext
from policies.plan.memory import Buffers
from policies.plan.op import Attention, Kind, Op, Scope, Slot
from policies.slots import DISK_WEIGHTS, THREAD, Slots

RELAY_BYTES = 4 * 2**31  # FlexGen: four copy threads, each with a pinned relay buffer of 2 GiB


@dataclass(frozen=True, slots=True)
class Zigzag:
    """Variants of the schedule.

    ``sep_layer``: attention and MLP are separate layers. ``kv_pinned`` false: KV travels through a
    pinned relay by host copies, in two halves, and a load's host copy holds up the compute issued
    after it. ``attention=CPU``: decode attention runs on the CPU over the host KV.
    """

    sep_layer: bool = False
    fence: bool = False
    attention: Attention = Attention.FUSED
    kv_pinned: bool = True
    weight_slots: int = 2
    kv_in_slots: int = 2
    kv_out_slots: int = 2

    def __post_init__(self) -> None:
        if self.attention is Attention.CPU and not self.sep_layer:
            raise ValueError("attention: cpu needs sep_layer=true, attention ends its own stage")

    @property
    def buffers(self) -> Buffers:
        """What the schedule needs besides the homes of weights and KV."""
        return Buffers(
            self.weight_slots,
            self.kv_in_slots,
            self.kv_out_slots,
            self.sep_layer,
            self.attention,
            0 if self.kv_pinned else RELAY_BYTES,
        )


@dataclass(frozen=True, slots=True)
class _Stage:
    """One pass over all batches: a layer, its attention, its MLP, or the LM head."""

    layer: int
    scope: Scope

    @property
    def attends(self) -> bool:
        return self.scope is Scope.LAYER or self.scope is Scope.ATTENTION


def zigzag(
    ctx: StepContext, now: Decision, then: Decision | None, how: Zigzag = Zigzag()
) -> Iterator[Op]:
    """Ops of one step for all layers and batches of the block."""
    return _Step(ctx, now, then, how).ops()


class _Step:
    """Emits one step; holds what its ops have in common."""

    def __init__(self, ctx: StepContext, now: Decision, then: Decision | None, how: Zigzag) -> None:
        self.ctx, self.now, self.then, self.how = ctx, now, then, how
        self.g, self.s = ctx.block.index, ctx.step
        self.batches = ctx.block.batches
        self.nb = len(self.batches)
        self.n_parts = sum(now.slices)  # pieces that a stage's weights are cut into
        self.n_layers = ctx.model.n_layers
        scopes = (Scope.ATTENTION, Scope.MLP) if how.sep_layer else (Scope.LAYER,)
        self.stages = [_Stage(i, scope) for i in range(self.n_layers) for scope in scopes]
        held = {
            tier: [ctx.belief.weight_bytes(t.layer, t.scope, tier) for t in self.stages]
            for tier in ("gpu", "host", "disk")
        }
        away = zip(held["host"], held["disk"], strict=True)
        self.streamed = [on_host + on_disk > 0 for on_host, on_disk in away]
        self.from_disk = [on_disk > 0 for on_disk in held["disk"]]
        self.partly_resident = [
            streams and on_gpu > 0
            for streams, on_gpu in zip(self.streamed, held["gpu"], strict=True)
        ]
        self.n_streamed = sum(self.streamed)
        # Position of each stage among the streamed ones: consecutive loads alternate slots.
        self.turn = list(accumulate(self.streamed, initial=0))
        self.kv = ctx.placement.kv[self.g]
        self.acts_move = ctx.placement.act.host > 0
        self.n_ctx = ctx.n_ctx()
        self.n_new = tuple(b.prompt_len if ctx.is_prefill else 1 for b in self.batches)
        self.cpu_attends = how.attention is Attention.CPU and not ctx.is_prefill

    # ---- slots ----------------------------------------------------------------------------

    def weight_slot(self, step: int, i: int) -> Slot:
        if not self.streamed[i]:
            return slots.resident_weights(self.stages[i].layer)
        return slots.weight_slot((step * self.n_streamed + self.turn[i]) % self.how.weight_slots)

    def kv_turn(self, step: int, layer: int, batch: int, n: int) -> int:
        return ((step * self.n_layers + layer) * self.nb + batch) % n

    def kv_in(self, step: int, layer: int, batch: int) -> Slot:
        return slots.kv_in(self.kv_turn(step, layer, batch, self.how.kv_in_slots))

    def kv_out(self, layer: int, batch: int) -> Slot:
        if self.kv.streamed == 0:
            return slots.resident_kv(layer, batch)
        return slots.kv_out(self.kv_turn(self.s, layer, batch, self.how.kv_out_slots))

    def host_kv(self, layer: int, batch: int) -> Slot:
        return slots.host_kv(layer, batch, self.how.kv_pinned)

    # ---- ops ------------------------------------------------------------------------------

    def weight_op(
        self, kind: Kind, step: int, i: int, k: int, part: int, reads: Slots, writes: Slots
    ) -> Op:
        """A transfer of one piece of a stage's weights, carried by batch k."""
        stage = self.stages[i]
        n, scope = self.n_parts, stage.scope
        return Op(kind, self.g, step, stage.layer, k, part, n, scope, reads=reads, writes=writes)

    def kv_op(
        self,
        kind: Kind,
        where: tuple[int, int, int],
        tokens: tuple[int, int],
        reads: Slots,
        writes: Slots,
        part: tuple[int, int] = (0, 1),
    ) -> Op:
        """A move of a token range of one batch's KV; ``where`` is (step, layer, batch)."""
        step, layer, batch = where
        return Op(
            kind,
            self.g,
            step,
            layer,
            batch,
            part[0],
            part[1],
            n_seqs=self.batches[batch].n_seqs,
            start=tokens[0],
            stop=tokens[1],
            reads=reads,
            writes=writes,
        )

    def act_op(
        self, kind: Kind, layer: int, k: int, part: int, scope: Scope, rows: int,
        reads: Slots, writes: Slots,
    ) -> Op:  # fmt: skip
        """A move of ``rows`` activation vectors of each sequence of batch k."""
        return Op(
            kind,
            self.g,
            self.s,
            layer,
            k,
            part,
            scope=scope,
            n_seqs=self.batches[k].n_seqs,
            stop=rows,
            reads=reads,
            writes=writes,
        )

    def forward_op(
        self, layer: int, k: int, scope: Scope, attention: Attention, reads: Slots, writes: Slots
    ) -> Op:
        """Compute of batch k: its new tokens and those that are recomputed."""
        return Op(
            Kind.FORWARD,
            self.g,
            self.s,
            layer,
            k,
            scope=scope,
            n_seqs=self.batches[k].n_seqs,
            n_new=self.n_new[k],
            n_recompute=self.now.n_recompute[k],
            n_ctx=self.n_ctx[k],
            attention=attention,
            reads=reads,
            writes=writes,
        )

    def fence(self, layer: int, k: int, part: int = 0) -> Op:
        """A device-wide synchronisation."""
        return Op(Kind.FENCE, self.g, self.s, layer, k, part)

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
                if i + 1 < len(self.stages) and self.streamed[i + 1]:
                    count = self.now.slices[k]
                    yield from self.load_weights(self.s, i + 1, k, carried, count)
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

    def head(self, pending: tuple[int, int] | None) -> Iterator[Op]:
        """The LM head, behind which the next step's first layer is fetched."""
        carried = 0
        for k in range(self.nb):
            if self.then is not None:
                if self.streamed[0]:
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
            hidden = (slots.hidden(k),)
            yield Op(
                Kind.FORWARD,
                self.g,
                self.s,
                self.n_layers,
                k,
                scope=Scope.HEAD,
                n_seqs=self.batches[k].n_seqs,
                n_new=1,
                reads=hidden,
                writes=hidden,
            )
            if self.how.fence:
                yield self.fence(self.n_layers, k)

    # ---- weights --------------------------------------------------------------------------

    def load_weights(self, step: int, i: int, k: int, first: int, count: int) -> Iterator[Op]:
        """Pieces ``first .. first + count - 1`` of a stage's weights."""
        slot = self.weight_slot(step, i)
        # Attention and MLP of one layer are told apart by their pieces' numbers.
        offset = self.n_parts if self.stages[i].scope is Scope.MLP else 0
        for part in range(offset + first, offset + first + count):
            reads: Slots = (slots.host_weights(),)
            if self.from_disk[i]:
                staged = slots.staging(slot, part)
                reads = (slots.host_weights(), staged)
                yield self.weight_op(Kind.READ_WEIGHT, step, i, k, part, (DISK_WEIGHTS,), (staged,))
            yield self.weight_op(Kind.LOAD_WEIGHT, step, i, k, part, reads, (slot,))

    # ---- KV -------------------------------------------------------------------------------

    def prefetch_kv(self, i: int, k: int) -> Iterator[Op]:
        """The KV of the batch after this one: in this layer, or first of the next."""
        stage = self.stages[i]
        if k + 1 < self.nb:
            if stage.attends:
                yield from self.load_kv(self.s, stage.layer, k + 1, self.now)
        elif i + 1 < len(self.stages) and self.stages[i + 1].attends:
            yield from self.load_kv(self.s, self.stages[i + 1].layer, 0, self.now)

    def load_kv(self, step: int, layer: int, batch: int, decision: Decision) -> Iterator[Op]:
        """Load the front of a batch's KV that its decision does not recompute."""
        n_load = self.ctx.n_ctx(step)[batch] - decision.n_recompute[batch]
        if n_load <= 0 or self.kv.streamed == 0:
            return
        where, tokens = (step, layer, batch), (0, n_load)
        slot = self.kv_in(step, layer, batch)
        sources: Slots = (self.host_kv(layer, batch),)
        if self.kv.disk > 0:
            staged = slots.staging(slot)
            sources = (*sources, staged)
            home = (slots.disk_kv(layer, batch),)
            yield self.kv_op(Kind.READ_KV, where, tokens, home, (staged,))
        if self.how.attention is Attention.CPU:
            return  # it attends where the KV lies, or was read to
        if self.how.kv_pinned:
            yield self.kv_op(Kind.LOAD_KV, where, tokens, sources, (slot,))
            return
        for half in (0, 1):  # two copies: the second overlaps the first transfer
            relay = slots.relay("in", slot, half)
            part = (half, 2)
            yield self.kv_op(Kind.HOST_COPY, where, tokens, sources, (relay, THREAD), part)
            yield self.kv_op(Kind.LOAD_KV, where, tokens, (relay,), (slot,), part)

    def store_kv(self, layer: int, batch: int) -> Iterator[Op]:
        """Store what left the recompute window: nothing in the last step."""
        if self.then is None or self.kv.streamed == 0:
            return
        start = self.ctx.n_stored[batch]
        stop = self.ctx.n_ctx(self.s + 1)[batch] - self.then.n_recompute[batch]
        if stop <= start:
            return
        where, tokens = (self.s, layer, batch), (start, stop)
        source = self.kv_out(layer, batch)
        homes: Slots = (self.host_kv(layer, batch),)
        staged = slots.staging(source)
        if self.kv.disk > 0:
            homes = (*homes, staged)
        if self.how.kv_pinned or stop - start == 1:
            # One token is copied straight to its home, pageable or not.
            yield self.kv_op(Kind.STORE_KV, where, tokens, (source,), homes)
        else:
            for half in (0, 1):
                relay = slots.relay("out", source, half)
                yield self.kv_op(Kind.STORE_KV, where, tokens, (source,), (relay,), (half, 2))
                # Pieces 2 and 3: a step's copies towards the GPU have 0 and 1.
                part = (2 + half, 2)
                yield self.kv_op(Kind.HOST_COPY, where, tokens, (relay,), homes, part)
        if self.kv.disk > 0:
            home = (slots.disk_kv(layer, batch),)
            yield self.kv_op(Kind.WRITE_KV, where, tokens, (staged,), home)

    # ---- compute --------------------------------------------------------------------------

    def move_hidden(self, kind: Kind, i: int, k: int) -> Op:
        """Move a batch's hidden states where activations live on the host."""
        stage, rows = self.stages[i], self.n_new[k] + self.now.n_recompute[k]
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
        if stage.attends and self.cpu_attends:
            yield from self.attend_on_cpu(stage.layer, k, reads)
            return
        if stage.attends:
            writes = (hidden, self.kv_out(stage.layer, k))
            if self.kv.gpu > 0:
                resident = slots.resident_kv(stage.layer, k)
                reads = (*reads, resident)
                writes = writes if resident in writes else (*writes, resident)
            if self.kv.streamed > 0 and self.n_ctx[k] > self.now.n_recompute[k]:
                reads = (*reads, self.kv_in(self.s, stage.layer, k))
        attention = self.how.attention
        if attention is Attention.CPU:
            attention = Attention.UNFUSED  # the prefill of an engine that decodes on the CPU
        yield self.forward_op(stage.layer, k, stage.scope, attention, reads, writes)

    def attend_on_cpu(self, layer: int, k: int, reads: Slots) -> Iterator[Op]:
        """Project on the GPU, attend where the KV lies, bring the output back."""
        hidden, projected = slots.hidden(k), self.kv_out(layer, k)
        queries, output = slots.queries(k), slots.attention_output(k)
        attended = slots.attended(k)
        sources: Slots = (self.host_kv(layer, k),)
        if self.kv.disk > 0:
            read = slots.staging(self.kv_in(self.s, layer, k))
            sources = (*sources, read)
        on_cpu = Attention.CPU
        yield self.forward_op(layer, k, Scope.QKV, on_cpu, reads, (hidden, projected))
        yield self.act_op(
            Kind.STORE_ACT, layer, k, 2, Scope.QKV, 1, (hidden, projected), (queries,)
        )
        yield Op(
            Kind.CPU_ATTEND,
            self.g,
            self.s,
            layer,
            k,
            n_seqs=self.batches[k].n_seqs,
            stop=self.n_ctx[k],
            n_new=1,
            n_ctx=self.n_ctx[k],
            attention=on_cpu,
            reads=(queries, *sources),
            writes=(output,),
        )
        yield self.act_op(Kind.LOAD_ACT, layer, k, 3, Scope.OUTPUT, 1, (output,), (attended,))
        yield self.forward_op(layer, k, Scope.OUTPUT, on_cpu, (*reads, attended), (hidden,))
