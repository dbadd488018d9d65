"""Templates: the ops of a step as arrays, for every step whose numbers answer alike.

A template is made from one real step and holds wherever its guards do; amounts are affine forms of
a step's variables, priced by the cost model op by op. What readers get wrong: arrays are no second
definition of a schedule. They are what the policy's own ``step`` emitted, with its layers repeated,
and a test holds each of them to the op-by-op plan.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from math import lcm
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from policies.cost.model import CostModel
from policies.drive import Policy
from policies.plan.op import LANE_OF, Attention, Kind, Lane, Op, Scope, Slot
from policies.trace.attribution import CATEGORY_OF, Category
from policies.trace.metrics import PREFILL_KINDS
from sim.arrays import FENCE, FORWARD, N_LANES, PREFILL, Bytes, Floats, Ints, Longs
from sim.cut import Cut, Cutter
from sim.forms import Guards, compiled, form, matrix
from sim.stretch import Plan, expand, padded, stretch, unstretched
from sim.symbol import Affine, Guard
from sim.tracing import AMOUNTS, Step, What, emit, trace

_LANES = list(Lane)
_CATEGORIES = list(Category)


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
    """Ops of a template that cost the same: a sample of them, and how many there are."""

    sample: Op  # of the whole model; its numbers stand in the template's forms
    share: tuple[object, ...]  # ops of other templates with this and the same numbers cost as much
    uses: int


@dataclass(frozen=True, slots=True, eq=False)
class Template:
    """Ops of a step; arrays over ops as ``sim.arrays.Program`` has them.

    ``forms`` give the numbers of amount a from variables x: ``x @ forms[:, a] + constants[a]``, in
    the order of ``sim.tracing.AMOUNTS``.
    """

    guards: Guards
    amounts: tuple[Amount, ...]
    forms: Floats  # (n_variables, n_amounts * len(AMOUNTS))
    constants: Floats  # (n_amounts * len(AMOUNTS),)
    lane_ops: Longs  # (N_LANES,)
    lane: Bytes
    category: Bytes
    flags: Bytes
    ahead: NDArray[np.int8]
    amount: Ints
    first_read: Longs
    read: Ints
    first_write: Longs
    write: Ints
    layer: Ints
    batch: Ints

    @property
    def n_ops(self) -> int:
        """Ops in one step."""
        return len(self.lane)

    def numbers_over(self, x: Floats) -> tuple[list[list[int]], list[int], Longs]:
        """Numbers of all amounts over steps of variables x, of shape (n_steps, n_variables).

        Those of the first step, (n_amounts, len(AMOUNTS)); which of them, counted through, may
        vary over the steps; and these, (n_steps, varying).
        """
        first = np.rint(x[0] @ self.forms + self.constants).astype(np.int64)
        moving = np.flatnonzero((x != x[0]).any(axis=0))
        columns = np.flatnonzero((self.forms[moving] != 0).any(axis=0))
        change = (x[:, moving] - x[0, moving]) @ self.forms[np.ix_(moving, columns)]
        values = first[columns] + np.rint(change).astype(np.int64)
        return first.reshape(-1, len(AMOUNTS)).tolist(), columns.tolist(), values


class TemplateMaker:
    """Makes templates for one policy, model and placement."""

    def __init__(self, policy: Policy, cutter: Cutter, families: Families) -> None:
        self._policy, self._cutter, self._families = policy, cutter, families
        buffers = policy.buffers
        turns = (buffers.weight_slots, buffers.kv_in_slots, buffers.kv_out_slots)
        self._period = lcm(*(max(1, n) for n in turns))
        self._trusted: dict[bool, bool] = {}  # whether cutting is right in prefill, in decode
        self._short_models: dict[int, tuple[Cut, CostModel]] = {}

    def make(self, step: Step, n_variables: int) -> Template:
        """The template of a step; ``UntraceableError`` if the policy cannot be traced.

        In prefill and in decode, the first template from a cut model is compared with that of the
        whole model. If they differ the policy has a way with layers that cutting does not see, and
        such steps are not cut any more.
        """
        phase = step[0].is_prefill
        found = self._short(step) if self._trusted.get(phase, True) else None
        if found is None:
            self._trusted[phase] = False
            found = self._whole(step)
        elif phase not in self._trusted:
            whole = self._whole(step)
            self._trusted[phase] = found[0].same_ops(whole[0]) and found[1] == whole[1]
            found = whole
        return _assemble(*found, n_variables, self._cutter, self._families)

    def _short(self, step: Step) -> tuple[Plan, frozenset[Guard]] | None:
        """From a cut model; None if none that is shorter will do."""
        for n in self._cutter.lengths(self._period):
            short = trace(self._policy, self._cutter.cut(n), step)
            period = lcm(self._period, *short.moduli)
            if period != self._period:
                self._period = period
                return self._short(step)
            long = emit(self._policy, *self._short_model(n + period, step), step)
            repeats = (self._cutter.longest - n) // period
            stretched = stretch(short.plain, long, short.refs, period, repeats)
            if stretched is not None:
                plan = expand(stretched)
                classes = np.array(self._cutter.classes)
                if (classes[plan.layers[:, 0]] == plan.layer_class).all():
                    return plan, short.guards
        return None

    def _short_model(self, n: int, step: Step) -> tuple[Cut, CostModel]:
        """A cut model and what the policy believes of it."""
        if n not in self._short_models:
            cut, ctx = self._cutter.cut(n), step[0]
            placement = replace(ctx.placement, weights=cut.weights)
            self._short_models[n] = (cut, CostModel(cut.model, ctx.hardware, placement))
        return self._short_models[n]

    def _whole(self, step: Step) -> tuple[Plan, frozenset[Guard]]:
        traced = trace(self._policy, self._cutter.cut(self._cutter.longest), step)
        return expand(unstretched(traced.refs)), traced.guards


def _assemble(
    plan: Plan, guards: frozenset[Guard], n_variables: int, cutter: Cutter, families: Families
) -> Template:
    whats, ids = plan.whats, plan.what
    amounts, amount_of = _amounts(whats)
    forms = [form(number) for what in amounts for number in what.amounts]
    lanes = np.array([_LANES.index(LANE_OF[what.kind]) for what in whats], np.uint8)[ids]
    first_read, read = _slots(plan, [what.reads for what in whats], [1] * len(whats), families)
    skip = [1 + sum(layered for _, layered in what.reads) for what in whats]
    first_write, write = _slots(plan, [what.writes for what in whats], skip, families)
    categories = [_CATEGORIES.index(CATEGORY_OF[what.kind]) for what in whats]
    counts = np.bincount(amount_of[ids], minlength=len(amounts)).tolist()
    return Template(
        guards=compiled(guards, n_variables),
        amounts=tuple(
            _amount(what, uses, cutter) for what, uses in zip(amounts, counts, strict=True)
        ),
        forms=matrix(forms, n_variables),
        constants=np.array([form.const for form in forms], np.float64),
        lane_ops=np.bincount(lanes, minlength=N_LANES).astype(np.int64),
        lane=lanes,
        category=np.array(categories, np.uint8)[ids],
        flags=np.array([_flags(what.kind) for what in whats], np.uint8)[ids],
        ahead=np.array([what.ahead for what in whats], np.int8)[ids],
        amount=amount_of[ids].astype(np.int32),
        first_read=first_read,
        read=read,
        first_write=first_write,
        write=write,
        layer=plan.layers[:, 0].astype(np.int32),
        batch=np.array([what.batch for what in whats], np.int32)[ids],
    )


def plain_template(ops: Sequence[Op], families: Families, n_variables: int) -> Template:
    """Ops as they are, an amount each: whatever no policy's step emitted."""
    n = len(ops)
    lane = np.array([_LANES.index(LANE_OF[op.kind]) for op in ops], np.uint8)
    forms = [Affine((), getattr(op, name)) for op in ops for name in AMOUNTS]
    first_read, read = _plain_slots([op.reads for op in ops], families)
    first_write, write = _plain_slots([op.writes for op in ops], families)
    return Template(
        guards=compiled((), n_variables),
        amounts=tuple(Amount(op, (op.kind,), 1) for op in ops),
        forms=matrix(forms, n_variables),
        constants=np.array([form.const for form in forms], np.float64),
        lane_ops=np.bincount(lane, minlength=N_LANES).astype(np.int64),
        lane=lane,
        category=np.array([_CATEGORIES.index(CATEGORY_OF[op.kind]) for op in ops], np.uint8),
        flags=np.array([_flags(op.kind) for op in ops], np.uint8),
        ahead=np.zeros(n, np.int8),
        amount=np.arange(n, dtype=np.int32),
        first_read=first_read,
        read=read,
        first_write=first_write,
        write=write,
        layer=np.array([op.layer for op in ops], np.int32),
        batch=np.array([op.batch for op in ops], np.int32),
    )


