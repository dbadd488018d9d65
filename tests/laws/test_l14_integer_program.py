"""L14: the integer program equals brute force, and the closed form under its conditions."""

import itertools

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from policies.chain import Quantised
from policies.cost.balance import n_recompute_closed_form
from policies.ilp import plan
from policies.slot_problem import SlotProblem, objective
from policies.solver import _gurobi_optimum, _highs_optimum, solve

SOLVERS = ("gurobi", "highs", "dp")


def compositions(total, parts):
    if parts == 1:
        yield (total,)
        return
    for head in range(total + 1):
        for tail in compositions(total - head, parts - 1):
            yield (head, *tail)


def brute_force(problem, ahead=1):
    """Units, tokens and slices of the first decision in the documented order, by enumeration."""
    unit_s, n = problem.quantum_s, problem.n_batches

    def units(seconds):
        return round(seconds / unit_s)

    def slot(b, choice, carried):
        nxt = (b + ahead) % n
        h2d = units(problem.kv_h2d_s[nxt][choice[nxt]]) + carried * units(problem.slice_h2d_s)
        disk = units(problem.kv_disk_s[nxt][choice[nxt]]) + carried * units(problem.slice_disk_s)
        links = h2d + disk if problem.serial_links else max(h2d, disk)
        return max(units(problem.compute_s[b][choice[b]]), links)

    def rank(decision):
        choice, slices = decision
        tokens = [problem.candidates[b][i] for b, i in enumerate(choice)]
        by_batch = [(abs(n * tokens[b] - sum(tokens)), tokens[b], -slices[b]) for b in range(n)]
        value = sum(slot(b, choice, slices[b]) for b in range(n))
        return value, sum(tokens), sum(b * z for b, z in enumerate(slices)), by_batch

    choices = itertools.product(*(range(len(row)) for row in problem.candidates))
    decisions = itertools.product(choices, list(compositions(problem.n_slices, n)))
    choice, slices = best = min(decisions, key=rank)
    return rank(best)[0], tuple(problem.candidates[b][i] for b, i in enumerate(choice)), slices


@st.composite
def problems(draw):
    # Few distinct small times make ties; floats make near-ties of a few units.
    seconds = draw(
        st.sampled_from(
            [
                st.integers(0, 3).map(float),
                st.sampled_from([0.0, 0.1, 0.2, 0.3]),
                st.floats(0.0, 1e-2, allow_subnormal=False),
                st.just(1.0),
            ]
        )
    )
    rows = draw(
        st.lists(
            st.lists(st.integers(0, 6), min_size=1, max_size=3, unique=True), min_size=1, max_size=4
        )
    )
    candidates = tuple(tuple(sorted(row)) for row in rows)

    def table():
        return tuple(tuple(draw(seconds) for _ in row) for row in candidates)

    return SlotProblem(
        candidates,
        table(),
        table(),
        tuple((0.0,) * len(row) for row in candidates) if draw(st.booleans()) else table(),
        draw(seconds),
        draw(st.one_of(st.just(0.0), seconds)),
        draw(st.integers(0, 4)),
        draw(st.booleans()),
    )


def flat(value, n_batches, n_slices):
    times = ((value,) * 3,) * n_batches
    return SlotProblem(((0, 1, 2),) * n_batches, times, times, times, value, 0.0, n_slices)


# (2, 1) with the slice on batch 0 ties with (1, 2) and the slice on batch 1: the slice decides.
EARLY_SLICE = SlotProblem(
    ((0, 1, 2), (0, 1, 2)),
    ((3.0, 3.0, 1.0), (3.0, 3.0, 2.0)),
    ((3.0, 0.0, 3.0), (2.0, 1.0, 3.0)),
    ((0.0,) * 3,) * 2,
    1.0,
    0.0,
    1,
)


