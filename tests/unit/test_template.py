"""Templates: symbols and their guards, cut models, repeated layers, policies with odd habits."""

from __future__ import annotations

from dataclasses import dataclass, replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

import sim.maker
from policies.drive import drive
from policies.flexgen import FlexGen
from policies.placement import ON_GPU, ON_HOST, Placement
from policies.plan.op import Kind, Op, Slot, Tier
from sim.cut import Cutter
from sim.executors import EVERY_STEP, fast_blocks
from sim.program import Programs
from sim.stretch import stretch
from sim.symbol import Guard, Symbol, Tape
from sim.tracing import UntraceableError, trace, variables
from tests.laws.test_l13_compiled import Taken, check_programs
from tests.policies_table import MOE, OPT, SMALL, FixedRecompute, Scenario, one_block, planned

GPU = Slot("gpu/here", Tier.GPU)


def symbols(*values):
    """A tape that records, and a symbol for each value."""
    tape = Tape(recording=True)
    return tape, [Symbol(v, ((i, 1),), 0, tape) for i, v in enumerate(values)]


def value(form, at):
    return form.const + sum(c * at[i] for i, c in form.terms)


# ---- symbols ------------------------------------------------------------------------------------


def expression(a, b, c):
    """Affine in a and b, with questions on the way."""
    total = 3 * a - b + (b - 2) * 2 - (-a) + c
    total = max(total, a)
    if total - b > 4 and a != b:
        total = sum([total, a, 1])
    return total if (total + a) % 3 else 7 - total


@given(*[st.tuples(st.integers(-9, 9), st.integers(-9, 9))] * 2, st.integers(-5, 5))
def test_a_form_holds_wherever_its_guards_do(one, two, c):
    tape, (a, b) = symbols(*one)
    found = expression(a, b, c)
    assert found.value == expression(*one, c)

    def met(guard):
        at = value(guard, two)
        if guard.modulus:
            return at % guard.modulus == 0
        return {"<": at < 0, "<=": at <= 0, "==": at == 0}[guard.relation] is guard.holds

    if all(met(guard) for guard in tape.guards):
        assert value(found.form, two) == expression(*two, c)


@pytest.mark.parametrize(
    "ask",
    [
        lambda a: [10, 20, 30][a],
        lambda a: list(range(a)),
        lambda a: {2: "x"}[a],
        lambda a: f"slot {a}",
        lambda a: a // 2,
        lambda a: 7 // a,
        lambda a: 7 % a,
        lambda a: a / 4,
        lambda a: 4 / a,
        lambda a: round(a),
        lambda a: abs(a),
        lambda a: float(a),
        lambda a: str(a),
        lambda a: a * a,
    ],
)
def test_what_is_not_affine_fixes_the_value(ask):
    tape, (a,) = symbols(2)
    assert ask(a) == ask(2)
    assert Guard(((0, 1),), -2, "==", True, 0) in tape.guards


def test_what_cannot_matter_is_no_condition():
    tape, (a,) = symbols(5)
    assert (48 * a + 3) % 2 == 1
    assert a - a == 0
    assert tape.guards == set()
    assert tape.moduli == {2}


@pytest.mark.parametrize("use", [lambda a: a**2, lambda a: a & 1, lambda a: a + "1"])
def test_unknown_operations_raise(use):
    with pytest.raises(TypeError):
        use(symbols(2)[1][0])


# ---- cut models ---------------------------------------------------------------------------------


def test_cut_takes_from_the_longest_run():
    weights = ((ON_GPU, ON_GPU),) * 4 + ((ON_HOST, ON_HOST),) * 16
    cutter = Cutter(replace(OPT, n_layers=20), Placement(weights, (ON_HOST,)))
    assert cutter.longest == 16
    assert [list(cutter.lengths(n)) for n in (2, 3, 7)] == [[4, 6, 8, 10, 12], [7, 10], []]
    cut = cutter.cut(6)
    assert cut.model.n_layers == 10
    assert cut.weights == weights[:10]
    assert cut.classes == (*[0] * 4, *[1] * 6, -1)


def test_cut_keeps_dense_layers_dense():
    moe = replace(MOE, n_layers=14, n_dense_layers=3)
    cut = Cutter(moe, Placement(((ON_HOST, ON_HOST),) * 14, (ON_HOST,))).cut(5)
    assert (cut.model.n_layers, cut.model.n_dense_layers) == (8, 3)


# ---- repeated layers ----------------------------------------------------------------------------


def steps_of(policy, scenario):
    plan = planned(policy, scenario)
    steps = Taken(policy, plan.decisions)
    list(drive(steps, plan.blocks, plan.costs))
    return plan, steps.taken


def test_stretch_refuses_a_border_for_a_period():
    policy = FlexGen()
    plan, steps = steps_of(policy, Scenario(replace(OPT, n_layers=12), one_block()))
    cutter = Cutter(plan.model, plan.placement)
    short, long = (trace(policy, cutter.cut(n), steps[1]).refs for n in (6, 8))
    assert stretch(short, long, short, 2, 3) is not None
    assert stretch(short, long[:-1], short, 2, 3) is None
    assert stretch(short, short, short, 2, 3) is None
    one, three = (trace(policy, cutter.cut(n), steps[1]).refs for n in (1, 3))
    assert stretch(one, three, one, 2, 3) is None


@pytest.fixture
def wholes(monkeypatch):
    """Counts the templates that came from the whole model."""
    seen = []
    whole = sim.maker.TemplateMaker._whole

    def counted(self, step, counting=False):
        seen.append(step)
        return whole(self, step, counting)

    monkeypatch.setattr(sim.maker.TemplateMaker, "_whole", counted)
    return seen


