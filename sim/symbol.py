"""Numbers that remember where they came from: how a policy's step is traced.

A ``Symbol`` is a number that also knows which affine combination of named variables it is. Ops that
a policy emits carry such numbers, so their amounts follow for any other values of the variables.
Whatever the policy *asks* of a number (is it positive? is it even? which index is it?) becomes a
``Guard``: the ops hold for exactly those values that give the same answers. What readers get wrong:
nothing has to be known about the policy for that. What affine forms cannot express, a product of
two variables or a number used as an index, is answered by a guard that fixes the value.
"""

from __future__ import annotations

from typing import NamedTuple

Number = int | float
Terms = tuple[tuple[int, Number], ...]  # (variable, coefficient), by variable, no coefficient is 0


class Affine(NamedTuple):
    """``const + sum(c * variable[i] for i, c in terms)``."""

    terms: Terms
    const: Number


class Guard(NamedTuple):
    """``(form relation 0) == holds``; with a modulus ``form % modulus == 0`` always."""

    terms: Terms
    const: Number
    relation: str  # "<", "<=" or "=="
    holds: bool
    modulus: int


class Indexed(NamedTuple):
    """A form whose ``value`` was used as an index when a tape was at ``position``."""

    position: int
    form: Affine
    value: int


class Tape:
    """What was asked while it was ``recording``: guards, and the moduli that occurred.

    ``indexed`` is None, or collects the numbers that were used as an index instead of fixing them:
    each with ``position``, which whoever reads the tape moves on.
    """

    __slots__ = ("_known", "guards", "indexed", "moduli", "position", "recording")

    def __init__(self, recording: bool = False, indexed: list[Indexed] | None = None) -> None:
        self.guards: set[Guard] = set()
        self.moduli: set[int] = set()
        self.recording, self.indexed, self.position = recording, indexed, 0
        self._known: dict[Affine, Symbol] = {}

    def symbol(self, value: Number, terms: Terms, const: Number) -> Symbol:
        """The one symbol of a form: what was asked of it once is not recorded twice."""
        key = Affine(terms, const)
        found = self._known.get(key)
        if found is None:
            found = self._known[key] = Symbol(value, terms, const, self)
        return found

    def ask(self, terms: Terms, const: Number, relation: str, holds: bool) -> bool:
        """Record an answer and give it back."""
        if terms and self.recording:
            self.guards.add(Guard(terms, const, relation, holds, 0))
        return holds

    def ask_modulo(self, terms: Terms, const: int, modulus: int) -> None:
        """Record that a form of whole coefficients is a multiple; what cannot matter is dropped."""
        if not self.recording:
            return
        self.moduli.add(modulus)
        left = tuple((i, c % modulus) for i, c in terms if c % modulus)
        if left:
            self.guards.add(Guard(left, const % modulus, "==", True, modulus))