@example(EARLY_SLICE)
@example(flat(1.0, 3, 3))
@example(flat(0.0, 3, 3))
@example(flat(1.0, 1, 2))
@given(problems())
@settings(max_examples=60, deadline=None)
def test_every_solver_equals_brute_force(problem):
    optimum, n_recompute, slices = brute_force(problem)
    for name in SOLVERS:
        found = solve(problem, name)
        assert found.solver == name
        assert (found.n_recompute, found.slices) == (n_recompute, slices), name
        indices = [row.index(n) for row, n in zip(problem.candidates, n_recompute, strict=True)]
        assert found.objective_s == objective(problem, indices, slices)
    # The solvers decide the optimum by themselves, on the program before pruning too.
    exact = Quantised.of(problem)
    assert _gurobi_optimum(exact) == optimum
    assert _highs_optimum(exact) == optimum


def test_brute_force_names_a_transfer_in_the_wrong_slot():
    """A program that moves a batch's own KV while it computes decides otherwise."""
    problem = SlotProblem(
        ((0, 5), (0, 5)),
        ((1.0, 3.0), (8.0, 12.0)),
        ((8.0, 1.0), (1.0, 1.0)),
        ((0.0, 0.0),) * 2,
        0.0,
        0.0,
        0,
    )
    assert brute_force(problem, ahead=0)[1] == (5, 0)
    assert brute_force(problem)[1] == (0, 0)
    for name in SOLVERS:
        assert solve(problem, name).n_recompute == (0, 0)


def linear(n_batches, n_cached, n_new, compute_s, load_s):
    """Tabulator of like batches; kappa_crit = (F / B) * (BW / C) is compute_s / load_s a token."""

    def tabulate(candidates):
        return SlotProblem(
            candidates,
            tuple(tuple((n_new + n) * compute_s for n in row) for row in candidates),
            tuple(tuple((n_cached - n) * load_s for n in row) for row in candidates),
            tuple((0.0,) * len(row) for row in candidates),
            0.0,
            0.0,
            0,
        )

    return lambda solver: plan(tabulate, (n_cached,) * n_batches, solver).n_recompute


@given(
    n_batches=st.integers(1, 4),
    n_cached=st.integers(0, 4096),
    n_new=st.integers(1, 256),
    compute=st.integers(1, 50),
    load=st.integers(1, 50),
)
@example(n_batches=4, n_cached=1000, n_new=1, compute=1, load=1)
@example(n_batches=4, n_cached=4096, n_new=1, compute=50, load=49)
@example(n_batches=2, n_cached=0, n_new=1, compute=1, load=1)
@example(n_batches=3, n_cached=4096, n_new=4, compute=1, load=50)
@example(n_batches=3, n_cached=100, n_new=200, compute=5, load=1)
@settings(max_examples=40, deadline=None)
def test_like_batches_and_linear_costs_give_the_closed_form(
    n_batches, n_cached, n_new, compute, load
):
    """Whole multiples of 2^-30 s are whole units, so that rounding decides no tie.

    With equal slopes, one batch a token below the optimum and its neighbour one above it cost as
    much as two at the optimum: the tie-break towards even batches is needed here.
    """
    expected = n_recompute_closed_form(n_cached, n_new, compute / load)
    decide = linear(n_batches, n_cached, n_new, compute * 2.0**-30, load * 2.0**-30)
    for name in ("gurobi", "dp"):
        assert decide(name) == pytest.approx((expected,) * n_batches, abs=1.0), name


@given(
    n_cached=st.integers(0, 4096),
    n_new=st.integers(1, 256),
    kappa_crit=st.floats(0.02, 50.0),
    token_s=st.floats(1e-7, 1e-4),
)
@settings(max_examples=40, deadline=None)
def test_one_batch_gives_the_closed_form_at_any_rate(n_cached, n_new, kappa_crit, token_s):
    expected = n_recompute_closed_form(n_cached, n_new, kappa_crit)
    decide = linear(1, n_cached, n_new, kappa_crit * token_s, token_s)
    assert decide("auto") == pytest.approx((expected,), abs=1.0)
