"""Affine forms and guards as matrices, for all steps of a block at once.

What readers get wrong: floating point is exact here. Variables, coefficients and values are whole
numbers far below 2^53, and shares of a placement are only ever compared with 0 or 1.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from sim.arrays import Floats
from sim.symbol import Affine, Guard, Number


@dataclass(frozen=True, slots=True)
class Guards:
    """Conditions on variables x: how ``x @ coefficients + constant`` compares with 0.

    The last ``len(modulus)`` of them are remainders and must be 0.
    """

    coefficients: Floats  # (n_variables, n_guards)
    constant: Floats  # (n_guards,)
    below: NDArray[np.bool_]  # < 0 holds
    zero: NDArray[np.bool_]  # == 0 holds
    above: NDArray[np.bool_]  # > 0 holds
    modulus: Floats

    def satisfied(self, x: Floats) -> NDArray[np.bool_]:
        """Which rows of x, of shape (n, n_variables), meet all conditions."""
        y = x @ self.coefficients + self.constant
        y[:, len(self.below) - len(self.modulus) :] %= self.modulus
        met = ((y < 0) & self.below) | ((y == 0) & self.zero) | ((y > 0) & self.above)
        return np.asarray(met.all(axis=1))


def form(number: Affine | Number) -> Affine:
    """A plain number as a form."""
    return number if isinstance(number, Affine) else Affine((), number)


def matrix(forms: Sequence[Affine | Guard], n_variables: int) -> Floats:
    """Coefficients of forms, (n_variables, n_forms)."""
    out = np.zeros((n_variables, len(forms)))
    for column, form in enumerate(forms):
        for variable, coefficient in form.terms:
            out[variable, column] = coefficient
    return out


def compiled(guards: Collection[Guard], n_variables: int) -> Guards:
    """Guards as arrays."""
    ordered = sorted(guards, key=lambda guard: (guard.modulus > 0, guard))
    # Whether the relation is true of a number below, at and above 0.
    true_of = {"<": (True, False, False), "<=": (True, True, False), "==": (False, True, False)}
    allowed = np.array([true_of[g.relation] for g in ordered], np.bool_).reshape(-1, 3)
    holds = np.array([guard.holds for guard in ordered], np.bool_)
    below, zero, above = (allowed[:, i] == holds for i in range(3))
    return Guards(
        matrix(ordered, n_variables),
        np.array([guard.const for guard in ordered], np.float64),
        below,
        zero,
        above,
        np.array([guard.modulus for guard in ordered if guard.modulus], np.float64),
    )
