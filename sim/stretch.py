"""Stretching: the ops of a cut model's step, repeated to those of the whole model.

Two traces are compared, one of them a period longer. What they share at the front and, with layers
moved, at the back leaves the ops that the longer one has more: the unit that repeats. What readers
get wrong: that two lengths fit is not enough. The shorter trace must hold the unit once already, at
its end, or what was found is a border and not a period.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from sim.tracing import Ref

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


def stretch(short: list[Ref], long: list[Ref], period: int, repeats: int) -> Stretched | None:
    """How ``short`` becomes a plan of ``repeats`` periods more; None if they do not repeat.

    ``long`` is the same step with one period of layers more.
    """
    n_more = len(long) - len(short)
    if n_more <= 0:
        return None
    same = 0
    while same < len(short) and short[same] == long[same]:
        same += 1
    after: list[Placed] = []  # from the end
    for ref, later in zip(reversed(short), reversed(long), strict=False):
        moves = _moves(ref, later, period)
        if moves is None:
            break
        after.append(Placed(ref, moves))
    after.reverse()
    # Any border will do that leaves the front unmoved and the back moved.
    for border in range(same, max(len(short) - len(after), n_more) - 1, -1):
        unit = _unit(short[border - n_more : border], long[border : border + n_more], period)
        if unit is not None:
            before = [_still(ref) for ref in short[:border]]
            rest = after[len(after) - (len(short) - border) :] if border < len(short) else []
            return Stretched(before, unit, rest, repeats, period)
    return None


def _unit(before: list[Ref], ops: list[Ref], period: int) -> list[Placed] | None:
    """The repeating ops, if they continue those ``before`` them."""
    unit = []
    for earlier, ref in zip(before, ops, strict=True):
        moves = _moves(earlier, ref, period)
        if moves is None:
            return None
        unit.append(Placed(ref, moves))
    return unit


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
