"""Admission policies and their knapsack."""

import itertools

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from policies import knapsack
from policies.admission import (
    AdmissionView,
    FairShare,
    Fifo,
    Rules,
    UtilisationAware,
    VramAware,
    Waiting,
)
from policies.spec.request import Request
from tests.serving_table import requests


def view(free=12, budget=5, seqs=100, running=(), now_s=0.0):
    return AdmissionView(now_s, free, budget, seqs, 100, running)


def queue(*sizes, overtaken=()):
    waiting = [Waiting(r) for r in requests(*sizes)]
    for position, n in dict(overtaken).items():
        waiting[position].overtaken = n
    return waiting


ITEMS = st.lists(st.tuples(st.integers(0, 30), st.integers(1, 20)), min_size=0, max_size=9)


@settings(max_examples=150, deadline=None)
@given(items=ITEMS, free=st.integers(0, 80), budget=st.integers(0, 40))
def test_exact_equals_brute_force_and_greedy_is_feasible(items, free, budget):
    memory, tokens = [k + t for k, t in items], [t for _, t in items]
    best = 0
    for n in range(len(items) + 1):
        for chosen in itertools.combinations(range(len(items)), n):
            fits = sum(memory[i] for i in chosen) <= free
            if fits and sum(tokens[i] for i in chosen) <= budget:
                best = max(best, sum(tokens[i] for i in chosen))
    for solve in (knapsack.exact, knapsack.greedy):
        chosen = solve(tokens, memory, tokens, free, budget)
        assert list(chosen) == sorted(set(chosen))
        assert sum(memory[i] for i in chosen) <= free
        assert sum(tokens[i] for i in chosen) <= budget
        value = sum(tokens[i] for i in chosen)
        assert value == best if solve is knapsack.exact else value <= best
    assert 0.0 <= knapsack.gap(tokens, memory, tokens, free, budget) <= 1.0


def test_greedy_has_a_gap():
    """Two that fill memory are worth more than the one that is densest."""
    memory, tokens = [9, 5, 5], [5, 4, 4]
    assert knapsack.greedy(tokens, memory, tokens, 10, 100) == (1, 2)  # by value alone it is one
    memory, tokens = [7, 5, 5], [7, 4, 4]
    assert knapsack.exact(tokens, memory, tokens, 10, 100) == (1, 2)
    assert knapsack.greedy(tokens, memory, tokens, 10, 100) == (0,)
    assert knapsack.gap(tokens, memory, tokens, 10, 100) == pytest.approx(1 / 8)


def test_fifo_stops_at_the_first_that_does_not_fit():
    assert Fifo().choose(queue((5, 2), (9, 1), (1, 1)), view()) == (0,)
    assert Fifo().choose(queue((0, 4), (0, 4), (0, 1)), view()) == (0, 1)  # the last one in part
    assert Fifo().choose(queue((0, 1), (0, 1)), view(seqs=1)) == (0,)


def test_vram_aware_passes_over_what_does_not_fit():
    assert VramAware().choose(queue((5, 2), (9, 1), (1, 1)), view()) == (0, 2)


def test_utilisation_aware_fills_the_budget():
    waiting = queue((8, 1), (2, 1), (0, 3), (1, 2))
    assert UtilisationAware().choose(waiting, view()) == (2, 3)


def test_budget_left_goes_to_one_request_in_part():
    assert UtilisationAware().choose(queue((0, 3), (0, 4)), view(free=30)) == (0, 1)
    assert UtilisationAware().choose(queue((0, 9)), view()) == (0,)  # longer than the budget


def test_aging_gives_an_old_request_its_turn():
    waiting = [
        Waiting(Request(0, 0.0, 9, 1, 1)),
        Waiting(Request(1, 99.0, 5, 2, 1)),
        Waiting(Request(2, 99.0, 3, 2, 1)),
    ]
    assert UtilisationAware(aging_per_s=0.0).choose(waiting, view(now_s=100.0)) == (1, 2)
    assert UtilisationAware(aging_per_s=1.0).choose(waiting, view(now_s=100.0)) == (0,)


