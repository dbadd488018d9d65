"""Loops: runs of ops whose number is itself a number of the step, such as pieces of weights.

A policy that counts in a loop uses the count as an index, which would fix it: every way to cut
weights would need a template of its own. Instead the loop is traced with a few turns, and if the
ops from where it was entered are such turns, its count stays a variable. What readers get wrong: a
number that was used as an index and explains no run is fixed after all, at its traced value.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from itertools import groupby
from operator import attrgetter

import numpy as np

from policies.drive import Decision
from sim.stretch import Plan
from sim.symbol import Affine, Guard, Indexed, Number, difference
from sim.tracing import Ref, Step, Traced, Turn

TURNS = 3  # in which a loop is traced: the fewest that tell a count from its square
_LONGEST = 4  # ops of one turn at most


def few_turns(step: Step) -> Step:
    """The step with ``TURNS`` pieces of weights for every batch."""
    ctx, now, then = step

    def cut(decision: Decision) -> Decision:
        return replace(decision, slices=(TURNS,) * len(decision.slices))

    return ctx, cut(now), cut(then) if then is not None else None


def with_loops(traced: Traced) -> tuple[list[Ref], frozenset[Guard]]:
    """The ops, those of loops marked with their turn, and the guards with what fixes the rest."""
    refs, guards = list(traced.refs), set(traced.guards)
    for position, group in groupby(traced.indexed, key=attrgetter("position")):
        used = list(group)
        run, n_bounds = _run_at(refs, position, used)
        refs[position : position + len(run)] = run
        for ref in run[:1]:
            guards.update(
                Guard(*form, "<", False, 0) for form in bounds(ref.what.turn) if form.terms
            )
        for _, form, value in used[: len(used) - n_bounds]:
            guards.add(Guard(form.terms, form.const - value, "==", True, 0))
    return refs, frozenset(guards)


def bounds(turn: Turn | None) -> tuple[Affine, ...]:
    """Where the loop of a turn begins to count and how many turns it takes."""
    return (turn.first, turn.times) if turn else ()


def _run_at(refs: Sequence[Ref], position: int, used: Sequence[Indexed]) -> tuple[list[Ref], int]:
    """The run that the last one or two of ``used`` bound, and how many do; none if it is none."""
    stop = used[-1]
    for start in reversed(used[-2:-1]):
        run = _run(refs, position, start, stop)
        if run:
            return run, 2
    run = _run(refs, position, Indexed(position, Affine((), 0), 0), stop)
    return run, 1 if run else 0


def _run(refs: Sequence[Ref], position: int, start: Indexed, stop: Indexed) -> list[Ref]:
    """The ops from ``position`` on as turns that count from one bound to the other, or none."""
    n_turns, times = stop.value - start.value, difference(stop.form, start.form)
    for length in range(1, _LONGEST + 1) if n_turns >= TURNS else ():
        ops = refs[position : position + n_turns * length]
        if len(ops) < n_turns * length:
            break
        once = [
            (ref, _counts(ref, later, start.value))
            for ref, later in zip(ops[:length], ops[length : 2 * length], strict=True)
        ]
        run = [_in_turn(*op, number) for number in range(n_turns) for op in once]
        if run == ops:
            where = [divmod(i, length) for i in range(len(ops))]
            turns = [
                Turn(start.form, times, number, place, length, n_turns, once[place][1])
                for number, place in where
            ]
            return [
                Ref(ref.what._replace(turn=turn), ref.layers)
                for ref, turn in zip(ops, turns, strict=True)
            ]
    return []


def _counts(ref: Ref, later: Ref, start: int) -> tuple[int, ...]:
    """Amounts that go from ``start`` in an op to one more in that of the next turn."""
    pairs = enumerate(zip(ref.what.amounts, later.what.amounts, strict=True))
    return tuple(i for i, pair in pairs if pair == (start, start + 1))


def _in_turn(ref: Ref, counts: tuple[int, ...], number: int) -> Ref:
    """An op of the first turn as it would be in a later one."""
    amounts: list[Number | Affine] = list(ref.what.amounts)
    for i in counts:
        amounts[i] += number  # type: ignore[operator]  # what counts is a number
    return Ref(ref.what._replace(amounts=tuple(amounts)), ref.layers)


def first_turns(plan: Plan) -> Plan | None:
    """A plan without the later turns of its loops; None if a loop is torn apart."""
    turns = [what.turn for what in plan.whats]
    if not any(turns):
        return plan
    at = np.array([t.number * t.length + t.place if t else -1 for t in turns], np.int64)
    size = np.array([t.n_turns * t.length if t else 0 for t in turns], np.int64)[plan.what]
    kept = np.array([t is None or t.number == 0 for t in turns])
    here = at[plan.what]
    before, after = np.append(-1, here[:-1]), np.append(here[1:], -1)
    whole = ((here == 0) | (before == here - 1)) & ((here == size - 1) | (after == here + 1))
    if not whole[here >= 0].all():
        return None
    number = np.cumsum(kept) - 1
    rows = kept[plan.what]
    whats = [what for what, stays in zip(plan.whats, kept.tolist(), strict=True) if stays]
    return Plan(whats, number[plan.what[rows]], plan.layers[rows])
