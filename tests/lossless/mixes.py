"""Fixed mixes of all sources of a cached token: the policies that no machine would choose.

What a home holds, what is recomputed at either end and who attends on the CPU is said step by step,
so that degenerate mixes and homes of four ranges are reached on purpose.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from policies import slots
from policies.drive import Decision, StepContext, stored_after
from policies.homes import Homes
from policies.placement import Placement
from policies.plan.memory import Buffers, place
from policies.plan.op import Attention, Op, Scope
from policies.schedule import _Step
from policies.spec.hardware import HardwareProfile
from policies.spec.model import ModelSpec
from policies.spec.workload import Block
from policies.step_ops import Zigzag

ALL = 10**9  # more than any context


def count_of(n: int, most: int) -> int:
    """``n``, at most ``most``; a negative one says how many to leave."""
    return min(n, most) if n >= 0 else max(0, most + n)


class StandIn:
    """What policies of tests share: blocks as given, and buffers for layer inputs."""

    __slots__ = ()

    @property
    def how(self) -> Zigzag:
        """The schedule: whole layers, pinned, double buffers."""
        return Zigzag(input_slots=2)

    @property
    def buffers(self) -> Buffers:
        return self.how.buffers

    def blocks(self, blocks: Sequence[Block]) -> tuple[Block, ...]:
        return tuple(blocks)


@dataclass(frozen=True, slots=True)
class FixedMix(StandIn):
    """Sources by step, whatever the machine.

    ``n_inputs[s]`` of the tokens that step s stores are stored as layer inputs, ``n_recompute[s]``
    of the last and ``n_front[s]`` of the first cached ones are recomputed in step s; the last entry
    holds for all later steps. A negative count says how many of all to leave. Batches in ``on_cpu``
    decode on the CPU.
    """

    n_inputs: tuple[int, ...] = (0,)
    n_recompute: tuple[int, ...] = (0,)
    n_front: tuple[int, ...] = (0,)
    on_cpu: tuple[int, ...] = ()
    attention: str = "fused"
    books_inputs: bool = True
    name: str = "fixed-mix"

    @property
    def how(self) -> Zigzag:
        return Zigzag(input_slots=2, attention=Attention(self.attention))

    def place(
        self, model: ModelSpec, hardware: HardwareProfile, blocks: Sequence[Block]
    ) -> Placement:
        inputs = tuple(self._inputs(block) for block in blocks) if self.books_inputs else ()
        return place(model, hardware, blocks, self.buffers, inputs=inputs)

    def _inputs(self, block: Block) -> tuple[int, ...]:
        """Tokens of every batch that end up stored as inputs."""
        homes = (Homes(),) * len(block.batches)
        for step in range(1, block.max_new):
            n_ctx = tuple(b.prompt_len + step - 1 for b in block.batches)
            homes = stored_after(homes, n_ctx, self._decision(step, n_ctx, homes))
        return tuple(held.n_inputs for held in homes)

    def decide(self, ctx: StepContext) -> Decision:
        return self._decision(ctx.step, ctx.n_ctx(), ctx.homes)

    def _decision(self, step: int, n_ctx: tuple[int, ...], homes: tuple[Homes, ...]) -> Decision:
        def of(counts: tuple[int, ...], at: int) -> int:
            return counts[min(max(at, 0), len(counts) - 1)]

        tails, fronts, inputs, cpu = [], [], [], []
        for b, (n, held) in enumerate(zip(n_ctx, homes, strict=True)):
            on_cpu = int(b in self.on_cpu and step > 0)
            tail = 0 if on_cpu else count_of(of(self.n_recompute, step), n)
            stored = max(n - tail - held.n_stored, 0)
            kept = 0 if b in self.on_cpu else count_of(of(self.n_inputs, step - 1), stored)
            tails.append(tail)
            inputs.append(kept)
            fronts.append(0 if on_cpu else count_of(of(self.n_front, step), n - tail))
            cpu.append(on_cpu)
        none = (0,) * (len(n_ctx) - 1)
        return Decision(
            tuple(tails),
            (1, *none),
            n_front=tuple(fronts),
            n_inputs=tuple(inputs),
            on_cpu=tuple(cpu),
        )

    def step(self, ctx: StepContext, now: Decision, then: Decision | None) -> Iterator[Op]:
        return _MixedStep(ctx, now, then, self.how).ops()


class _MixedStep(_Step):
    """The zig-zag schedule, some of whose batches attend on the CPU."""

    def compute(self, i: int, k: int) -> Iterator[Op]:
        if not self.now.on_cpu[k]:
            yield from super().compute(i, k)
            return
        layer, hidden = self.stages[i].layer, slots.hidden(k)
        reads = (self.weight_slot(self.s, i), hidden)
        yield from self.attend_on_cpu(layer, k, reads)
        yield self.forward_op(layer, k, Scope.MLP, Attention.CPU, reads, (hidden,))


MIXES = {
    # a token projected out of none, one, all but one, all; and as many recomputed
    "kv": FixedMix(),
    "one-input": FixedMix((1, 0)),
    "all-inputs-but-one": FixedMix((-1, 0)),
    "prompt-as-inputs": FixedMix((ALL, 0)),
    "all-inputs": FixedMix((ALL,)),
    "inputs-and-one-recomputed": FixedMix((ALL,), (1,)),
    "inputs-and-tail": FixedMix((2, 1), (2,)),
    "one-input-rest-recomputed": FixedMix((ALL,), (-1,)),
    "one-kv-rest-recomputed": FixedMix((0,), (-1,)),
    "nothing-stored": FixedMix((ALL,), (ALL,)),
    # inputs, KV, inputs, KV
    "ranged": FixedMix((2, 1, 0)),
    "ranged-with-tail": FixedMix((2, 1, 0), (3, 1, 1, 0)),
    "kv-then-inputs": FixedMix((0, 1)),
    "changing": FixedMix((3, 0, 1), (0, 2, 0, 3)),
    # both ends recomputed
    "front-one": FixedMix((0,), (0,), (0, 1)),
    "front-all-but-one": FixedMix((0,), (0,), (-1,)),
    "front-all": FixedMix((0,), (0,), (ALL,)),
    "front-and-tail": FixedMix((0,), (2,), (2,)),
    "front-and-tail-meet": FixedMix((0,), (2,), (ALL,)),
    "front-inputs-kv-tail": FixedMix((3, 0), (1,), (2,)),
    "front-changing": FixedMix((2, 0), (1, 0, 2), (0, 1, 3, 2)),
    "front-cuts-a-range": FixedMix((3, 1), (0,), (0, 1, 2)),
    "unfused-ranged": FixedMix((2, 1, 0), (1,), (1,), attention="unfused"),
    "unfused-front": FixedMix((2, 1), (2,), (ALL,), attention="unfused"),
    # who attends
    "cpu-one-batch": FixedMix(on_cpu=(1,)),
    "cpu-all": FixedMix(on_cpu=(0, 1, 2)),
    "cpu-first-and-inputs": FixedMix((2, 1), (1,), (1,), on_cpu=(0,)),
}
