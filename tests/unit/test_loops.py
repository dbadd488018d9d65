"""Templates that leave loops open: when they are made, what they count, and what refuses them."""

from __future__ import annotations

from dataclasses import dataclass, replace

import pytest

import sim.maker
from policies.drive import Decision, drive
from policies.plan.op import Kind, Op, Slot, Tier
from sim.loops import few_turns, first_turns, with_loops
from sim.maker import TemplateMaker
from sim.program import Programs
from sim.stretch import expand, unstretched
from sim.symbol import Affine, Indexed
from sim.tracing import AMOUNTS, Ref, Traced, What
from tests.laws.test_l13_compiled import Taken, check_programs
from tests.policies_table import OPT, FixedRecompute, Scenario, one_block, planned

WAYS = ((2, 2, 2), (0, 6, 0), (1, 2, 3), (6, 0, 0), (3, 3, 0), (0, 1, 5), (4, 1, 1))
DEEP = Scenario(replace(OPT, n_layers=12), one_block(3, 4, 40, 16))


@dataclass(frozen=True)
class Slicing(FixedRecompute):
    """Cuts weights in another way in every step; adds ops of a habit."""

    ways: tuple = WAYS
    habit: str = ""

    def decide(self, ctx):
        return replace(super().decide(ctx), slices=self.ways[ctx.step % len(self.ways)])

    def step(self, ctx, now, then):
        yield from super().step(ctx, now, then)
        if self.habit:
            for layer in range(ctx.model.n_layers):
                yield from getattr(self, self.habit)(ctx, now, layer)

    def op(self, ctx, layer, batch=0, **amounts):
        return Op(Kind.HOST_COPY, ctx.block.index, ctx.step, layer, batch, **amounts)

    def two_ops_a_turn(self, ctx, now, layer):
        for part in range(now.slices[0], sum(now.slices)):
            yield self.op(ctx, layer, 0, part=100 + layer, n_seqs=1, stop=part)
            yield self.op(ctx, layer, 1, part=part, n_parts=50, stop=9)

    def backwards(self, ctx, now, layer):
        for part in reversed(range(now.slices[1])):
            yield self.op(ctx, layer, part=part, n_seqs=1, stop=part)

    def a_table(self, ctx, now, layer):
        yield self.op(ctx, layer, part=1, n_seqs=1, stop=[9, 8, 7, 6, 5, 4, 3][now.slices[2]])

    def three_is_different(self, ctx, now, layer):
        if now.slices[0] == 3:
            yield self.op(ctx, layer, part=1, n_seqs=1, stop=5)

    def squares(self, ctx, now, layer):
        for part in range(now.slices[0]):
            yield self.op(ctx, layer, part=part, n_seqs=1, stop=part * part)

    def a_buffer_a_piece(self, ctx, now, layer):
        for part in range(now.slices[0]):
            own = (Slot(f"host/piece {part}", Tier.HOST),)
            yield replace(self.op(ctx, layer, part=part, n_seqs=1, stop=1), writes=own)

    def six_in_all(self, ctx, now, layer):
        if sum(int(n) for n in now.slices) != 6:
            raise ValueError("slices: must be 6")
        yield self.op(ctx, layer, part=1, n_seqs=1, stop=5)


HABITS = [name for name, value in vars(Slicing).items() if callable(value) and name[0] != "_"]
HABITS = [name for name in HABITS if name not in ("decide", "step", "op")]


@pytest.fixture
def opened(monkeypatch):
    """Templates that were made open, None where that failed."""
    seen = []
    make = TemplateMaker.make_open

    def counted(self, step, x):
        seen.append(make(self, step, x))
        return seen[-1]

    monkeypatch.setattr(TemplateMaker, "make_open", counted)
    return seen


def test_many_ways_to_cut_share_templates(opened):
    check_programs(Slicing(), planned(Slicing(), DEEP))
    # The step behind prefill and those in the middle; prefill and the last are cut in one way.
    assert len(opened) <= 3
    assert all(template.loops and template.n_turns == 6 for template in opened)


def test_few_ways_to_cut_have_templates_of_their_own(opened):
    policy = Slicing(ways=WAYS[:2])
    check_programs(policy, planned(policy, DEEP))
    assert opened == []


