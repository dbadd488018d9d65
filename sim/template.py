"""Templates: the ops of a step as arrays, for every step whose numbers answer alike.

A template holds wherever its guards do; amounts are affine forms of a step's variables, priced by
the cost model op by op, and so are the numbers of turns that its loops take. What readers get
wrong: arrays are no second definition of a schedule. They are what the policy's own ``step``
emitted, with its layers and turns repeated, and a test holds each of them to the op-by-op plan.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from policies.plan.op import Op, Slot
from sim.arrays import N_LANES, Bytes, Floats, Ints, Longs
from sim.forms import Guards, Numbers
from sim.tracing import AMOUNTS


class Families:
    """Slots as integers: a family has one for each layer, or one."""

    def __init__(self, n_layers: int) -> None:
        self.stride = n_layers + 1
        self._first: dict[tuple[Slot, bool], int] = {}

    def number(self, family: tuple[Slot, bool]) -> int:
        """Integer of a family's slot of layer 0."""
        return self._first.setdefault(family, len(self._first) * self.stride)

    @property
    def n_slots(self) -> int:
        """Integers given out so far."""
        return len(self._first) * self.stride


class Amount(NamedTuple):
    """Ops of a template that cost the same: a sample of them, and how many each step has.

    Ops in loops are not counted here.
    """

    sample: Op  # of the whole model; its numbers stand in the template's forms
    share: tuple[object, ...]  # ops of other templates with this and the same numbers cost as much
    uses: int


class Loop(NamedTuple):
    """Ops that a template has in every turn of a loop, over all places where it has the loop.

    ``uses`` are amounts of a turn that counts 0, and how many ops of a turn have them.
    """

    lane_ops: Longs  # (N_LANES,)
    uses: tuple[tuple[int, int], ...]


@dataclass(frozen=True, slots=True, eq=False)
class Template:
    """Ops of a step; arrays over ops as ``sim.arrays.Program`` has them.

    ``numbers`` are those of all amounts, in the order of ``sim.tracing.AMOUNTS``; in ``lengths``
    ranges of tokens begin at 0. ``bounds`` are first and times of each loop; the amounts of loops
    count ``n_turns`` turns at most.
    """

    guards: Guards
    amounts: tuple[Amount, ...]
    numbers: Numbers
    lengths: Numbers
    loops: tuple[Loop, ...]
    bounds: Numbers
    n_turns: int
    plain_ops: Longs  # (N_LANES,), ops of each lane that are in no loop
    led: Bytes  # (N_LANES,)
    lane: Bytes
    category: Bytes
    flags: Bytes
    ahead: NDArray[np.int8]
    amount: Ints
    loop: Ints
    turn: Bytes
    first_read: Longs
    read: Ints
    first_write: Longs
    write: Ints
    layer: Ints
    batch: Ints

    def loops_over(self, x: Floats) -> tuple[Ints, Ints]:
        """Where each step's loops begin to count and how many turns they take, (n_steps, loops)."""
        both = self.bounds.over(x).astype(np.int32)
        return both[:, 0::2], both[:, 1::2]

    def lane_ops(self, times: Ints) -> Longs:
        """Ops of each lane in steps whose loops take ``times`` turns, (n_steps, N_LANES)."""
        ops = np.array([loop.lane_ops for loop in self.loops], np.int64).reshape(-1, N_LANES)
        return np.asarray(self.plain_ops + times @ ops)

    def uses(self, first: Ints, times: Ints) -> Longs:
        """Ops of each amount: (1, n_amounts) without loops, with them (n_steps, n_amounts)."""
        plain = np.array([amount.uses for amount in self.amounts], np.int64)
        if not self.loops:
            return plain[None]
        uses = np.tile(plain, (len(times), 1))
        count = np.arange(self.n_turns)
        for n, loop in enumerate(self.loops):
            begin, end = first[:, n, None], (first + times)[:, n, None]
            taken = (begin <= count) & (count < end)
            for amount, ops in loop.uses:
                uses[:, amount : amount + self.n_turns] += taken * ops
        return uses

    def order(self, first: Sequence[int], times: Sequence[int]) -> Iterator[tuple[int, int]]:
        """Ops of one step in their order, each with its amount."""
        op, amounts, loops, turns = 0, self.amount.tolist(), self.loop.tolist(), self.turn.tolist()
        while op < len(amounts):
            length = turns[op] or 1
            begin, n = (first[loops[op]], times[loops[op]]) if turns[op] else (0, 1)
            for count in range(begin, begin + n):
                yield from ((at, amounts[at] + count) for at in range(op, op + length))
            op += length

    def same_step(self, other: Template, x: Floats) -> bool:
        """Whether the other template has the same ops in a step of variables x, (n_variables,)."""
        return self._listed(x) == other._listed(x)

    def _listed(self, x: Floats) -> list[tuple[object, ...]]:
        numbers = self.numbers.at(x).reshape(-1, len(AMOUNTS)).tolist()
        first, times = (bound[0].tolist() for bound in self.loops_over(x[None]))
        reads = np.split(self.read, self.first_read[1:-1])
        writes = np.split(self.write, self.first_write[1:-1])
        rows = np.stack((self.lane, self.category, self.flags, self.ahead, self.layer, self.batch))
        columns = rows.T.tolist()
        return [
            (
                *columns[op], self.amounts[amount].share, numbers[amount],
                reads[op].tolist(), writes[op].tolist(),
            )
            for op, amount in self.order(first, times)
        ]  # fmt: skip
