"""Hypothesis strategies: random plans and random costs.

Plans are legal (unique keys, slots in any order) but meaningless: laws must hold for whatever a
policy may emit. Few slots and few distinct durations make hazards and simultaneous ends common.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from hypothesis import strategies as st

from policies.plan.op import Kind, Op, Slot, Tier

SLOTS = tuple(
    Slot(f"{tier}{i}", tier) for tier, n in ((Tier.GPU, 3), (Tier.HOST, 2)) for i in range(n)
)
# One op in 14 would be a fence; compute and copies matter more than disk.
KINDS = (*Kind, Kind.FORWARD, Kind.FORWARD, Kind.LOAD_KV, Kind.STORE_KV)


@dataclass(frozen=True)
class TableCosts:
    """Costs looked up by key; an op that is not listed costs nothing."""

    seconds_of: Mapping[str, float]
    nbytes_of: Mapping[str, int]

    def seconds(self, op: Op) -> float:
        return self.seconds_of.get(op.key, 0.0)

    def nbytes(self, op: Op) -> int:
        return self.nbytes_of.get(op.key, 0)

    def flops(self, op: Op) -> float:
        return 2.0 * self.nbytes(op)

    def with_seconds(self, key: str, seconds: float) -> TableCosts:
        return TableCosts({**self.seconds_of, key: seconds}, self.nbytes_of)


DURATIONS = st.one_of(
    st.sampled_from([0.0, 1.0, 1.0, 2.0, 3.0]),
    st.floats(0.0, 10.0, allow_nan=False, allow_subnormal=False),
)
_SOME_SLOTS = st.lists(st.sampled_from(SLOTS), max_size=2, unique=True).map(tuple)
_DRAWN = st.tuples(st.sampled_from(KINDS), _SOME_SLOTS, _SOME_SLOTS, DURATIONS, st.integers(0, 99))


@st.composite
def plans(draw: st.DrawFn, min_ops: int = 0, max_ops: int = 30) -> tuple[list[Op], TableCosts]:
    """A random plan and costs for it; an op's layer is its position, so keys are unique."""
    drawn = draw(st.lists(_DRAWN, min_size=min_ops, max_size=max_ops))
    ops = [
        Op(kind, 0, 0, i, reads=reads, writes=writes)
        if kind is not Kind.FENCE
        else Op(kind, 0, 0, i)
        for i, (kind, reads, writes, _, _) in enumerate(drawn)
    ]
    seconds = {op.key: row[3] for op, row in zip(ops, drawn, strict=True)}
    nbytes = {op.key: row[4] for op, row in zip(ops, drawn, strict=True)}
    return ops, TableCosts(seconds, nbytes)
