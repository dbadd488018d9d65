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

from policies.drive import Decision, StepContext
from policies.plan.op import Attention, Kind, Op, Scope, Slot, Tier

THREAD = Slot("issuing thread", Tier.HOST)  # a pageable copy occupies the thread that issues work


@dataclass(frozen=True, slots=True)
class Zigzag:
    """Variants of the schedule.

    ``sep_layer``: attention and MLP are separate layers. ``kv_pinned`` false: KV travels through a
    pinned relay by host copies, keys and values apart, and a load's host copy holds up the compute
    issued after it. ``attention=CPU``: decode attention runs on the CPU over the host KV.
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
        self.n_layers = ctx.model.n_layers
        scopes = (Scope.ATTENTION, Scope.MLP) if how.sep_layer else (Scope.LAYER,)
        self.stages = [_Stage(i, scope) for i in range(self.n_layers) for scope in scopes]
        placement, model = ctx.placement, ctx.model
        self.streamed = [
            placement.streamed_bytes(model, stage.layer, stage.scope) > 0 for stage in self.stages
        ]
        self.from_disk = [
            placement.weight_bytes(model, stage.layer, stage.scope, "disk") > 0
            for stage in self.stages
        ]
        self.n_streamed = sum(self.streamed)
        # Position of each stage among the streamed ones: consecutive loads alternate slots.
        self.turn = [sum(self.streamed[:i]) for i in range(len(self.stages))]
        self.kv = placement.kv[self.g]
        self.acts_move = placement.act.host > 0
        self.n_ctx = ctx.n_ctx()
        self.n_new = tuple(b.prompt_len if ctx.is_prefill else 1 for b in self.batches)
        self.cpu_attends = how.attention is Attention.CPU and not ctx.is_prefill

    # ---- slots ----------------------------------------------------------------------------

    def weight_slot(self, step: int, i: int) -> Slot:
        if not self.streamed[i]:
            return Slot(f"gpu/weights/l{self.stages[i].layer}", Tier.GPU)
        turn = (step * self.n_streamed + self.turn[i]) % self.how.weight_slots
        return Slot(f"gpu/weight slot/{turn}", Tier.GPU)

    def kv_turn(self, step: int, layer: int, batch: int, n: int) -> int:
        return ((step * self.n_layers + layer) * self.nb + batch) % n

    def kv_in(self, step: int, layer: int, batch: int) -> Slot:
        turn = self.kv_turn(step, layer, batch, self.how.kv_in_slots)
        return Slot(f"gpu/kv in/{turn}", Tier.GPU)

    def kv_out(self, layer: int, batch: int) -> Slot:
        if self.kv.streamed == 0:
            return self.resident_kv(layer, batch)
        turn = self.kv_turn(self.s, layer, batch, self.how.kv_out_slots)
        return Slot(f"gpu/kv out/{turn}", Tier.GPU)

    @staticmethod
    def resident_kv(layer: int, batch: int) -> Slot:
        return Slot(f"gpu/kv/l{layer}/b{batch}", Tier.GPU)

    def host_kv(self, layer: int, batch: int) -> Slot:
        return Slot(f"host/kv/l{layer}/b{batch}", Tier.HOST, self.how.kv_pinned)

    @staticmethod
    def disk_kv(layer: int, batch: int) -> Slot:
        return Slot(f"disk/kv/l{layer}/b{batch}", Tier.DISK)

    def hidden(self, batch: int) -> Slot:
        return Slot(f"gpu/hidden/b{batch}", Tier.GPU)

    # ---- the step -------------------------------------------------------------------------

    def ops(self) -> Iterator[Op]:
        if self.s == 0 and self.streamed[0]:
            yield from self.load_weights(0, 0, 0, 0, sum(self.now.slices))
            if self.how.fence:
                yield Op(Kind.FENCE, self.g, 0, 0, self.nb)
        pending: tuple[int, int] | None = None  # (layer, batch) whose KV is still to be stored
        for i, stage in enumerate(self.stages):
            carried = 0
            for k in range(self.nb):
                yield from self.carry_weights(i, k, carried)
                carried += self.now.slices[k]
                yield from self.prefetch_kv(i, k)
                yield from self.load_hidden(i, k)
                if pending is not None:
                    yield from self.store_kv(*pending)
                    pending = None
                yield from self.compute(i, k)
                if stage.attends:
                    pending = (stage.layer, k)
                if self.how.fence:
                    part = 1 if stage.scope is Scope.MLP else 0
                    yield Op(Kind.FENCE, self.g, self.s, stage.layer, k, part)
        yield from self.head(pending)

    def head(self, pending: tuple[int, int] | None) -> Iterator[Op]:
        """The LM head, behind which the next step's first layer is fetched."""
        carried = 0
        for k in range(self.nb):
            if self.then is not None:
                if self.streamed[0]:
                    n = self.now.slices[k]
                    yield from self.load_weights(self.s + 1, 0, k, carried, n)
                    carried += n
                if k == self.nb - 1:
                    yield from self.load_kv(self.s + 1, 0, 0, self.then)
            if pending is not None:
                yield from self.store_kv(*pending)
                pending = None
            hidden = (self.hidden(k),)
            yield Op(Kind.FORWARD, self.g, self.s, self.n_layers, k, scope=Scope.HEAD,
                     n_seqs=self.batches[k].n_seqs, n_new=1, reads=hidden, writes=hidden)  # fmt: skip
            if self.how.fence:
                yield Op(Kind.FENCE, self.g, self.s, self.n_layers, k)

    # ---- weights --------------------------------------------------------------------------

    def carry_weights(self, i: int, k: int, carried: int) -> Iterator[Op]:
        """The pieces of the next stage's weights that batch k carries."""
        if i + 1 < len(self.stages) and self.streamed[i + 1]:
            yield from self.load_weights(self.s, i + 1, k, carried, self.now.slices[k])

    def load_weights(self, step: int, i: int, k: int, first: int, count: int) -> Iterator[Op]:
        stage, n_parts = self.stages[i], sum(self.now.slices)
        offset = n_parts if stage.scope is Scope.MLP else 0
        slot = self.weight_slot(step, i)
        pool = Slot("host/weights", Tier.HOST)
        for piece in range(first, first + count):
            part, reads = offset + piece, (pool,)
            if self.from_disk[i]:
                staged = Slot(f"host/staging/{slot.name}/{part}", Tier.HOST)
                yield Op(Kind.READ_WEIGHT, self.g, step, stage.layer, k, part, n_parts,
                         stage.scope, reads=(Slot("disk/weights", Tier.DISK),),
                         writes=(staged,))  # fmt: skip
                reads = (pool, staged)
            yield Op(Kind.LOAD_WEIGHT, self.g, step, stage.layer, k, part, n_parts, stage.scope,
                     reads=reads, writes=(slot,))  # fmt: skip

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
        if n_load <= 0 or self.kv.streamed == 0 or (self.how.attention is Attention.CPU and step):
            return
        ids = (self.g, step, layer, batch)
        amount = {"n_seqs": self.batches[batch].n_seqs, "stop": n_load}
        host, slot = self.host_kv(layer, batch), self.kv_in(step, layer, batch)
        sources: tuple[Slot, ...] = (host,)
        if self.kv.disk > 0:
            staged = Slot(f"host/staging/{slot.name}", Tier.HOST)
            yield Op(Kind.READ_KV, *ids, **amount, reads=(self.disk_kv(layer, batch),),
                     writes=(staged,))  # fmt: skip
            sources = (host, staged)
        if self.how.kv_pinned:
            yield Op(Kind.LOAD_KV, *ids, **amount, reads=sources, writes=(slot,))
            return
        for half in (0, 1):  # keys, then values: the second copy overlaps the first transfer
            relay = Slot(f"host/relay in/{slot.name}/{half}", Tier.HOST)
            yield Op(Kind.HOST_COPY, *ids, half, 2, **amount, reads=sources,
                     writes=(relay, THREAD))  # fmt: skip
            yield Op(Kind.LOAD_KV, *ids, half, 2, **amount, reads=(relay,), writes=(slot,))

    def store_kv(self, layer: int, batch: int) -> Iterator[Op]:
        """Store what left the recompute window: nothing in the last step."""
        if self.then is None or self.kv.streamed == 0:
            return
        start = self.ctx.n_stored[batch]
        stop = self.ctx.n_ctx(self.s + 1)[batch] - self.then.n_recompute[batch]
        if stop <= start:
            return
        ids = (self.g, self.s, layer, batch)
        amount = {"n_seqs": self.batches[batch].n_seqs, "start": start, "stop": stop}
        source, home = self.kv_out(layer, batch), self.host_kv(layer, batch)
        homes: tuple[Slot, ...] = (home,)
        staged = Slot(f"host/staging/{source.name}", Tier.HOST)
        if self.kv.disk > 0:
            homes = (home, staged)
        if self.how.kv_pinned or stop - start == 1:
            # One token is copied straight to its home, pageable or not.
            yield Op(Kind.STORE_KV, *ids, **amount, reads=(source,), writes=homes)
        else:
            for half in (0, 1):
                relay = Slot(f"host/relay out/{source.name}/{half}", Tier.HOST)
                yield Op(Kind.STORE_KV, *ids, half, 2, **amount, reads=(source,), writes=(relay,))
                yield Op(Kind.HOST_COPY, *ids, 2 + half, 2, **amount, reads=(relay,),
                         writes=homes)  # fmt: skip
        if self.kv.disk > 0:
            yield Op(Kind.WRITE_KV, *ids, **amount, reads=(staged,),
                     writes=(self.disk_kv(layer, batch),))  # fmt: skip

    # ---- compute --------------------------------------------------------------------------

    def load_hidden(self, i: int, k: int) -> Iterator[Op]:
        """Fetch a batch's hidden states where activations live on the host."""
        if self.acts_move and i > 0:
            yield self.move_hidden(Kind.LOAD_ACT, self.stages[i], k)

    def move_hidden(self, kind: Kind, stage: _Stage, k: int) -> Op:
        home, slot = Slot(f"host/hidden/b{k}", Tier.HOST), self.hidden(k)
        load = kind is Kind.LOAD_ACT
        part = 1 if stage.scope is Scope.MLP else 0
        rows = self.n_new[k] + self.now.n_recompute[k]
        return Op(kind, self.g, self.s, stage.layer, k, part, n_seqs=self.batches[k].n_seqs,
                  stop=rows, reads=(home if load else slot,),
                  writes=(slot if load else home,))  # fmt: skip

    def compute(self, i: int, k: int) -> Iterator[Op]:
        stage = self.stages[i]
        weights, hidden = self.weight_slot(self.s, i), self.hidden(k)
        amount = {
            "n_seqs": self.batches[k].n_seqs,
            "n_new": self.n_new[k],
            "n_recompute": self.now.n_recompute[k],
            "n_ctx": self.n_ctx[k],
        }
        ids = (self.g, self.s, stage.layer, k)
        reads, writes = [weights, hidden], [hidden]
        if self.streamed[i] and self.ctx.placement.weight_bytes(
            self.ctx.model, stage.layer, stage.scope, "gpu"
        ):
            reads.append(Slot(f"gpu/weights/l{stage.layer}", Tier.GPU))
        if not self.how.kv_pinned:
            reads.append(THREAD)
        if stage.attends and self.cpu_attends:
            yield from self.attend_on_cpu(ids, amount, tuple(reads))
        else:
            if stage.attends:
                writes.append(self.kv_out(stage.layer, k))
                if self.kv.gpu > 0:
                    resident = self.resident_kv(stage.layer, k)
                    reads.append(resident)
                    if resident not in writes:
                        writes.append(resident)
                if self.kv.streamed > 0 and self.n_ctx[k] > self.now.n_recompute[k]:
                    reads.append(self.kv_in(self.s, stage.layer, k))
            attention = self.how.attention
            if attention is Attention.CPU:
                attention = Attention.UNFUSED  # prefill of an engine that attends on the CPU
            yield Op(Kind.FORWARD, *ids, scope=stage.scope, attention=attention, **amount,
                     reads=tuple(reads), writes=tuple(writes))  # fmt: skip
        if self.acts_move and i + 1 < len(self.stages):
            yield self.move_hidden(Kind.STORE_ACT, stage, k)

    def attend_on_cpu(
        self, ids: tuple[int, int, int, int], amount: dict[str, int], reads: tuple[Slot, ...]
    ) -> Iterator[Op]:
        """Project on the GPU, attend where the KV lies, bring the output back."""
        layer, k = ids[2], ids[3]
        hidden, n_seqs = self.hidden(k), amount["n_seqs"]
        queries, output = Slot(f"host/queries/b{k}", Tier.HOST), Slot(f"host/out/b{k}", Tier.HOST)
        attended = Slot(f"gpu/attended/b{k}", Tier.GPU)
        yield Op(Kind.FORWARD, *ids, scope=Scope.QKV, attention=Attention.CPU, **amount,
                 reads=reads, writes=(hidden, self.kv_out(layer, k)))  # fmt: skip
        rows = {"n_seqs": n_seqs, "stop": 1}
        yield Op(Kind.STORE_ACT, *ids, 2, scope=Scope.QKV, **rows,
                 reads=(hidden, self.kv_out(layer, k)), writes=(queries,))  # fmt: skip
        yield Op(Kind.CPU_ATTEND, *ids, n_seqs=n_seqs, stop=self.n_ctx[k], n_new=1,
                 n_ctx=self.n_ctx[k], attention=Attention.CPU,
                 reads=(queries, self.host_kv(layer, k)), writes=(output,))  # fmt: skip
        yield Op(Kind.LOAD_ACT, *ids, 3, scope=Scope.OUTPUT, **rows, reads=(output,),
                 writes=(attended,))  # fmt: skip
        yield Op(Kind.FORWARD, *ids, scope=Scope.OUTPUT, attention=Attention.CPU, **amount,
                 reads=(*reads, attended), writes=(hidden,))  # fmt: skip
