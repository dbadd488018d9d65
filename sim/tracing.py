"""Tracing: one step of a policy, emitted once with symbols in place of numbers.

All numbers of a step (its ``StepContext`` and two decisions) are variables, in a fixed order
(``variables``). The policy's own ``step`` then says, for a cut model, which ops there are and how
their amounts follow from the variables. What readers get wrong: a trace is not made for a shape of
step that somebody thought of; it is made for one real step, and its guards say for which others it
holds as well.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import replace
from functools import lru_cache
from operator import attrgetter
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from policies.cost.model import CostModel
from policies.drive import Decision, Policy, StepContext
from policies.homes import Homes
from policies.placement import Placement, Shares
from policies.plan.op import Kind, Op, Slot
from policies.spec.workload import Batch, Block
from sim.cut import Cut
from sim.symbol import Affine, Guard, Number, Symbol, Tape, fixed

STEP, BLOCK, MAX_NEW, SHARES, BATCHES = 0, 1, 2, 3, 6  # where variables begin
NOW = ("n_recompute", "slices", "n_front", "on_cpu")  # what a step asks of its decision
THEN = (*NOW, "n_inputs")  # and of that of the next step
PER_BATCH = 2 + len(Homes._fields) + len(NOW) + len(THEN)  # prompt_len, n_seqs, homes, decisions

# Fields of an op that costs may depend on and that are numbers.
AMOUNTS = ("part", "n_parts", "n_seqs", "start", "stop", "n_new", "n_recompute", "n_ctx",
           "n_front", "n_project")  # fmt: skip

_numbers = attrgetter(*AMOUNTS)
_LAYER = re.compile(r"/l(\d+)(?=/|$)")

Step = tuple[StepContext, Decision, Decision | None]


class UntraceableError(ValueError):
    """A policy whose steps cannot be turned into arrays; the reason is its text."""


class Ref(NamedTuple):
    """An op of a cut model in two parts: what it is, and in which layers.

    ``layers`` are those of the op and, in order, of the slots that are named after a layer.
    """

    what: What
    layers: tuple[int, ...]


class What(NamedTuple):
    """Everything about an op but its layers; ops of one template that share it cost the same."""

    kind: Kind
    layer_class: int
    scope: str
    attention: str
    batch: int
    ahead: int  # steps that the op works ahead of the one in which it is emitted
    amounts: tuple[Affine | Number, ...]  # in the order of AMOUNTS
    reads: tuple[tuple[Slot, bool], ...]  # the slot, or its family and that it has a layer
    writes: tuple[tuple[Slot, bool], ...]


class Traced(NamedTuple):
    """Ops of one step, with forms as amounts and with plain numbers, and what was asked."""

    refs: list[Ref]
    plain: list[Ref]
    guards: frozenset[Guard]
    moduli: frozenset[int]


def variables(steps: Sequence[Step]) -> NDArray[np.float64]:
    """Values of shape (n_steps, n_variables) for steps of one block."""
    ctx = steps[0][0]
    batches, shares = ctx.block.batches, ctx.placement.kv[ctx.block.index]
    n = len(batches)
    x = np.zeros((len(steps), BATCHES + PER_BATCH * n))
    x[:, STEP] = [c.step for c, _, _ in steps]
    x[:, BLOCK], x[:, MAX_NEW] = ctx.block.index, ctx.block.max_new
    x[:, SHARES:BATCHES] = shares.gpu, shares.host, shares.disk
    part = x[:, BATCHES:].reshape(len(steps), PER_BATCH, n)
    part[:, 0] = [batch.prompt_len for batch in batches]
    part[:, 1] = [batch.n_seqs for batch in batches]
    at = 2 + len(Homes._fields)
    part[:, 2:at] = np.transpose([c.homes for c, _, _ in steps], (0, 2, 1))
    for i, name in enumerate(NOW, at):
        part[:, i] = [getattr(now, name) for _, now, _ in steps]
    none = (0,) * n
    for i, name in enumerate(THEN, at + len(NOW)):
        part[:, i] = [none if then is None else getattr(then, name) for _, _, then in steps]
    return x


def trace(policy: Policy, cut: Cut, step: Step) -> Traced:
    """The ops of ``step`` for a cut model; ``UntraceableError`` if they cannot be told."""
    tape = Tape()
    ctx, now, then = _symbolic(step, cut, tape)
    tape.recording = True
    try:
        ops = list(policy.step(ctx, now, then))
        plain = [_ref(op, cut, ctx) for op in ops]
    except (TypeError, AttributeError, UntraceableError) as error:
        raise UntraceableError(f"policy {policy.name}: {error}") from error
    tape.recording = False
    forms = (tuple(n.form if isinstance(n, Symbol) else n for n in _numbers(op)) for op in ops)
    refs = [
        Ref(ref.what._replace(amounts=amounts), ref.layers)
        for ref, amounts in zip(plain, forms, strict=True)
    ]
    return Traced(refs, plain, frozenset(tape.guards), frozenset(tape.moduli))


def emit(policy: Policy, cut: Cut, belief: CostModel, step: Step) -> list[Ref]:
    """The same ops with plain numbers, asked nothing; ``belief`` is that of the cut model."""
    ctx, now, then = step
    placement = belief.placement
    plain = replace(ctx, model=cut.model, placement=placement, belief=belief, memo={})
    return [_ref(op, cut, plain) for op in policy.step(plain, now, then)]


class _OneShare(tuple[Shares, ...]):
    """KV shares of every block up to the one at hand: its own, so that no index is asked for."""

    __slots__ = ()

    def __getitem__(self, index: object) -> Shares:  # type: ignore[override]
        return next(iter(self))


def _symbolic(step: Step, cut: Cut, tape: Tape) -> Step:
    """The step with symbols for all its numbers.

    Types are bent here and nowhere else: a symbol stands where the policy declares a number.
    """
    ctx, _, then = step
    row = variables([step])[0]
    n = ctx.n_batches
    whole = [int(value) for value in row]

    def symbol(i: int) -> Symbol:
        value = row[i] if SHARES <= i < BATCHES else whole[i]
        return Symbol(value, ((i, 1),), 0, tape)

    def per_batch(which: int) -> tuple[Symbol, ...]:
        return tuple(symbol(BATCHES + which * n + b) for b in range(n))

    prompts, seqs = per_batch(0), per_batch(1)
    at = 2 + len(Homes._fields)
    stored = tuple(Homes(*ends) for ends in zip(*map(per_batch, range(2, at)), strict=True))
    batches = tuple(Batch(s, p) for s, p in zip(seqs, prompts, strict=True))  # type: ignore[arg-type]
    block = Block(symbol(BLOCK), batches, symbol(MAX_NEW))  # type: ignore[arg-type]
    shares = Shares(*(symbol(SHARES + i) for i in range(3)))  # type: ignore[arg-type]
    homes = _OneShare((shares,) * (ctx.block.index + 1))
    placement = Placement(cut.weights, homes, ctx.placement.act)
    belief = CostModel(cut.model, ctx.hardware, placement)
    symbolic = StepContext(
        symbol(STEP), block, cut.model, ctx.hardware, placement, belief, stored, {}  # type: ignore[arg-type]
    )  # fmt: skip

    def decision(first: int, names: tuple[str, ...]) -> Decision:
        return Decision(**{name: per_batch(first + i) for i, name in enumerate(names)})  # type: ignore[arg-type]

    later = None if then is None else decision(at + len(NOW), THEN)
    return symbolic, decision(at, NOW), later


def _ref(op: Op, cut: Cut, ctx: StepContext) -> Ref:
    layer, ahead = int(fixed(op.layer)), 0
    if op.block is not ctx.block.index and op.block != ctx.block.index:
        raise UntraceableError("an op works for another block than its step")
    if op.step is not ctx.step:
        ahead = int(fixed(op.step - ctx.step))
    reads = [_family(slot) for slot in op.reads]
    writes = [_family(slot) for slot in op.writes]
    what = What(
        op.kind,
        cut.classes[layer],
        op.scope,
        op.attention,
        int(fixed(op.batch)),
        ahead,
        tuple(n.value if isinstance(n, Symbol) else n for n in _numbers(op)),
        tuple((slot, at is not None) for slot, at in reads),
        tuple((slot, at is not None) for slot, at in writes),
    )
    return Ref(what, (layer, *(at for _, at in (*reads, *writes) if at is not None)))


@lru_cache(maxsize=4096)
def _family(slot: Slot) -> tuple[Slot, int | None]:
    """A slot without the layer in its name, and this layer."""
    found = _LAYER.search(slot.name)
    if found is None:
        return slot, None
    name = slot.name[: found.start()] + "/l*" + slot.name[found.end() :]
    return slot._replace(name=name), int(found[1])