def _plain_slots(rows: Sequence[tuple[Slot, ...]], families: Families) -> tuple[Longs, Ints]:
    first = np.cumsum([0, *(len(row) for row in rows)], dtype=np.int64)
    numbers = [families.number((slot, False)) for row in rows for slot in row]
    return first, np.array(numbers, np.int32)


def _flags(kind: Kind) -> int:
    forward = FORWARD if kind is Kind.FORWARD else 0
    return forward | (PREFILL if kind in PREFILL_KINDS else 0) | (FENCE * (kind is Kind.FENCE))


def _amounts(whats: list[What]) -> tuple[list[What], Longs]:
    """One op of each amount, and for each of ``whats`` the number of its amount."""
    numbers: dict[tuple[object, ...], int] = {}
    first: list[What] = []
    of = []
    for what in whats:
        key = (*_share(what), what.amounts)
        if key not in numbers:
            first.append(what)
        of.append(numbers.setdefault(key, len(numbers)))
    return first, np.array(of, np.int64)


def _share(what: What) -> tuple[object, ...]:
    """What the cost of an op depends on besides its numbers and the block's KV homes."""
    memory = frozenset((slot.tier, slot.pinned) for slot, _ in (*what.reads, *what.writes))
    return (what.kind, what.layer_class, what.scope, what.attention, memory)


