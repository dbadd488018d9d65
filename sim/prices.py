"""Prices: what the amounts of a template cost in every step, asked of the cost model once each.

An amount that does not vary over the steps is priced once; the others are looked up by the numbers
that do. What readers get wrong: nothing is interpolated. Each price is what the cost model says of
an op with exactly these numbers, where of a range of tokens only the length counts.
"""

from __future__ import annotations

from dataclasses import fields

import numpy as np

from policies.cost.protocol import Costs, checked_seconds
from policies.placement import Shares
from policies.plan.op import Op
from sim.arrays import Floats, Longs
from sim.template import Template
from sim.tracing import AMOUNTS

_MAX_KEPT = 200_000  # for later blocks; about 0.5 kB each
_START, _STOP = AMOUNTS.index("start"), AMOUNTS.index("stop")
_FIELDS = [f.name for f in fields(Op)]
_BLOCK = _FIELDS.index("block")
_PLACES = [_FIELDS.index(name) for name in AMOUNTS]

Row = int | tuple[int, ...]
Price = tuple[float, int]  # seconds and bytes


class Prices:
    """Prices of ``costs``, by amounts."""

    def __init__(self, costs: Costs) -> None:
        self._costs = costs
        self._known: dict[tuple[object, ...], dict[Row, Price]] = {}
        self._n_kept = 0

    def forget(self) -> None:
        """Keep memory flat."""
        if self._n_kept > _MAX_KEPT:
            self._known, self._n_kept = {}, 0

    def table(
        self, template: Template, x: Floats, home: Shares, block: int
    ) -> tuple[Floats, Longs]:
        """Seconds and bytes of each amount in each step, both (n_steps, n_amounts).

        ``x`` are the steps' variables, ``home`` that of the block's KV.
        """
        numbers, places, rows = template.lengths.varying(x)
        first = numbers.reshape(-1, len(AMOUNTS)).tolist()
        varying: dict[int, list[int]] = {}  # amount -> which of ``places`` are its own
        for i in sorted(range(len(places)), key=places.__getitem__):
            varying.setdefault(places[i] // len(AMOUNTS), []).append(i)
        seconds = np.empty((len(x), len(template.amounts)))
        nbytes = np.empty((len(x), len(template.amounts)), np.int64)
        for a, (amount, common) in enumerate(zip(template.amounts, first, strict=True)):
            own = varying.get(a, [])
            at = [places[i] % len(AMOUNTS) for i in own]
            op = [getattr(amount.sample, name) for name in _FIELDS]
            op[_BLOCK] = block
            for place, number in zip(_PLACES, common, strict=True):
                op[place] = number
            for field in at:
                common[field] = -1
            known = self._known.setdefault((amount.share, home, *common), {})
            values = _values([rows[i] for i in own])
            self._add(known, values, op, [_PLACES[field] for field in at])
            prices = np.array([known[value] for value in values])
            seconds[:, a], nbytes[:, a] = prices[:, 0], prices[:, 1]
        return seconds, nbytes

    def _add(
        self, known: dict[Row, Price], rows: list[Row], op: list[object], places: list[int]
    ) -> None:
        """Price what is not known yet: ops with the numbers of a row in these places."""
        costs = self._costs
        for row in rows:
            if row not in known:
                numbers = row if isinstance(row, tuple) else (row,)
                for place, number in zip(places, numbers, strict=True):
                    op[place] = number
                priced = Op(*op)  # type: ignore[arg-type]  # in the order of its fields
                known[row] = checked_seconds(costs, priced), int(costs.nbytes(priced))
                self._n_kept += 1


def _values(own: list[Longs]) -> list[Row]:
    """Numbers of an amount that vary, step by step; one row if none do."""
    if not own:
        return [()]
    if len(own) == 1:
        return [*own[0].tolist()]
    return [*zip(*(numbers.tolist() for numbers in own), strict=True)]
