"""Affine forms and guards as arrays, for all steps of a block at once.

Guards of different templates ask about the same forms, so the forms of all of them are evaluated
together, once a block, and a template knows between which values its own must lie. What readers get
wrong: floating point is exact here. Variables, coefficients and values are whole numbers far below
2^53, and shares of a placement are only ever compared with 0 or 1.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass
from math import inf, nextafter

import numpy as np
from numpy.typing import NDArray

from sim.arrays import Floats, Longs
from sim.symbol import Affine, Guard, Number, Terms, affine


def values(x: Floats, terms: Terms) -> Floats:
    """Values of a form without its constant, (n,), for variables x, (n, n_variables).

    Column by column: forms have a handful of terms, and a product of matrices would keep the
    threads of a linear algebra library busy with zeros.
    """
    out = np.zeros(len(x))
    for variable, coefficient in terms:
        out += coefficient * x[:, variable]
    return out


class Forms:
    """Forms without their constants, numbered as they come."""

    def __init__(self) -> None:
        self._numbers: dict[Terms, int] = {}

    def __len__(self) -> int:
        return len(self._numbers)

    def number(self, terms: Terms) -> int:
        """Number of a form."""
        return self._numbers.setdefault(terms, len(self._numbers))

    def values(self, x: Floats, first: int = 0) -> Floats:
        """Values of all forms from ``first`` on, (forms, n), for variables x, (n, n_variables)."""
        new = list(self._numbers)[first:]
        return np.array([values(x, terms) for terms in new]).reshape(-1, len(x))


class Numbers:
    """Whole numbers that are affine forms of a step's variables."""

    def __init__(self, forms: Sequence[Affine | Number]) -> None:
        plain = [affine(number) for number in forms]
        self._constants = np.array([form.const for form in plain], np.float64)
        places: dict[Terms, list[int]] = {}
        for place, form in enumerate(plain):
            if form.terms:
                places.setdefault(form.terms, []).append(place)
        self._places = tuple((terms, np.array(at)) for terms, at in places.items())

    def at(self, x: Floats) -> Longs:
        """The numbers in a step of variables x, (n_variables,)."""
        out = self._constants.copy()
        for terms, places in self._places:
            out[places] += sum(coefficient * x[variable] for variable, coefficient in terms)
        return np.rint(out).astype(np.int64)

    def over(self, x: Floats) -> Longs:
        """The numbers in steps of variables x, (n_steps, n_variables): (n_steps, numbers)."""
        out = np.tile(self._constants, (len(x), 1))
        for terms, places in self._places:
            out[:, places] += values(x, terms)[:, None]
        return np.rint(out).astype(np.int64)

    def varying(self, x: Floats) -> tuple[Longs, list[int], list[Longs]]:
        """The numbers in the first step, which of them vary over the steps, and their values."""
        first, places, rows = self.at(x[0]), list[int](), list[Longs]()
        for terms, alike in self._places:
            y = values(x, terms)
            if (y != y[0]).any():
                change = np.rint(y - y[0]).astype(np.int64)
                places += alike.tolist()
                rows += [first[place] + change for place in alike]
        return first, places, rows


@dataclass(frozen=True, slots=True)
class Guards:
    """Conditions on values of forms, by number: ranges, values to avoid, and remainders."""

    form: Longs  # (n,)
    low: Floats
    high: Floats
    avoided_form: Longs
    avoided: Floats
    modulo_form: Longs
    constant: Floats
    modulus: Floats

    def satisfied(self, answers: Floats, steps: Longs) -> NDArray[np.bool_]:
        """Which of some steps meet all conditions, given the values of all forms, (forms, n)."""
        y = answers[self.form[:, None], steps]
        met = ((y >= self.low[:, None]) & (y <= self.high[:, None])).all(axis=0)
        if self.avoided.size:
            y = answers[self.avoided_form[:, None], steps]
            met &= (y != self.avoided[:, None]).all(axis=0)
        if self.modulus.size:
            y = answers[self.modulo_form[:, None], steps] + self.constant[:, None]
            met &= (y % self.modulus[:, None] == 0).all(axis=0)
        return np.asarray(met)


def compiled(guards: Collection[Guard], forms: Forms) -> Guards:
    """Guards as arrays; those on one form become one range."""
    ranges: dict[int, tuple[float, float]] = {}
    avoided: list[tuple[int, float]] = []
    modulos: list[tuple[int, float, float]] = []
    for terms, const, relation, holds, modulus in guards:
        if modulus:
            modulos.append((forms.number(terms), const, modulus))
            continue
        sign = -1 if terms[0][1] < 0 else 1
        if sign < 0:
            terms = tuple((i, -c) for i, c in terms)
        at, value = forms.number(terms), float(-const * sign)
        if relation == "==" and not holds:
            avoided.append((at, value))
            continue
        low, high = _range(relation, holds, value, sign)
        known_low, known_high = ranges.get(at, (-inf, inf))
        ranges[at] = (max(low, known_low), min(high, known_high))
    low_high = np.array(list(ranges.values()), np.float64).reshape(-1, 2)
    others = np.array(modulos, np.float64).reshape(-1, 3)
    return Guards(
        np.array(list(ranges), np.int64),
        low_high[:, 0],
        low_high[:, 1],
        np.array([at for at, _ in avoided], np.int64),
        np.array([value for _, value in avoided], np.float64),
        others[:, 0].astype(np.int64),
        others[:, 1],
        others[:, 2],
    )


def _range(relation: str, holds: bool, value: float, sign: int) -> tuple[float, float]:
    """Where y is if ``sign * (y - value)`` stands in a relation to 0, or does not."""
    if relation == "==":
        return value, value
    below = holds == (sign > 0)
    strict = (relation == "<") == holds
    if below:
        return -inf, nextafter(value, -inf) if strict else value
    return nextafter(value, inf) if strict else value, inf
