"""A decode step in which some batches attend on the CPU while the others load their KV.

A batch that attends on the CPU is projected on the GPU (QKV), attended where its KV lies, and
finished on the GPU (OUTPUT, MLP). Its turn in a layer finishes that layer and projects the next one
at once, from the other weight slot, so the CPU has the next queries before it runs dry. What
readers get wrong: a copy waits in the order in which it is emitted. An output that is asked for
before the CPU has computed it holds up all loads behind it, so the turns of CPU batches are spread
between those of GPU batches as their outputs come, never all first.
"""

from __future__ import annotations

from collections.abc import Iterator

from policies import slots
from policies.attend_ops import attend_op, head_op, output_ops, project_ops
from policies.drive import Decision, StepContext
from policies.plan.op import Kind, Op, Scope, Slot
from policies.slots import Slots
from policies.step_ops import MIN_SLICE_BYTES, StepOps, Zigzag


def turns(on_cpu: tuple[int, ...]) -> tuple[int, ...]:
    """Order in which batches take their turns in a layer; given by ``Decision.on_cpu``.

    Of n CPU batches and m GPU batches, the j-th CPU batch comes right behind GPU batch
    ``ceil(j m / n)``, when that share of the layer's loads is under way; the last comes last.
    """
    gpu = [b for b, there in enumerate(on_cpu) if not there]
    cpu = [b for b, there in enumerate(on_cpu) if there]
    order: list[int] = []
    for j, batch in enumerate(cpu, 1):
        done = len(order) - (j - 1)
        order += gpu[done : -(-j * len(gpu) // len(cpu))]
        order.append(batch)
    return tuple(order) if cpu else tuple(gpu)


def spread(on_cpu: tuple[int, ...], layer_bytes: int, keep_last: bool) -> tuple[int, ...]:
    """Slices of a layer's weights over the turns: one a turn, but none below 16 MiB.

    ``keep_last``: the last turn carries none. Then the next layer's weights are complete before the
    last CPU batch has attended, and the others can be projected meanwhile: what a busy CPU needs.
    """
    order = turns(on_cpu)
    n = max(1, len(order) - 1) if keep_last else len(order)
    pieces = max(1, min(n, layer_bytes // MIN_SLICE_BYTES))
    slices = [0] * len(order)
    for turn, batch in enumerate(order[:n]):
        slices[batch] = -(-(turn + 1) * pieces // n) - -(-turn * pieces // n)
    return tuple(slices)


def cpu_step(ctx: StepContext, now: Decision, then: Decision | None, how: Zigzag) -> Iterator[Op]:
    """Ops of one step: batches of ``now.on_cpu`` attend on the CPU, but not in prefill.

    ``how`` says how the others attend and how many buffers there are; KV must be pinned, and no
    fence, no separate MLP. All KV is at home in host memory or on disk.
    """
    if how.fence or how.sep_layer or not how.kv_pinned:
        raise ValueError("how: cpu_step needs fence=false, sep_layer=false and kv_pinned=true")
    return _Step(ctx, now, then, how).ops()


class _Step(StepOps):
    """Emits one step."""

    def __init__(self, ctx: StepContext, now: Decision, then: Decision | None, how: Zigzag) -> None:
        super().__init__(ctx, now, then, how)
        self.order = turns(now.on_cpu)
        self.on_cpu = [k for k in self.order if now.on_cpu[k]]
        self.on_gpu = [k for k in self.order if not now.on_cpu[k]]
        self.turn_of = {k: turn for turn, k in enumerate(self.order)}
        self.waiting = list(self.on_cpu)  # batches that are to be projected in the layer at hand
        self.writes: list[Op] = []  # to disk, held back by one: behind one a read would wait

    # ---- slots: consecutive users take turns, in the order of this schedule --------------------

    def kv_in(self, step: int, layer: int, batch: int) -> Slot:
        """Buffer of the KV that a batch loads, whose staging takes what a CPU batch reads."""
        decision = self._decision(step)
        alike = [k for k in turns(decision.on_cpu)
                 if bool(decision.on_cpu[k]) == bool(decision.on_cpu[batch])]  # fmt: skip
        turn = (step * self.n_layers + layer) * len(alike) + alike.index(batch)
        return slots.kv_in(turn % self.how.kv_in_slots)

    def kv_out(self, layer: int, batch: int) -> Slot:
        """Where a batch leaves the KV that it computes."""
        turn = self.kv_turn(self.s, layer, self.turn_of[batch], self.how.kv_out_slots)
        return slots.kv_out(turn)

    def _decision(self, step: int) -> Decision:
        if step == self.s or self.then is None:
            return self.now
        return self.then

    # ---- the step -----------------------------------------------------------------------------

    def ops(self) -> Iterator[Op]:
        """All layers, then the LM head."""
        if self.s == 0 and self.streamed[0]:
            yield from self.load_weights(0, 0, 0, 0, self.n_parts)
        for i in range(self.n_layers):
            yield from self.layer(i)
        yield from self.writes
        if self.then is not None:
            first = [k for k in turns(self.then.on_cpu) if not self.then.on_cpu[k]][:1]
            for k in first:
                yield from self.load_kv(self.s + 1, 0, k, self.then)
        for k in self.order:
            yield head_op(self, k)

    def layer(self, i: int) -> Iterator[Op]:
        """The rest of layer i for CPU batches, all of it for the others; weights of the next."""
        inner, carried = i + 1 < self.n_layers, 0
        step, ahead = (self.s, i + 1) if inner else (self.s + 1, 0)
        streams = self.streamed[ahead] and (inner or self.then is not None)
        done: list[int] = []  # with this layer, and not yet projected in the next
        for k in self.order:
            if streams:
                yield from self.load_weights(step, ahead, k, carried, self.now.slices[k])
                carried += self.now.slices[k]
            for batch in self.waiting:  # from the layer before
                yield from self.attend(i, batch)
            self.waiting = []
            if self.now.on_cpu[k]:
                yield from self.finish(i, k)
                done.append(k)
            else:
                yield from self.prefetch(i, k)
                yield from self.whole(i, k)
            if inner and k != self.order[-1] and (not streams or carried == self.n_parts):
                for batch in done:
                    yield from self.attend(ahead, batch)
                done = []
        self.waiting = done

    def prefetch(self, i: int, k: int) -> Iterator[Op]:
        """KV of the GPU batch after k: in this layer, or the first of the next."""
        at = self.on_gpu.index(k) + 1
        if at < len(self.on_gpu):
            yield from self.load_kv(self.s, i, self.on_gpu[at], self.now)
        elif i + 1 < self.n_layers:
            yield from self.load_kv(self.s, i + 1, self.on_gpu[0], self.now)

    # ---- a batch in a layer -------------------------------------------------------------------

    def weights(self, i: int) -> Slots:
        """Where a layer's weights are."""
        held: Slots = (self.weight_slot(self.s, i),)
        return (*held, slots.resident_weights(i)) if self.partly_resident[i] else held

    def whole(self, i: int, k: int) -> Iterator[Op]:
        """A batch through a layer on the GPU."""
        hidden = slots.hidden(k)
        reads = (*self.weights(i), hidden, *self.sources(i, k))
        writes = (hidden, self.kv_out(i, k))
        yield self.forward_op(i, k, Scope.LAYER, self.how.attention, reads, writes)
        yield from self.store(i, k)

    def attend(self, i: int, k: int) -> Iterator[Op]:
        """Project on the GPU and attend on the CPU."""
        yield from self.load_kv(self.s, i, k, self.now)  # what lies on disk
        yield from project_ops(self, i, k, (*self.weights(i), slots.hidden(k)))
        # Stored before the CPU reads the home: behind it, the store would hold up all others.
        yield from self.store(i, k)
        yield attend_op(self, i, k)

    def finish(self, i: int, k: int) -> Iterator[Op]:
        """Bring attention's output back and compute the rest of the layer."""
        hidden = slots.hidden(k)
        reads = (*self.weights(i), hidden)
        yield from output_ops(self, i, k, reads)
        yield self.forward_op(i, k, Scope.MLP, self.how.attention, reads, (hidden,))

    def store(self, i: int, k: int) -> Iterator[Op]:
        """Store what a batch computed, and write to disk what was stored before it."""
        yield from self.writes
        self.writes = []
        for op in self.store_kv(i, k):
            if op.kind is Kind.WRITE_KV:
                self.writes.append(op)
            else:
                yield op
