"""The ops of a step: slots, op constructors and the transfers that zig-zag schedules share.

Weights move in pieces; of a batch's context, what lies in homes is loaded range by range, and what
leaves the recompute window is stored. What readers get wrong: an op of a step may be emitted in the
one before it, so every constructor takes the step that it works for.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from itertools import accumulate

from policies import slots
from policies.drive import Decision, StepContext, stored_after
from policies.homes import Held, Source
from policies.plan.memory import Buffers
from policies.plan.op import Attention, Kind, Op, Scope, Slot
from policies.slots import DISK_WEIGHTS, THREAD, Slots

MIN_SLICE_BYTES = 16 * 2**20  # of a layer's weights: below this a copy's latency shows
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
    input_slots: int = 0

    def __post_init__(self) -> None:
        if self.attention is Attention.CPU and not self.sep_layer:
            raise ValueError("attention: cpu needs sep_layer=true, attention ends its own stage")
        if self.input_slots and not self.kv_pinned:
            raise ValueError("input_slots: layer inputs need kv_pinned=true, they have no relay")

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
            self.input_slots,
        )


@dataclass(frozen=True, slots=True)
class Stage:
    """One pass over all batches: a layer, its attention, its MLP, or the LM head."""

    layer: int
    scope: Scope

    @property
    def attends(self) -> bool:
        """Whether KV is computed and used here."""
        return self.scope is Scope.LAYER or self.scope is Scope.ATTENTION


class StepOps:
    """Slots, op constructors and transfers of one step."""

    def __init__(self, ctx: StepContext, now: Decision, then: Decision | None, how: Zigzag) -> None:
        self.ctx, self.now, self.then, self.how = ctx, now, then, how
        self.g, self.s = ctx.block.index, ctx.step
        self.batches = ctx.block.batches
        self.nb = len(self.batches)
        self.n_parts = sum(now.slices)  # pieces that a stage's weights are cut into
        self.n_layers = ctx.model.n_layers
        scopes = (Scope.ATTENTION, Scope.MLP) if how.sep_layer else (Scope.LAYER,)
        self.stages = [Stage(i, scope) for i in range(self.n_layers) for scope in scopes]
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
        self.homes = ctx.homes
        after = stored_after(ctx.homes, ctx.n_ctx(self.s + 1), then) if then else ctx.homes
        self.homes_after = after
        self.acts_move = ctx.placement.act.host > 0
        self.n_ctx = ctx.n_ctx()
        self.n_new = tuple(b.prompt_len if ctx.is_prefill else 1 for b in self.batches)

    # ---- slots ----------------------------------------------------------------------------

    def weight_slot(self, step: int, i: int) -> Slot:
        """Where a stage finds its weights."""
        if not self.streamed[i]:
            return slots.resident_weights(self.stages[i].layer)
        return slots.weight_slot((step * self.n_streamed + self.turn[i]) % self.how.weight_slots)

    def kv_turn(self, step: int, layer: int, batch: int, n: int) -> int:
        """Number of a (step, layer, batch) among ``n`` buffers that take turns."""
        return ((step * self.n_layers + layer) * self.nb + batch) % n

    def kv_in(self, step: int, layer: int, batch: int) -> Slot:
        """Buffer of the KV that a batch loads."""
        return slots.kv_in(self.kv_turn(step, layer, batch, self.how.kv_in_slots))

    def kv_out(self, layer: int, batch: int) -> Slot:
        """Where a batch leaves the KV that it computes."""
        if self.kv.streamed == 0:
            return slots.resident_kv(layer, batch)
        return slots.kv_out(self.kv_turn(self.s, layer, batch, self.how.kv_out_slots))

    def host_kv(self, layer: int, batch: int) -> Slot:
        """Home of a batch's KV in host memory."""
        return slots.host_kv(layer, batch, self.how.kv_pinned)

    def inputs_in(self, step: int, layer: int, batch: int) -> Slot:
        """Buffer of the layer inputs that a batch loads."""
        return slots.inputs_in(self.kv_turn(step, layer, batch, self.how.input_slots))

    def inputs_out(self, layer: int, batch: int) -> Slot:
        """Buffer of the layer inputs that a batch stores."""
        return slots.inputs_out(self.kv_turn(self.s, layer, batch, self.how.input_slots))

    def sources(self, layer: int, k: int) -> Slots:
        """Buffers from which batch k takes its context, as far as it does not recompute it."""
        start, stop = self.now.n_front[k], self.n_ctx[k] - self.now.n_recompute[k]
        found: dict[Slot, None] = {}
        for held in self.homes[k].ranges(start, stop):
            buffer = self.kv_in if held.source is Source.KV else self.inputs_in
            found[buffer(self.s, layer, k)] = None
        return tuple(found)

    def n_project(self, k: int) -> int:
        """Tokens of batch k whose K and V this step projects from layer inputs."""
        return self.ctx.n_from(Source.INPUT, k, self.now)

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

    def input_op(
        self,
        kind: Kind,
        where: tuple[int, int, int],
        tokens: tuple[int, int],
        reads: Slots,
        writes: Slots,
        part: int,
    ) -> Op:
        """A move of a token range of one batch's layer inputs; ``where`` as in ``kv_op``.

        Hidden states and projections of a step have pieces 0 to 3.
        """
        step, layer, batch = where
        return Op(
            kind,
            self.g,
            step,
            layer,
            batch,
            4 + part,
            scope=Scope.INPUT,
            n_seqs=self.batches[batch].n_seqs,
            start=tokens[0],
            stop=tokens[1],
            reads=reads,
            writes=writes,
        )

    def forward_op(
        self, layer: int, k: int, scope: Scope, attention: Attention, reads: Slots, writes: Slots
    ) -> Op:
        """Compute of batch k: its new tokens, those recomputed, and those projected from inputs."""
        attends = scope is Scope.LAYER or scope is Scope.ATTENTION
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
            n_front=self.now.n_front[k],
            n_project=self.n_project(k) if attends and self.how.input_slots else 0,
            attention=attention,
            reads=reads,
            writes=writes,
        )

    def fence(self, layer: int, k: int, part: int = 0) -> Op:
        """A device-wide synchronisation."""
        return Op(Kind.FENCE, self.g, self.s, layer, k, part)

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
        """Load what a batch's decision does not recompute: its KV, or inputs to project it from."""
        stop = self.ctx.n_ctx(step)[batch] - decision.n_recompute[batch]
        if stop <= 0 or self.kv.streamed == 0:
            return
        # This step stores before the next one loads.
        homes = self.homes[batch] if step == self.s else self.homes_after[batch]
        for part, held in enumerate(homes.ranges(decision.n_front[batch], stop)):
            where, tokens = (step, layer, batch), (held.start, held.stop)
            if held.source is Source.INPUT:
                yield from self._load_inputs(where, tokens, part)
            else:
                stays = self.how.attention is Attention.CPU or decision.on_cpu[batch] > 0
                yield from self._load_kv(where, tokens, part, stays=stays)

    def _load_kv(
        self, where: tuple[int, int, int], tokens: tuple[int, int], part: int, *, stays: bool
    ) -> Iterator[Op]:
        _, layer, batch = where
        slot = self.kv_in(*where)
        sources: Slots = (self.host_kv(layer, batch),)
        if self.kv.disk > 0:
            staged = slots.staging(slot)
            sources = (*sources, staged)
            home = (slots.disk_kv(layer, batch),)
            yield self.kv_op(Kind.READ_KV, where, tokens, home, (staged,), (part, 1))
        if stays:
            return  # it attends where the KV lies, or was read to
        if self.how.kv_pinned:
            yield self.kv_op(Kind.LOAD_KV, where, tokens, sources, (slot,), (part, 1))
            return
        for half in (0, 1):  # two copies: the second overlaps the first transfer
            relay = slots.relay("in", slot, half)
            piece = (half, 2)
            yield self.kv_op(Kind.HOST_COPY, where, tokens, sources, (relay, THREAD), piece)
            yield self.kv_op(Kind.LOAD_KV, where, tokens, (relay,), (slot,), piece)

    def _load_inputs(
        self, where: tuple[int, int, int], tokens: tuple[int, int], part: int
    ) -> Iterator[Op]:
        _, layer, batch = where
        slot = self.inputs_in(*where)
        sources: Slots = (slots.host_inputs(layer, batch),)
        if self.kv.disk > 0:
            staged = slots.staging(slot)
            sources = (*sources, staged)
            home = (slots.disk_inputs(layer, batch),)
            yield self.input_op(Kind.READ_ACT, where, tokens, home, (staged,), part)
        yield self.input_op(Kind.LOAD_ACT, where, tokens, sources, (slot,), part)

    def stored_now(self, batch: int) -> Iterator[Held]:
        """Ranges of a batch that this step stores: what left the recompute window."""
        if self.then is not None and self.kv.streamed > 0:
            before, after = self.homes[batch], self.homes_after[batch]
            yield from after.ranges(before.n_stored, after.n_stored)

    def store_kv(self, layer: int, batch: int) -> Iterator[Op]:
        """Store what left the recompute window: nothing in the last step."""
        for part, held in enumerate(self.stored_now(batch)):
            where, tokens = (self.s, layer, batch), (held.start, held.stop)
            if held.source is Source.INPUT:
                yield from self._store_inputs(where, tokens, part)
            else:
                yield from self._store_kv(where, tokens, part)

    def _store_kv(
        self, where: tuple[int, int, int], tokens: tuple[int, int], number: int
    ) -> Iterator[Op]:
        _, layer, batch = where
        source = self.kv_out(layer, batch)
        homes: Slots = (self.host_kv(layer, batch),)
        staged = slots.staging(source)
        if self.kv.disk > 0:
            homes = (*homes, staged)
        if self.how.kv_pinned or tokens[1] - tokens[0] == 1:
            # One token is copied straight to its home, pageable or not.
            yield self.kv_op(Kind.STORE_KV, where, tokens, (source,), homes, (number, 1))
        else:
            for half in (0, 1):
                relay = slots.relay("out", source, half)
                yield self.kv_op(Kind.STORE_KV, where, tokens, (source,), (relay,), (half, 2))
                # Pieces 2 and 3: a step's copies towards the GPU have 0 and 1.
                part = (2 + half, 2)
                yield self.kv_op(Kind.HOST_COPY, where, tokens, (relay,), homes, part)
        if self.kv.disk > 0:
            home = (slots.disk_kv(layer, batch),)
            yield self.kv_op(Kind.WRITE_KV, where, tokens, (staged,), home, (number, 1))

    def _store_inputs(
        self, where: tuple[int, int, int], tokens: tuple[int, int], part: int
    ) -> Iterator[Op]:
        _, layer, batch = where
        source = self.inputs_out(layer, batch)
        homes: Slots = (slots.host_inputs(layer, batch),)
        staged = slots.staging(source)
        if self.kv.disk > 0:
            homes = (*homes, staged)
        yield self.input_op(Kind.STORE_ACT, where, tokens, (source,), homes, part)
        if self.kv.disk > 0:
            home = (slots.disk_inputs(layer, batch),)
            yield self.input_op(Kind.WRITE_ACT, where, tokens, (staged,), home, part)

    def stores_inputs(self, batch: int) -> bool:
        """Whether this step stores layer inputs of a batch."""
        return any(held.source is Source.INPUT for held in self.stored_now(batch))
