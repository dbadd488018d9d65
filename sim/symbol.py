"""Numbers that remember where they came from: how a policy's step is traced.

A ``Symbol`` is a number that also knows which affine combination of named variables it is. Ops that
a policy emits carry such numbers, so their amounts follow for any other values of the variables.
Whatever the policy *asks* of a number (is it positive? is it even? which index is it?) becomes a
``Guard``: the ops hold for exactly those values that give the same answers. What readers get wrong:
nothing has to be known about the policy for that. What affine forms cannot express, a product of
two variables or a number used as an index, is answered by a guard that fixes the value.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import NamedTuple

Number = int | float


class Affine(NamedTuple):
    """``const + sum(c * variable[i] for i, c in terms)``; terms sorted by i, no c is 0."""

    terms: tuple[tuple[int, Number], ...]
    const: Number

    def plus(self, other: Affine, sign: int = 1) -> Affine:
        """Sum, or with ``sign`` -1 difference."""
        held = dict(self.terms)
        for i, c in other.terms:
            held[i] = held.get(i, 0) + sign * c
        terms = tuple(sorted((i, c) for i, c in held.items() if c))
        return Affine(terms, self.const + sign * other.const)

    def times(self, factor: Number) -> Affine:
        """Multiple."""
        terms = tuple((i, c * factor) for i, c in self.terms if c * factor)
        return Affine(terms, self.const * factor)


class Guard(NamedTuple):
    """``(form relation 0) == holds``; with a modulus ``form % modulus == 0`` always."""

    form: Affine
    relation: str  # "<", "<=" or "=="
    holds: bool
    modulus: int = 0


@dataclass(slots=True)
class Tape:
    """What was asked while it was ``recording``: guards, and the moduli that occurred."""

    guards: dict[Guard, None] = field(default_factory=dict)  # ordered, each once
    moduli: set[int] = field(default_factory=set)
    recording: bool = False

    def ask(self, form: Affine, relation: str, holds: bool) -> bool:
        """Record an answer and give it back."""
        if self.recording and form.terms:
            self.guards[Guard(form, relation, holds)] = None
        return holds

    def ask_modulo(self, form: Affine, modulus: int, remainder: int) -> None:
        """Record that ``form`` leaves ``remainder``; coefficients that cannot matter are dropped.

        Only for whole coefficients.
        """
        if not self.recording:
            return
        self.moduli.add(modulus)
        terms = tuple((i, c % modulus) for i, c in form.terms if c % modulus)
        if terms:
            reduced = Affine(terms, (form.const - remainder) % modulus)
            self.guards[Guard(reduced, "==", True, modulus)] = None


class Symbol:
    """A number of known value and origin. Not an ``int``: nothing may read it past its tape."""

    __slots__ = ("form", "tape", "value")

    def __init__(self, value: Number, form: Affine, tape: Tape) -> None:
        self.value, self.form, self.tape = value, form, tape

    def _fixed(self) -> Number:
        """The value, which from now on is part of the guards."""
        self.tape.ask(self.form.plus(Affine((), self.value), -1), "==", True)
        return self.value

    # ---- affine -------------------------------------------------------------------------------

    def __add__(self, other: Symbol | Number) -> Symbol:
        return Symbol(self.value + _known(other), self.form.plus(form_of(other)), self.tape)

    def __sub__(self, other: Symbol | Number) -> Symbol:
        return Symbol(self.value - _known(other), self.form.plus(form_of(other), -1), self.tape)

    def __rsub__(self, other: Number) -> Symbol:
        return -self + other

    def __mul__(self, other: Symbol | Number) -> Symbol:
        factor = fixed(other)
        return Symbol(self.value * factor, self.form.times(factor), self.tape)

    def __neg__(self) -> Symbol:
        return Symbol(-self.value, self.form.times(-1), self.tape)

    def __pos__(self) -> Symbol:
        return self

    __radd__ = __add__
    __rmul__ = __mul__

    # ---- questions ----------------------------------------------------------------------------

    def _below(self, other: Symbol | Number, relation: str) -> bool:
        """``self < other`` or ``self <= other``."""
        one, two = self.value, _known(other)
        holds = one < two if relation == "<" else one <= two
        return self.tape.ask(self.form.plus(form_of(other), -1), relation, holds)

    def __lt__(self, other: Symbol | Number) -> bool:
        return self._below(other, "<")

    def __le__(self, other: Symbol | Number) -> bool:
        return self._below(other, "<=")

    def __gt__(self, other: Symbol | Number) -> bool:
        return not self._below(other, "<=")

    def __ge__(self, other: Symbol | Number) -> bool:
        return not self._below(other, "<")

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, Symbol | int | float):
            return NotImplemented
        equal = self.value == _known(other)
        return self.tape.ask(self.form.plus(form_of(other), -1), "==", equal)

    def __bool__(self) -> bool:
        return self != 0

    def __mod__(self, other: Symbol | Number) -> Number:
        modulus = fixed(other)
        parts = (modulus, self.value, self.form.const, *(c for _, c in self.form.terms))
        if not all(isinstance(part, int) for part in parts):
            return self._fixed() % modulus
        remainder = self.value % modulus
        self.tape.ask_modulo(self.form, int(modulus), int(remainder))
        return remainder

    # ---- everything else fixes the value ------------------------------------------------------

    def __hash__(self) -> int:
        return hash(self._fixed())

    def __index__(self) -> int:
        return self._fixed().__index__()  # type: ignore[union-attr]  # a float raises, as it should

    def __int__(self) -> int:
        return int(self._fixed())

    def __float__(self) -> float:
        return float(self._fixed())

    def __str__(self) -> str:
        return str(self._fixed())

    def __repr__(self) -> str:
        return repr(self._fixed())

    def __format__(self, spec: str) -> str:
        return format(self._fixed(), spec)

    def __abs__(self) -> Number:
        return abs(self._fixed())

    def __round__(self, digits: int | None = None) -> Number:
        return round(self._fixed(), digits)

    def __truediv__(self, other: Symbol | Number) -> Number:
        return self._fixed() / fixed(other)

    def __rtruediv__(self, other: Number) -> Number:
        return other / self._fixed()

    def __floordiv__(self, other: Symbol | Number) -> Number:
        return self._fixed() // fixed(other)

    def __rfloordiv__(self, other: Number) -> Number:
        return other // self._fixed()

    def __rmod__(self, other: Number) -> Number:
        return other % self._fixed()


def fixed(value: Symbol | Number) -> Number:
    """A plain number; a symbol's value becomes part of the guards."""
    return value._fixed() if isinstance(value, Symbol) else value


def form_of(value: object) -> Affine:
    """The affine form of a symbol or of a plain number; ``TypeError`` for anything else."""
    if isinstance(value, Symbol):
        return value.form
    if isinstance(value, int | float):
        return Affine((), value)
    raise TypeError(f"value: {value!r} must be a number")


def _known(value: Symbol | Number) -> Number:
    return value.value if isinstance(value, Symbol) else value