@pytest.mark.parametrize("make", [VramAware, UtilisationAware])
def test_whoever_was_overtaken_enough_goes_next(make):
    policy = make(Rules(max_overtaken=4))
    # Position 0 does not fit beside anything and has no allowance left: everybody waits for it.
    waiting = queue((20, 1), (0, 1), (0, 1), overtaken=[(0, 4)])
    assert policy.choose(waiting, view()) == ()
    # It may be passed twice more.
    waiting = queue((20, 1), (0, 1), (0, 1), (0, 1), overtaken=[(0, 2)])
    assert len(policy.choose(waiting, view())) <= 2
    # It fits: it comes first.
    waiting = queue((8, 1), (0, 3), (0, 2), overtaken=[(0, 4)])
    assert policy.choose(waiting, view())[0] == 0


def test_memory_that_would_stay_empty_has_a_value():
    waiting = queue((12, 3), (0, 5), (0, 4))
    by_tokens = UtilisationAware(aging_per_s=0.0, memory_weight=0.0)
    assert by_tokens.choose(waiting, view(free=20, budget=10)) == (1, 2)  # 9 tokens, 11 unused
    by_both = UtilisationAware(aging_per_s=0.0, memory_weight=2.0)
    assert by_both.choose(waiting, view(free=20, budget=10)) == (0, 1)  # 8 tokens, all memory


def test_a_cap_on_high_kappa_requests():
    rules = Rules(high_kappa=5.0, max_high_kappa=1)
    waiting = queue((10, 1), (10, 1), (2, 1))
    assert VramAware(rules).choose(waiting, view(free=100)) == (0, 2)
    running = (Request(9, 0.0, 60, 1, 1),)
    assert VramAware(rules).choose(waiting, view(free=100, running=running)) == (2,)


def test_fair_share_admits_for_the_group_that_holds_least():
    waiting = [Waiting(Request(i, 0.0, 8, 2, 1, group=g)) for i, g in enumerate((0, 0, 0, 1, 1))]
    assert FairShare((1.0, 1.0)).choose(waiting, view(free=40, budget=50)) == (0, 1, 3, 4)
    assert FairShare((3.0, 1.0)).choose(waiting, view(free=40, budget=50)) == (0, 1, 2, 3)
    running = (Request(9, 0.0, 99, 1, 1, group=0),)
    share = FairShare((1.0, 1.0)).choose(waiting, view(free=20, budget=50, running=running))
    assert share == (3, 4)
    with pytest.raises(ValueError, match=r"group: 1 of request 4 has no weight"):
        FairShare((1.0,)).choose(waiting, view(free=40, budget=50))


@settings(max_examples=150, deadline=None)
@given(
    sizes=st.lists(st.tuples(st.integers(0, 40), st.integers(1, 12)), min_size=1, max_size=12),
    overtaken=st.lists(st.integers(0, 5), min_size=12, max_size=12),
    free=st.integers(0, 90),
    budget=st.integers(0, 30),
    seqs=st.integers(0, 5),
    bound=st.integers(0, 5),
    exact=st.booleans(),
)
def test_choices_fit_and_keep_the_bound(sizes, overtaken, free, budget, seqs, bound, exact):
    waiting = queue(*sizes)
    for w, n in zip(waiting, overtaken, strict=False):
        w.overtaken = min(n, bound)
    rules = Rules(max_overtaken=bound)
    for policy in (
        VramAware(rules),
        UtilisationAware(rules, exact=exact),
        FairShare((1.0,), rules),
    ):
        chosen = policy.choose(waiting, view(free, budget, seqs))
        picked = [waiting[i].request for i in chosen]
        assert len(set(chosen)) == len(chosen) <= seqs
        assert sum(r.n_tokens for r in picked) <= free
        assert not picked or budget > 0
        for i, w in enumerate(waiting):
            if i not in chosen:
                assert w.overtaken + sum(j > i for j in chosen) <= bound


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: Rules(max_overtaken=-1), "max_overtaken: -1"),
        (lambda: Rules(max_high_kappa=0), "max_high_kappa: 0"),
        (lambda: UtilisationAware(aging_per_s=-1.0), "aging_per_s: -1"),
        (lambda: UtilisationAware(memory_weight=-1.0), "memory_weight: -1"),
        (lambda: FairShare(()), "weights"),
        (lambda: Request(0, 0.0, 1, 0, 1), "n_prefill: 0"),
        (lambda: Request(0, 0.0, 1, 1, 1, n_disk=2), "n_disk: 2"),
        (lambda: knapsack.greedy([1.0], [1], [], 1, 1), "1 values"),
    ],
)
def test_bad_input_is_named(make, message):
    with pytest.raises(ValueError, match=message):
        make()