def test_deep_models_are_cut(wholes):
    check_programs(
        FlexGen(), planned(FlexGen(), Scenario(replace(OPT, n_layers=12), one_block(max_new=7)))
    )
    assert [ctx.is_prefill for ctx, _, _ in wholes] == [True, False]  # to compare with, once


def test_what_cutting_does_not_see_is_noticed(wholes):
    policy = Odd(habit="distance_to_the_end")
    model = replace(OPT, n_layers=13)
    check_programs(policy, planned(policy, Scenario(model, one_block(max_new=7))))
    assert len(wholes) == 4  # prefill, an even and an odd step, the last


@dataclass(frozen=True)
class Odd(FixedRecompute):
    """Adds ops that no sound engine would guess from the shape of a step."""

    habit: str = ""

    def step(self, ctx, now, then):
        yield from super().step(ctx, now, then)
        for layer in range(ctx.model.n_layers):
            yield from getattr(self, self.habit)(ctx, layer)

    def op(self, ctx, layer, batch=0, **amounts):
        return Op(Kind.HOST_COPY, ctx.block.index, ctx.step, layer, batch, 9, 10, **amounts)

    def every_third_step(self, ctx, layer):
        if ctx.step % 3 == 1:
            yield self.op(ctx, layer)

    def half_the_context(self, ctx, layer):
        yield self.op(ctx, layer, n_seqs=1, stop=ctx.n_ctx()[0] // 2)

    def long_contexts_only(self, ctx, layer):
        if ctx.n_ctx()[0] > 258:
            yield self.op(ctx, layer)

    def a_table_of_steps(self, ctx, layer):
        yield self.op(ctx, layer, n_seqs={0: 1, 3: 2}.get(ctx.step, 3), stop=5)

    def some_layers(self, ctx, layer):
        if layer in (1, 6):
            yield self.op(ctx, layer)

    def distance_to_the_end(self, ctx, layer):
        if (ctx.model.n_layers - layer) % 5 == 0:
            yield self.op(ctx, layer)

    def layers_backwards(self, ctx, layer):
        yield self.op(ctx, ctx.model.n_layers - 1 - layer)

    def three_turns(self, ctx, layer):
        turn = (ctx.step * ctx.model.n_layers + layer) % 3
        yield replace(self.op(ctx, layer), writes=(Slot(f"host/turn {turn}", Tier.HOST),))

    def second_block(self, ctx, layer):
        if ctx.block.index == 1:
            yield self.op(ctx, layer)

    def a_prediction(self, ctx, layer):
        load = self.op(ctx, layer, n_seqs=1, stop=ctx.n_ctx()[0])
        if ctx.belief.seconds(load) > 2e-5:
            yield load


HABITS = [name for name in vars(Odd) if not name.startswith("_") and name not in ("step", "op")]
HABITS.remove("habit")


@pytest.mark.parametrize("n_layers", [3, 13])
@pytest.mark.parametrize("habit", HABITS)
def test_odd_habits_are_followed(habit, n_layers):
    blocks = (*one_block(2, 4, 256, 6), replace(one_block(2, 4, 100, 5)[0], index=1))
    policy = Odd(habit=habit)
    check_programs(policy, planned(policy, Scenario(replace(OPT, n_layers=n_layers), blocks)))


def test_templates_are_shared_by_steps_and_blocks():
    blocks = tuple(replace(one_block(3, 4, 200 + g, 30)[0], index=g) for g in range(4))
    policy = FixedRecompute((64,))
    plan = planned(policy, Scenario(OPT, blocks))
    steps = Taken(policy, plan.decisions)
    made = Programs(policy, plan.model, plan.placement, plan.costs)
    for fence in drive(steps, plan.blocks, plan.costs):
        made.of_block(steps.taken, fence)
        steps.taken = []
    # prefill, the step after it, even and odd steps, the last
    assert made.n_templates <= 5


# ---- what cannot be traced ----------------------------------------------------------------------


class Squared(FixedRecompute):
    """Computes with a number as no affine form can."""

    def step(self, ctx, now, then):
        yield Op(Kind.FORWARD, ctx.block.index, ctx.step, n_new=ctx.n_ctx()[0] ** 2 + 1)


class Foreign(FixedRecompute):
    """Emits an op of another block."""

    def step(self, ctx, now, then):
        yield Op(Kind.FORWARD, ctx.block.index + 1, ctx.step, n_new=1)


@pytest.mark.parametrize("policy", [Squared(name="squared"), Foreign(name="foreign")])
def test_untraceable_policies_are_named(policy):
    plan = planned(FixedRecompute(), Scenario(OPT, one_block()))
    blocks = fast_blocks(
        policy, plan.blocks, plan.costs, plan.costs, lambda *_: None, lambda _: EVERY_STEP
    )
    with pytest.raises(UntraceableError, match=f"policy {policy.name}"):
        next(blocks)


def test_variables_of_a_step():
    plan, steps = steps_of(FixedRecompute((0, 64)), Scenario(OPT, one_block(2, 32, 256, 3)))
    x = variables(steps)
    assert x.shape == (3, 6 + 16 * 2)
    assert x[1].tolist() == [
        *(1, 0, 3),  # step, block, max_new
        *(0.0, 1.0, 0.0),  # shares of the KV
        *(256, 256),  # prompt_len
        *(32, 32),  # n_seqs
        *((0, 192, 192, 192) * 2),  # homes: KV of 192 tokens
        *(64, 64),  # n_recompute
        *(1, 1),  # slices
        *(0, 0, 0, 0, 0, 0),  # n_front, n_inputs, on_cpu
        *(0, 0),  # n_recompute of the next step
        *(1, 1),
        *(0, 0, 0, 0, 0, 0),  # and its n_front, n_inputs, on_cpu
    ]
    assert SMALL.name == plan.hardware.name