def test_blocks_that_are_cut_in_other_ways_use_the_same_templates():
    blocks = tuple(replace(one_block(3, 4, 40 + g, 15)[0], index=g) for g in range(3))
    policy = Slicing()
    plan = planned(policy, Scenario(DEEP.model, blocks))
    steps, made, after = Taken(policy, plan.decisions), None, []
    made = Programs(policy, plan.model, plan.placement, plan.costs)
    for fence in drive(steps, plan.blocks, plan.costs):
        made.of_block(steps.taken, fence)
        steps.taken = []
        after.append(made.n_templates)
    assert after[-1] == after[0]


@pytest.mark.parametrize("n_layers", [3, 12])
@pytest.mark.parametrize("habit", HABITS)
def test_odd_habits_are_followed(habit, n_layers):
    policy = Slicing(habit=habit)
    check_programs(policy, planned(policy, replace(DEEP, model=replace(OPT, n_layers=n_layers))))


@pytest.mark.parametrize("habit", ["squares", "backwards", "six_in_all", "a_buffer_a_piece"])
def test_what_is_no_run_of_turns_is_not_left_open(habit, opened):
    policy = Slicing(habit=habit)
    check_programs(policy, planned(policy, DEEP))
    assert set(opened) == {None}


def test_two_ops_a_turn_are_left_open(opened):
    policy = Slicing(habit="two_ops_a_turn")
    check_programs(policy, planned(policy, DEEP))
    assert opened
    assert None not in opened


def test_counting_is_not_taken_on_trust(monkeypatch, opened):
    """Loops that are said to begin one later are noticed, and exact templates made instead."""

    def off_by_one(traced):
        refs, guards = with_loops(traced)
        return [
            Ref(ref.what._replace(turn=turn and turn._replace(first=one_more(turn.first))), at)
            for ref, turn, at in ((ref, ref.what.turn, ref.layers) for ref in refs)
        ], guards

    def one_more(form):
        return Affine(form.terms, form.const + 1)

    monkeypatch.setattr(sim.maker, "with_loops", off_by_one)
    check_programs(Slicing(), planned(Slicing(), DEEP))
    assert opened == [None]


# ---- runs ---------------------------------------------------------------------------------------


def ref(part, batch=0):
    amounts = tuple(part if name == "part" else 7 for name in AMOUNTS)
    return Ref(What(Kind.LOAD_WEIGHT, 0, "layer", "fused", batch, 0, amounts, (), ()), (0,))


def traced(parts, indexed):
    refs = [ref(part) for part in parts]
    return Traced(refs, refs, frozenset(), frozenset(), indexed)


def bound(position, value):
    return Indexed(position, Affine(((value, 1),), 0), value)


def turns(parts, *indexed):
    refs, guards = with_loops(traced(parts, list(indexed)))
    return [r.what.turn and (r.what.turn.number, r.what.turn.place) for r in refs], guards


def test_a_run_between_two_bounds_or_from_zero():
    found, guards = turns([5, 2, 3, 4, 5], bound(1, 2), bound(1, 5))
    assert found == [None, (0, 0), (1, 0), (2, 0), None]
    assert {guard.holds for guard in guards} == {False}  # bounds are not negative, nothing fixed
    assert turns([0, 1, 2, 9], bound(0, 3))[0] == [(0, 0), (1, 0), (2, 0), None]


@pytest.mark.parametrize(
    ("parts", "indexed"),
    [
        ([0, 1], [bound(0, 2)]),  # two turns might count anything
        ([0, 1, 4], [bound(0, 3)]),
        ([0, 1, 2], [bound(0, 4)]),  # fewer ops than turns
        ([0, 1, 2], [bound(1, 3)]),
        ([1, 2, 3], [bound(0, 3)]),
    ],
)
def test_no_run_fixes_the_number(parts, indexed):
    found, guards = turns(parts, *indexed)
    assert set(found) == {None}
    assert [(guard.const, guard.holds) for guard in guards] == [(-indexed[0].value, True)]


def test_a_torn_loop_is_refused():
    refs, _ = with_loops(traced([0, 1, 2], [bound(0, 3)]))
    assert len(first_turns(expand(unstretched(refs))).what) == 1
    assert first_turns(expand(unstretched([refs[0], ref(8), *refs[1:]]))) is None
    assert first_turns(expand(unstretched(refs[:2]))) is None


def test_three_turns_for_every_batch():
    now, then = Decision((0, 0), (3, 1)), Decision((1, 2), (0, 4))
    ctx, one, two = few_turns((None, now, then))
    assert (ctx, one.slices, two.slices, two.n_recompute) == (None, (3, 3), (3, 3), (1, 2))
    assert few_turns((None, now, None))[2] is None
