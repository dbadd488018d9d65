"""Assembly: a step's plan as the arrays of a template.

Ops become rows, their slots integers, and ops that cost the same share an amount. What readers get
wrong: a loop has one row for every op of one turn, and a row of amounts for each turn it may take.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Sequence

import numpy as np

from policies.plan.op import LANE_OF, Attention, Kind, Lane, Op, Scope, Slot
from policies.trace.attribution import CATEGORY_OF, Category
from policies.trace.metrics import PREFILL_KINDS
from sim.arrays import FENCE, FORWARD, N_LANES, PREFILL, Bytes, Floats, Ints, Longs
from sim.cut import Cutter
from sim.forms import Forms, Numbers, compiled
from sim.kernel import find_led
from sim.loops import bounds, first_turns
from sim.stretch import Plan, padded
from sim.symbol import Affine, Guard, Number, affine, difference, total
from sim.template import Amount, Families, Loop, Template
from sim.tracing import AMOUNTS, What

_START, _STOP = AMOUNTS.index("start"), AMOUNTS.index("stop")
_LANES, _CATEGORIES = list(Lane), list(Category)
_LANE = {kind: _LANES.index(lane) for kind, lane in LANE_OF.items()}
_CATEGORY = {kind: _CATEGORIES.index(category) for kind, category in CATEGORY_OF.items()}


def assemble(
    plan: Plan, guards: Collection[Guard], x: Floats, cutter: Cutter, families: Families,
    questions: Forms,
) -> Template | None:  # fmt: skip
    """The template of a plan; None if its loops cannot be told from one turn.

    Loops may count as far as they do in steps of variables ``x``, (n_steps, n_variables); guards
    ask ``questions``.
    """
    plan_or_none = first_turns(plan)
    if plan_or_none is None:
        return None
    plan = plan_or_none
    whats, ids = plan.whats, plan.what
    pairs = list(dict.fromkeys(bounds(what.turn) for what in whats if what.turn))
    n_turns = _most_turns(pairs, x)
    guards = {*guards, *_at_most(n_turns, pairs)}
    amounts, amount_of = _amounts(whats, n_turns)
    lanes = np.array([_LANE[what.kind] for what in whats], np.uint8)[ids]
    loop = np.array([pairs.index(bounds(w.turn)) if w.turn else 0 for w in whats], np.int32)[ids]
    in_loop = np.array([what.turn is not None for what in whats])[ids]
    turn = [w.turn.length if w.turn and w.turn.place == 0 else 0 for w in whats]
    amount = amount_of[ids].astype(np.int32)
    uses = np.bincount(amount[~in_loop], minlength=len(amounts)).tolist()
    first_read, read = _slots(plan, [what.reads for what in whats], [1] * len(whats), families)
    skip = [1 + sum(layered for _, layered in what.reads) for what in whats]
    first_write, write = _slots(plan, [what.writes for what in whats], skip, families)
    forms = [what.amounts for what in amounts]
    flags = np.array([_flags(what.kind) for what in whats], np.uint8)[ids]
    slots = (first_read, read, first_write, write)
    return Template(
        guards=compiled(guards, questions),
        amounts=tuple(_amount(what, n, cutter) for what, n in zip(amounts, uses, strict=True)),
        numbers=_numbers(forms),
        lengths=_numbers([_lengths(row) for row in forms]),
        loops=tuple(
            _loop(lanes[in_loop & (loop == n)], amount[in_loop & (loop == n)])
            for n in range(len(pairs))
        ),
        bounds=_numbers(pairs),
        n_turns=n_turns,
        plain_ops=_lane_ops(lanes[~in_loop]),
        led=_led(lanes, flags, in_loop.astype(np.uint8), slots, families),
        lane=lanes,
        category=np.array([_CATEGORY[what.kind] for what in whats], np.uint8)[ids],
        flags=flags,
        ahead=np.array([what.ahead for what in whats], np.int8)[ids],
        amount=amount,
        loop=loop,
        turn=np.array(turn, np.uint8)[ids],
        first_read=first_read,
        read=read,
        first_write=first_write,
        write=write,
        layer=plan.layers[:, 0].astype(np.int32),
        batch=np.array([what.batch for what in whats], np.int32)[ids],
    )


def plain_template(ops: Sequence[Op], families: Families) -> Template:
    """Ops as they are, an amount each: whatever no policy's step emitted."""
    n = len(ops)
    lane = np.array([_LANE[op.kind] for op in ops], np.uint8)
    forms = [tuple(getattr(op, name) for name in AMOUNTS) for op in ops]
    first_read, read = _plain_slots([op.reads for op in ops], families)
    first_write, write = _plain_slots([op.writes for op in ops], families)
    flags, in_loop = np.array([_flags(op.kind) for op in ops], np.uint8), np.zeros(n, np.uint8)
    return Template(
        guards=compiled((), Forms()),
        amounts=tuple(Amount(op, (op.kind,), 1) for op in ops),
        numbers=_numbers(forms),
        lengths=_numbers([_lengths(row) for row in forms]),
        loops=(),
        bounds=_numbers(()),
        n_turns=0,
        plain_ops=_lane_ops(lane),
        led=_led(lane, flags, in_loop, (first_read, read, first_write, write), families),
        lane=lane,
        category=np.array([_CATEGORY[op.kind] for op in ops], np.uint8),
        flags=flags,
        ahead=np.zeros(n, np.int8),
        amount=np.arange(n, dtype=np.int32),
        loop=np.zeros(n, np.int32),
        turn=np.zeros(n, np.uint8),
        first_read=first_read,
        read=read,
        first_write=first_write,
        write=write,
        layer=np.array([op.layer for op in ops], np.int32),
        batch=np.array([op.batch for op in ops], np.int32),
    )