def _amount(what: What, uses: int, cutter: Cutter) -> Amount:
    sample = Op(
        what.kind,
        0,
        0,
        cutter.classes.index(what.layer_class),
        scope=Scope(what.scope),
        attention=Attention(what.attention),
        reads=tuple(slot for slot, _ in what.reads),
        writes=tuple(slot for slot, _ in what.writes),
    )
    return Amount(sample, _share(what), uses)


def _slots(
    plan: Plan, slots: list[tuple[tuple[Slot, bool], ...]], first_column: list[int],
    families: Families,
) -> tuple[Longs, Ints]:  # fmt: skip
    """Slots of each op one after another, and where each op's begin.

    ``first_column[w]`` is the column of a plan's layers that holds the first layer of these slots.
    """
    most = max((len(row) for row in slots), default=0)
    base = padded([[families.number(family) for family in row] for row in slots], most, -1)
    column = padded([[0] * len(row) for row in slots], most, -1)
    for w, row in enumerate(slots):
        at = first_column[w]
        for j, (_, layered) in enumerate(row):
            column[w, j] = at if layered else -1
            at += layered
    bases, columns = base[plan.what], column[plan.what]
    layers = np.take_along_axis(plan.layers, np.maximum(columns, 0), axis=1) if most else bases
    numbers = bases + np.where(columns >= 0, layers, 0)
    used = bases >= 0
    first = np.concatenate((np.zeros(1, np.int64), np.cumsum(used.sum(axis=1))))
    return first, numbers[used].astype(np.int32)
