"""Guards and numbers as arrays say what they say one by one; prices are asked once each."""

from __future__ import annotations

import gc
from contextlib import suppress

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from policies.drive import drive
from policies.flexgen import FlexGen
from policies.plan.op import Kind
from sim.collector import collector_paused
from sim.forms import Forms, Numbers, compiled
from sim.program import Programs
from sim.symbol import Affine, Guard
from tests.laws.test_l13_compiled import Taken
from tests.policies_table import OPT, Scenario, one_block, planned

TERMS = st.dictionaries(st.integers(0, 2), st.integers(-2, 2).filter(bool), min_size=1, max_size=3)
TERMS = TERMS.map(lambda terms: tuple(sorted(terms.items())))
CONSTS = st.integers(-4, 4)
GUARDS = st.builds(
    Guard, TERMS, CONSTS, st.sampled_from(["<", "<=", "=="]), st.booleans(), st.just(0)
) | st.builds(Guard, TERMS, CONSTS, st.just("=="), st.just(True), st.integers(2, 4))
STEPS = st.lists(st.tuples(*[st.integers(-3, 3)] * 3), min_size=1, max_size=6)


def value(form, x):
    return form.const + sum(c * x[i] for i, c in form.terms)


def met(guard, x):
    at = value(guard, x)
    if guard.modulus:
        return at % guard.modulus == 0
    return {"<": at < 0, "<=": at <= 0, "==": at == 0}[guard.relation] is guard.holds


@given(st.lists(st.lists(GUARDS, max_size=6), min_size=1, max_size=3), STEPS)
def test_guards(sets, steps):
    forms, x = Forms(), np.array(steps, np.float64)
    tables = [compiled(guards, forms) for guards in sets]
    answers = forms.values(x)
    assert np.array_equal(forms.values(x, 1), answers[1:])
    for guards, table in zip(sets, tables, strict=True):
        rows = np.arange(len(steps))[::-1]
        expected = [all(met(guard, steps[row]) for guard in guards) for row in rows]
        assert table.satisfied(answers, rows).tolist() == expected


@pytest.mark.parametrize("relation", ["<", "<=", "=="])
@pytest.mark.parametrize("holds", [True, False])
@pytest.mark.parametrize("sign", [1, -1])
def test_shares_are_compared_without_rounding(relation, holds, sign):
    """A share one step of floating point below 1 is below 1."""
    forms = Forms()
    guards = compiled([Guard(((0, sign),), -sign, relation, holds, 0)], forms)
    shares = [np.nextafter(1.0, 0.0), 1.0, np.nextafter(1.0, 2.0)]
    found = guards.satisfied(forms.values(np.array(shares)[:, None]), np.arange(3))
    below = [sign * float(share - 1.0) for share in shares]
    asked = {"<": [b < 0 for b in below], "<=": [b <= 0 for b in below]}
    asked["=="] = [b == 0 for b in below]
    assert found.tolist() == [answer is holds for answer in asked[relation]]


@given(st.lists(CONSTS | st.builds(Affine, TERMS, CONSTS), min_size=1, max_size=5), STEPS)
def test_numbers(forms, steps):
    numbers, x = Numbers(forms), np.array(steps, np.float64)
    expected = [[value(f, s) if isinstance(f, Affine) else f for f in forms] for s in steps]
    assert numbers.over(x).tolist() == expected
    assert [numbers.at(row).tolist() for row in x] == expected
    first, places, values = numbers.varying(x)
    table = np.tile(first, (len(steps), 1))
    for place, column in zip(places, values, strict=True):
        table[:, place] = column
        assert len(set(column.tolist())) > 1
    assert table.tolist() == expected


class Asked:
    """Costs that note the ops they are asked for."""

    def __init__(self, costs):
        self.costs, self.ops = costs, []

    def seconds(self, op):
        self.ops.append(op)
        return self.costs.seconds(op)

    def nbytes(self, op):
        return self.costs.nbytes(op)

    def flops(self, op):
        return self.costs.flops(op)


def test_moves_of_as_many_tokens_are_priced_once():
    policy = FlexGen(kv_pinned=True)
    plan = planned(policy, Scenario(OPT, one_block(2, 4, 50, 20)))
    steps, asked = Taken(policy, plan.decisions), Asked(plan.costs)
    made = Programs(policy, plan.model, plan.placement, asked)
    for fence in drive(steps, plan.blocks, plan.costs):
        made.of_block(steps.taken, fence)
    stores = [op.stop - op.start for op in asked.ops if op.kind is Kind.STORE_KV]
    assert sorted(stores) == [1, 50]  # a step's token, and the prompt
    loads = [op.stop for op in asked.ops if op.kind is Kind.LOAD_KV]
    assert set(loads) == set(range(50, 69))
    assert len(loads) <= 19 + 2  # not for each of two batches; behind prefill and last once more


@pytest.mark.parametrize("enabled", [True, False])
def test_the_collector_is_as_it_was(enabled):
    was = gc.isenabled()
    try:
        (gc.enable if enabled else gc.disable)()
        with collector_paused():
            assert not gc.isenabled()
        assert gc.isenabled() is enabled
        with suppress(KeyError), collector_paused():
            raise KeyError
        assert gc.isenabled() is enabled
    finally:
        (gc.enable if was else gc.disable)()
