"""Stretching: the ops of a cut model's step, repeated to those of the whole model.

Two traces are compared, one of them a period longer. What they share at the front and, with layers
moved, at the back leaves the ops that the longer one has more: the unit that repeats. What readers
get wrong: that two lengths fit is not enough. The shorter trace must hold the unit once already, at
its end, or what was found is a border and not a period.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from sim.arrays import Longs
from sim.tracing import Ref, What

Layers = tuple[int, ...]


class Placed(NamedTuple):
    """An op of the whole plan: ``ref`` with ``moves[i] * shift`` added to its layer i."""

    ref: Ref
    moves: Layers  # 0 or 1 for each of the ref's layers


class Stretched(NamedTuple):
    """``before``, then ``unit`` as often as the cut took away a period, then ``after``.

    Repetition j of the unit shifts by ``j * period``, ``after`` by ``repeats * period``.
    """

    before: list[Placed]
    unit: list[Placed]
    after: list[Placed]
    repeats: int
    period: int


def unstretched(refs: Sequence[Ref]) -> Stretched:
    """Ops of a whole model as they are."""
    return Stretched([_still(ref) for ref in refs], [], [], 0, 0)


def stretch(
    short: Sequence[Ref], long: Sequence[Ref], names: Sequence[Ref], period: int, repeats: int
) -> Stretched | None:
    """How ``short`` becomes a plan of ``repeats`` periods more; None if they do not repeat.

    ``long`` is the same step with one period of layers more, ``names`` are the ops of ``short``
    that the result is made of.
    """
    n_more = len(long) - len(short)
    if n_more <= 0:
        return None
    same = 0
    while same < len(short) and short[same] == long[same]:
        same += 1
    backs: list[Layers] = []  # what moves in the ops at the back, from the last
    for ref, later in zip(reversed(short), reversed(long), strict=False):
        moves = _moves(ref, later, period)
        if moves is None:
            break
        backs.append(moves)
    # Any border will do that leaves the front unmoved and the back moved.
    for border in range(same, max(len(short) - len(backs), n_more) - 1, -1):
        last = border - n_more
        unit = _all_moves(short[last:border], long[border : border + n_more], period)
        if unit is not None:
            once = zip(names[last:border], unit, strict=True)
            back = zip(names[border:], reversed(backs[: len(short) - border]), strict=True)
            return Stretched(
                [_still(ref) for ref in names[:border]],
                [Placed(_moved(ref, moves, period), moves) for ref, moves in once],
                [Placed(ref, moves) for ref, moves in back],
                repeats,
                period,
            )
    return None


def _all_moves(refs: Sequence[Ref], later: Sequence[Ref], period: int) -> list[Layers] | None:
    """What moves in each of some ops; None if one of them is another op."""
    out = []
    for ref, other in zip(refs, later, strict=True):
        moves = _moves(ref, other, period)
        if moves is None:
            return None
        out.append(moves)
    return out


def _moved(ref: Ref, moves: Layers, period: int) -> Ref:
    layers = (at + move * period for at, move in zip(ref.layers, moves, strict=True))
    return Ref(ref.what, tuple(layers))


def _moves(ref: Ref, later: Ref, period: int) -> Layers | None:
    """Which layers of an op move with the period; None if it is another op."""
    if ref.what != later.what:
        return None
    moved = [b - a for a, b in zip(ref.layers, later.layers, strict=True)]
    if any(by not in (0, period) for by in moved):
        return None
    return tuple(int(by != 0) for by in moved)


def _still(ref: Ref) -> Placed:
    return Placed(ref, (0,) * len(ref.layers))


# ---- the whole plan ------------------------------------------------------------------------------


class Plan(NamedTuple):
    """Ops of the whole model: which distinct ``What`` each is, and its layers, padded with 0."""

    whats: list[What]
    what: Longs  # (n_ops,)
    layers: Longs  # (n_ops, columns), the op's own first

    @property
    def layer_class(self) -> Longs:
        """Class of layer that each op was traced in."""
        return np.array([what.layer_class for what in self.whats])[self.what]

    def same_ops(self, other: Plan) -> bool:
        """Whether the other plan has the same ops in the same layers."""
        if self.layers.shape != other.layers.shape or (self.layers != other.layers).any():
            return False
        pairs = set(zip(self.what.tolist(), other.what.tolist(), strict=True))
        return all(self.whats[one] == other.whats[two] for one, two in pairs)


def expand(stretched: Stretched) -> Plan:
    """All ops of a stretched step."""
    numbers: dict[What, int] = {}
    pieces = (stretched.before, stretched.unit, stretched.after)
    columns = max((len(placed.ref.layers) for piece in pieces for placed in piece), default=1)
    shifts = (
        np.zeros(1, np.int64),
        np.arange(stretched.repeats) * stretched.period,
        np.full(1, stretched.repeats * stretched.period),
    )
    what, layers = [], []
    for piece, shift in zip(pieces, shifts, strict=True):
        ids = [numbers.setdefault(placed.ref.what, len(numbers)) for placed in piece]
        at = padded([placed.ref.layers for placed in piece], columns)
        moves = padded([placed.moves for placed in piece], columns)
        what.append(np.tile(np.array(ids, np.int64), len(shift)))
        layers.append((at + moves * shift[:, None, None]).reshape(-1, columns))
    return Plan(list(numbers), np.concatenate(what), np.concatenate(layers))


def padded(rows: Sequence[Sequence[int]], columns: int, fill: int = 0) -> Longs:
    """Rows of numbers, (n_rows, columns), filled up at the end."""
    out = np.full((len(rows), columns), fill, np.int64)
    for i, row in enumerate(rows):
        out[i, : len(row)] = row
    return out
