"""Policies that break a law, and the check that names it: conformance must be able to fail."""

from __future__ import annotations

from dataclasses import replace

import pytest

from policies.conformance import (
    BLOCKS,
    BUFFERS,
    DETERMINISM,
    LINEAR,
    MEMORY,
    check_policy,
    policy_checks,
)
from policies.drive import Decision
from policies.errors import PlanError
from policies.plan.memory import Buffers
from policies.plan.op import Kind
from policies.schedule import zigzag
from policies.step_ops import Zigzag
from tests.policies_table import POLICIES, FixedRecompute


@pytest.mark.parametrize("name", POLICIES)
def test_every_policy_conforms(name):
    check_policy(POLICIES[name])


def test_checks_have_distinct_names():
    names = [name for name, _ in policy_checks(FixedRecompute())]
    assert len(set(names)) == len(names) > 50


class Sound(FixedRecompute):
    """Subclasses break one thing each."""

    __slots__ = ()


class Moody(Sound):
    """Decides something else every time it is asked."""

    __slots__ = ("asked",)

    def __init__(self):
        super().__init__()
        object.__setattr__(self, "asked", [])

    def decide(self, ctx):
        self.asked.append(ctx.step)
        return Decision((0,) * ctx.n_batches, (1 + len(self.asked) % 3,) * ctx.n_batches)


class Repeats(Sound):
    __slots__ = ()

    def step(self, ctx, now, then):
        for op in super().step(ctx, now, then):
            yield op
            if op.kind is Kind.FORWARD and op.layer == ctx.model.n_layers:
                yield op


class Short(Sound):
    """Loads one token less."""

    __slots__ = ()

    def step(self, ctx, now, then):
        for op in super().step(ctx, now, then):
            yield replace(op, stop=op.stop - 1) if op.kind is Kind.LOAD_KV else op


class Forgets(Sound):
    """Never loads the last piece of a layer's weights."""

    __slots__ = ()

    def step(self, ctx, now, then):
        for op in super().step(ctx, now, then):
            if op.kind is not Kind.LOAD_WEIGHT or op.part < op.n_parts - 1:
                yield op


class Blind(Sound):
    """Computes before it loads."""

    __slots__ = ()

    def step(self, ctx, now, then):
        ops = list(super().step(ctx, now, then))
        yield from sorted(ops, key=lambda op: op.kind is Kind.LOAD_WEIGHT and op.step == 0)


class Eager(Sound):
    """Prefetches past the last step."""

    __slots__ = ()

    def step(self, ctx, now, then):
        return zigzag(ctx, now, now if then is None else then)


class Sprawling(Sound):
    """Uses three weight slots and books two."""

    __slots__ = ()

    def step(self, ctx, now, then):
        return zigzag(ctx, now, then, Zigzag(weight_slots=3))


class Weightless(Sound):
    """Books no memory and says that nothing is placed anywhere but on the disk."""

    __slots__ = ()

    @property
    def buffers(self):
        return Buffers(weight_slots=0, kv_in_slots=0, kv_out_slots=0)


class Lossy(Sound):
    """Drops the last batch of each block."""

    __slots__ = ()

    def blocks(self, blocks):
        return tuple(
            replace(b, batches=b.batches[:-1]) if len(b.batches) > 1 else b for b in blocks
        )


class Quadratic(Sound):
    """Cuts weights into as many pieces as there are layers."""

    __slots__ = ()

    def decide(self, ctx):
        n = ctx.model.n_layers**2
        return Decision((0,) * ctx.n_batches, (n,) * ctx.n_batches)


BROKEN = [
    (Moody, DETERMINISM),
    (Repeats, "L3 keys"),
    (Short, "L4 KV coverage"),
    (Forgets, "L5 weight coverage"),
    (Blind, "slots: a slot is written before"),
    (Eager, "L15"),
    (Sprawling, BUFFERS),
    (Weightless, BUFFERS),
    (Lossy, BLOCKS),
    (Quadratic, LINEAR),
]


@pytest.mark.parametrize(("cls", "rule"), BROKEN, ids=lambda item: getattr(item, "__name__", ""))
def test_broken_policy_is_named(cls, rule):
    """The check that fails is the law's own, and no check passes in silence."""
    failed = {}
    for name, check in policy_checks(cls()):
        try:
            check()
        except PlanError as error:
            failed[name] = error.rule
    assert any(found.startswith(rule) for found in failed.values()), failed
    with pytest.raises(PlanError):
        check_policy(cls())


def test_memory_that_is_not_checked_is_named(monkeypatch):
    """If the memory plan let everything pass, the check on a GPU of one megabyte would say so."""
    monkeypatch.setattr("policies.conformance.check_run", lambda *_args: None)
    with pytest.raises(PlanError, match=MEMORY):
        check_policy(FixedRecompute())