class Symbol:
    """A number of known value and origin. Not an ``int``: nothing may read it past its tape.

    Policies ask the same of the same numbers for every layer, so results are remembered.
    """

    __slots__ = ("_answers", "_more", "_other", "_times", "const", "tape", "terms", "value")

    def __init__(self, value: Number, terms: Terms, const: Number, tape: Tape) -> None:
        self.value, self.terms, self.const, self.tape = value, terms, const, tape
        self._more: dict[int, Symbol] = {}  # plus a number
        self._times: dict[int, Symbol] = {}
        # Plus or minus a symbol, which is kept as well so that its id stays its own.
        self._other: dict[tuple[int, int], tuple[Symbol, Symbol]] = {}
        self._answers: dict[str | int, Number] = {}

    @property
    def form(self) -> Affine:
        """Its origin."""
        return Affine(self.terms, self.const)

    def _fixed(self) -> Number:
        """The value, which from now on is part of the guards."""
        self.tape.ask(self.terms, self.const - self.value, "==", True)
        return self.value

    # ---- affine -------------------------------------------------------------------------------

    def __add__(self, other: Symbol | Number) -> Symbol:
        if other.__class__ is int:
            found = self._more.get(other)
            if found is None:
                found = self.tape.symbol(self.value + other, self.terms, self.const + other)
                self._more[other] = found
            return found
        if isinstance(other, Symbol):
            return self._combined(other, 1)
        return self.tape.symbol(self.value + other, self.terms, self.const + other)

    def __sub__(self, other: Symbol | Number) -> Symbol:
        return self._combined(other, -1) if isinstance(other, Symbol) else self + -other

    def _combined(self, other: Symbol, sign: int) -> Symbol:
        known = self._other.get((id(other), sign))
        if known is None:
            value, const = self.value + sign * other.value, self.const + sign * other.const
            found = self.tape.symbol(value, _sum(self.terms, other.terms, sign), const)
            known = self._other[id(other), sign] = (found, other)
        return known[0]

    def __rsub__(self, other: Number) -> Symbol:
        return -self + other

    def __mul__(self, other: Symbol | Number) -> Symbol:
        factor = fixed(other)
        if factor.__class__ is not int:
            return self._scaled(factor)
        found = self._times.get(factor)
        if found is None:
            found = self._times[factor] = self._scaled(factor)
        return found

    def _scaled(self, factor: Number) -> Symbol:
        terms = tuple((i, c * factor) for i, c in self.terms if c * factor)
        return self.tape.symbol(self.value * factor, terms, self.const * factor)

    def __neg__(self) -> Symbol:
        return self * -1

    def __pos__(self) -> Symbol:
        return self

    __radd__ = __add__
    __rmul__ = __mul__

    # ---- questions ----------------------------------------------------------------------------

    def _ask(self, other: Symbol | Number, relation: str) -> bool:
        """``self < other``, ``self <= other`` or ``self == other``."""
        left = self - other  # a difference is below, at or above 0 exactly as the two compare
        known = left._answers.get(relation)
        if known is None:
            value = left.value
            known = value < 0 if relation == "<" else value <= 0 if relation == "<=" else value == 0
            if left.tape.recording:
                left._answers[relation] = left.tape.ask(left.terms, left.const, relation, known)
        return bool(known)

    def __lt__(self, other: Symbol | Number) -> bool:
        return self._ask(other, "<")

    def __le__(self, other: Symbol | Number) -> bool:
        return self._ask(other, "<=")

    def __gt__(self, other: Symbol | Number) -> bool:
        return not self._ask(other, "<=")

    def __ge__(self, other: Symbol | Number) -> bool:
        return not self._ask(other, "<")

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, Symbol | int | float):
            return NotImplemented
        return self._ask(other, "==")

    def __bool__(self) -> bool:
        return not self._ask(0, "==")

    def __mod__(self, other: Symbol | Number) -> Number:
        modulus = fixed(other)
        known = self._answers.get(modulus) if modulus.__class__ is int else None
        if known is not None:
            return known
        value, const = self.value, self.const
        parts = (modulus, value, const, *(c for _, c in self.terms))
        if not all(isinstance(part, int) for part in parts):
            return self._fixed() % modulus
        remainder = value % modulus
        self.tape.ask_modulo(self.terms, int(const - remainder), int(modulus))
        if self.tape.recording:
            self._answers[int(modulus)] = remainder
        return remainder

    # ---- everything else fixes the value ------------------------------------------------------

    def __hash__(self) -> int:
        return hash(self._fixed())

    def __index__(self) -> int:
        value = self.value.__index__()  # type: ignore[union-attr]  # a float raises, as it should
        if self.tape.indexed is None or not self.tape.recording:
            self._fixed()
        else:
            self.tape.indexed.append(Indexed(self.tape.position, self.form, value))
        return value

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


def affine(number: Affine | Number) -> Affine:
    """A plain number as a form."""
    return number if isinstance(number, Affine) else Affine((), number)


def total(one: Affine, two: Affine) -> Affine:
    """``one + two``."""
    return Affine(_sum(one.terms, two.terms, 1), one.const + two.const)


def difference(one: Affine, two: Affine) -> Affine:
    """``one - two``."""
    return Affine(_sum(one.terms, two.terms, -1), one.const - two.const)


def _sum(one: Terms, two: Terms, sign: int) -> Terms:
    """Terms of the sum, or with ``sign`` -1 of the difference."""
    if not two:
        return one
    held = dict(one)
    for i, c in two:
        held[i] = held.get(i, 0) + sign * c
    return tuple(sorted((i, c) for i, c in held.items() if c))