def _numbers(rows: Sequence[Sequence[Affine | Number]]) -> Numbers:
    return Numbers([number for row in rows for number in row])


def _lengths(row: Sequence[Affine | Number]) -> list[Affine | Number]:
    """The numbers of an amount with its range of tokens moved to begin at 0."""
    out = list(row)
    out[_STOP], out[_START] = difference(affine(row[_STOP]), affine(row[_START])), 0
    return out


def _lane_ops(lanes: Bytes) -> Longs:
    return np.bincount(lanes, minlength=N_LANES).astype(np.int64)


def _led(
    lane: Bytes, flags: Bytes, in_loop: Bytes, slots: tuple[Longs, Ints, Longs, Ints],
    families: Families,
) -> Bytes:  # fmt: skip
    led, touched = np.zeros(N_LANES, np.uint8), np.zeros((families.n_slots, 2), np.uint8)
    find_led(led, lane, flags, in_loop, *slots, touched)
    return led


def _flags(kind: Kind) -> int:
    forward = FORWARD if kind is Kind.FORWARD else 0
    return forward | (PREFILL if kind in PREFILL_KINDS else 0) | (FENCE * (kind is Kind.FENCE))


def _plain_slots(rows: Sequence[tuple[Slot, ...]], families: Families) -> tuple[Longs, Ints]:
    first = np.cumsum([0, *(len(row) for row in rows)], dtype=np.int64)
    numbers = [families.number((slot, False)) for row in rows for slot in row]
    return first, np.array(numbers, np.int32)


# ---- loops ---------------------------------------------------------------------------------------


def _loop(lanes: Bytes, amount: Ints) -> Loop:
    numbers, ops = np.unique(amount, return_counts=True)
    return Loop(_lane_ops(lanes), tuple(zip(numbers.tolist(), ops.tolist(), strict=True)))


def _most_turns(pairs: Sequence[tuple[Affine, ...]], x: Floats) -> int:
    """How far loops of these bounds count in steps of variables x."""
    last = Numbers([total(first, times) for first, times in pairs])
    return max(0, int(last.over(x).max(initial=0)))


def _at_most(n_turns: int, pairs: Sequence[tuple[Affine, ...]]) -> Iterator[Guard]:
    """What keeps loops of these bounds from counting farther."""
    for first, times in pairs:
        last = total(first, times)
        if last.terms:
            yield Guard(last.terms, last.const - n_turns, "<=", True, 0)


# ---- amounts -------------------------------------------------------------------------------------


def _amounts(whats: Sequence[What], n_turns: int) -> tuple[list[What], Longs]:
    """One op of each amount, and for each of ``whats`` the number of its amount.

    An op of a loop has ``n_turns`` of them, one behind another.
    """
    numbers: dict[tuple[object, ...], int] = {}
    first: list[What] = []
    of = []
    for what in whats:
        turns = [what] if what.turn is None else [_counting(what, n) for n in range(n_turns)]
        key = (*_share(what), what.turn is None, *(t.amounts for t in turns[:2]))
        if key not in numbers:
            numbers[key] = len(first)
            first.extend(turns)
        of.append(numbers[key])
    return first, np.array(of, np.int64)


def _counting(what: What, n: int) -> What:
    """An op of a loop in the turn that counts n."""
    counts = what.turn.counts if what.turn else ()
    amounts = tuple(n if i in counts else amount for i, amount in enumerate(what.amounts))
    return what._replace(amounts=amounts)


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


# ---- slots ---------------------------------------------------------------------------------------


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
