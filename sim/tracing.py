"""Tracing: one step of a policy, emitted once with symbols in place of numbers.

All numbers of a step, those of its ``StepContext`` and of two decisions, are variables in a fixed
order (``variables``). The policy's own ``step`` then says, for a cut model, which ops there are and
how their amounts follow from the variables. What readers get wrong: a trace is not made for a shape
of step that somebody thought of; it is made for one real step, and its guards say for which others
it holds as well.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from dataclasses import fields, replace
from functools import lru_cache
from operator import attrgetter
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from policies.cost.model import CostModel
from policies.drive import Decision, Policy, StepContext
from policies.placement import Placement, Shares
from policies.plan.op import Kind, Op, Slot
from policies.spec.workload import Batch, Block
from sim.cut import Cut
from sim.symbol import Affine, Guard, Indexed, Number, Symbol, Tape, fixed

STEP, BLOCK, MAX_NEW, SHARES, BATCHES = 0, 1, 2, 3, 6  # where variables begin

_PLACES = ("block", "step", "layer", "batch")
# Fields of an op that costs may depend on and that are numbers.
AMOUNTS = tuple(f.name for f in fields(Op) if f.type in ("int", int) and f.name not in _PLACES)
# Fields of a step that are numbers, in tuples: of its context, and of a decision.
_KNOWN = ("step", "block", "model", "hardware", "placement", "belief", "memo")
HELD = tuple(f.name for f in fields(StepContext) if f.name not in _KNOWN)
CHOSEN = tuple(f.name for f in fields(Decision) if f.name not in ("solver", "solve_s"))

_numbers = attrgetter(*AMOUNTS)
_chosen = attrgetter(*CHOSEN)
_LAYER = re.compile(r"/l(\d+)(?=/|$)")

Step = tuple[StepContext, Decision, Decision | None]
Family = tuple[Slot, bool]  # a slot, or its family and that it has a layer


class UntraceableError(ValueError):
    """A policy whose steps cannot be turned into arrays; the reason is its text."""


class Ref(NamedTuple):
    """An op of a cut model in two parts: what it is, and in which layers.

    ``layers`` are those of the op and, in order, of the slots that are named after a layer.
    """

    what: What
    layers: tuple[int, ...]


class Turn(NamedTuple):
    """The place of an op in a run that a loop emitted: op ``place`` of ``length``, turn ``number``.

    The loop counts from ``first``, ``times`` times; ``counts`` are the amounts that are its count.
    ``n_turns`` were traced.
    """

    first: Affine
    times: Affine
    number: int
    place: int
    length: int
    n_turns: int
    counts: tuple[int, ...]


class What(NamedTuple):
    """Everything about an op but its layers; ops of one template that share it cost the same."""

    kind: Kind
    layer_class: int
    scope: str
    attention: str
    batch: int
    ahead: int  # steps that the op works ahead of the one in which it is emitted
    amounts: tuple[Affine | Number, ...]  # in the order of AMOUNTS
    reads: tuple[Family, ...]
    writes: tuple[Family, ...]
    turn: Turn | None = None


class Traced(NamedTuple):
    """Ops of one step, with forms as amounts and with plain numbers, and what was asked."""

    refs: list[Ref]
    plain: list[Ref]
    guards: frozenset[Guard]
    moduli: frozenset[int]
    indexed: list[Indexed]


# ---- variables -----------------------------------------------------------------------------------


def _flat(value: Any) -> Iterator[Number]:
    """Numbers of nested tuples, in order."""
    for item in value:
        if isinstance(item, tuple):
            yield from _flat(item)
        else:
            yield item


def _refilled(value: Any, numbers: Iterator[Any]) -> Any:
    """The same nested tuples with other numbers."""
    items = [_refilled(v, numbers) if isinstance(v, tuple) else next(numbers) for v in value]
    return value._make(items) if hasattr(value, "_make") else tuple(items)


def variables(steps: Sequence[Step]) -> NDArray[np.float64]:
    """Values of shape (n_steps, n_variables) for steps of one block.

    Those of decisions come last: of the one in force and of the next, zeros if there is none.
    """
    ctx, n = steps[0][0], len(steps)
    batches, shares = ctx.block.batches, ctx.placement.kv[ctx.block.index]
    start = [0, ctx.block.index, ctx.block.max_new, shares.gpu, shares.host, shares.disk]
    start += [batch.prompt_len for batch in batches] + [batch.n_seqs for batch in batches]
    nows, thens = [now for _, now, _ in steps], [then for _, _, then in steps]
    # Steps share decisions, and all of them are alive here.
    decisions = {id(decision): decision for decision in (*nows, *thens) if decision is not None}
    number = {key: i for i, key in enumerate(decisions)}
    rows = [list(_flat(_chosen(decision))) for decision in decisions.values()]
    rows.append([0] * len(rows[0]))
    try:
        held = [np.array([getattr(c, name) for c, _, _ in steps], np.float64) for name in HELD]
        chosen = np.array(rows, np.float64)
    except ValueError as error:
        raise UntraceableError("steps of a block differ in how many numbers they have") from error
    now = [number[id(decision)] for decision in nows]
    then = [number.get(id(decision), -1) for decision in thens]  # the last row are zeros
    columns = (np.tile(start, (n, 1)), *(h.reshape(n, -1) for h in held), chosen[now], chosen[then])
    x = np.hstack(columns)
    x[:, STEP] = [c.step for c, _, _ in steps]
    return np.asfortranarray(x)  # it is used column by column


# ---- traces --------------------------------------------------------------------------------------


def trace(policy: Policy, cut: Cut, step: Step, counting: bool = False) -> Traced:
    """The ops of ``step`` for a cut model; ``UntraceableError`` if they cannot be told.

    ``counting``: a number that is used as an index is noted, not fixed by a guard.
    """
    tape = Tape(indexed=[] if counting else None)
    ctx, now, then = _symbolic(step, cut, tape)
    tape.recording = True
    plain, refs = [], []
    try:
        for op in policy.step(ctx, now, then):
            tape.position += 1
            numbers = _numbers(op)
            ref = _ref(op, cut, ctx, tuple([_value(n) for n in numbers]))
            amounts = tuple([_form(n) for n in numbers])
            plain.append(ref)
            refs.append(Ref(What(*ref.what[:6], amounts, *ref.what[7:]), ref.layers))
    except (TypeError, AttributeError, UntraceableError) as error:
        raise UntraceableError(f"policy {policy.name}: {error}") from error
    tape.recording = False
    return Traced(refs, plain, frozenset(tape.guards), frozenset(tape.moduli), tape.indexed or [])


def _value(number: Any) -> Number:
    return number.value if isinstance(number, Symbol) else number


def _form(number: Any) -> Affine | Number:
    return number.form if isinstance(number, Symbol) else number


def emit(policy: Policy, cut: Cut, belief: CostModel, step: Step) -> list[Ref]:
    """The same ops with plain numbers, asked nothing; ``belief`` is that of the cut model."""
    ctx, now, then = step
    placement = belief.placement
    plain = replace(ctx, model=cut.model, placement=placement, belief=belief, memo={})
    return [_ref(op, cut, plain, _numbers(op)) for op in policy.step(plain, now, then)]


class _OneShare(tuple[Shares, ...]):
    """KV shares of every block up to the one at hand: its own, so that no index is asked for."""

    __slots__ = ()

    def __getitem__(self, index: object) -> Shares:  # type: ignore[override]
        return next(iter(self))


def _symbolic(step: Step, cut: Cut, tape: Tape) -> Step:
    """The step with symbols for all its numbers.

    Types are bent here and nowhere else: a symbol stands where the policy declares a number.
    """
    ctx, now, then = step
    row = variables([step])[0]
    symbols: Iterator[Any] = (
        tape.symbol(value if SHARES <= i < BATCHES else int(value), ((i, 1),), 0)
        for i, value in enumerate(row.tolist())
    )
    number, index, max_new = next(symbols), next(symbols), next(symbols)
    shares = Shares(next(symbols), next(symbols), next(symbols))
    prompts, seqs = ([next(symbols) for _ in ctx.block.batches] for _ in range(2))
    batches = tuple(Batch(s, p) for s, p in zip(seqs, prompts, strict=True))
    homes = _OneShare((shares,) * (ctx.block.index + 1))
    placement = Placement(cut.weights, homes, ctx.placement.act)
    symbolic = replace(
        ctx,
        step=number,
        block=Block(index, batches, max_new),
        model=cut.model,
        placement=placement,
        belief=CostModel(cut.model, ctx.hardware, placement),
        memo={},
        **{name: _refilled(getattr(ctx, name), symbols) for name in HELD},
    )
    decisions = [
        replace(decision, **{name: _refilled(getattr(decision, name), symbols) for name in CHOSEN})
        for decision in (now, then)
        if decision is not None
    ]
    return symbolic, decisions[0], decisions[1] if then is not None else None


def _ref(op: Op, cut: Cut, ctx: StepContext, amounts: tuple[Number, ...]) -> Ref:
    layer, batch, ahead = op.layer, op.batch, 0
    if layer.__class__ is not int:
        layer = int(fixed(layer))
    if batch.__class__ is not int:
        batch = int(fixed(batch))
    if op.block is not ctx.block.index and op.block != ctx.block.index:
        raise UntraceableError("an op works for another block than its step")
    if op.step is not ctx.step:
        ahead = int(fixed(op.step - ctx.step))
    reads, read_layers = _families(op.reads)
    writes, write_layers = _families(op.writes)
    what = What(
        op.kind, cut.classes[layer], op.scope, op.attention, batch, ahead, amounts, reads, writes
    )
    return Ref(what, (layer, *read_layers, *write_layers))


@lru_cache(maxsize=4096)
def _families(slots: tuple[Slot, ...]) -> tuple[tuple[Family, ...], tuple[int, ...]]:
    """Slots without the layers in their names, and these layers."""
    found = [_family(slot) for slot in slots]
    layers = tuple(layer for _, layer in found if layer is not None)
    return tuple((slot, layer is not None) for slot, layer in found), layers


def _family(slot: Slot) -> tuple[Slot, int | None]:
    """A slot without the layer in its name, and this layer."""
    found = _LAYER.search(slot.name)
    if found is None:
        return slot, None
    name = slot.name[: found.start()] + "/l*" + slot.name[found.end() :]
    return slot._replace(name=name), int(found[1])
