"""The slot problem, its refinement to the token, and the choice of solver."""

import sys
from itertools import pairwise

import gurobipy
import numpy as np
import pytest

from policies import solver as solver_module
from policies.chain import Chain, Quantised, prune
from policies.ilp import plan
from policies.slot_problem import SlotProblem, objective
from policies.solver import SolverStoppedError, SolverUnavailableError, solve

SOLVERS = ("gurobi", "highs", "dp")


def problem(**changes):
    values = {
        "candidates": ((0, 4), (0, 2, 6)),
        "compute_s": ((3.0, 7.0), (2.0, 4.0, 8.0)),
        "kv_h2d_s": ((6.0, 2.0), (9.0, 5.0, 1.0)),
        "kv_disk_s": ((1.0, 0.5), (12.0, 6.0, 0.0)),
        "slice_h2d_s": 2.0,
        "slice_disk_s": 0.25,
        "n_slices": 3,
    }
    return SlotProblem(**(values | changes))


def linear(n_batches=4, n_cached=2048, n_slices=16, kv_s=6e-6, calls=None):
    """Tabulator of unlike batches whose times are linear in the recomputed tokens."""

    def tabulate(candidates):
        if calls is not None:
            calls.append(candidates)
        return SlotProblem(
            candidates,
            tuple(
                tuple(1e-3 + (7 + b) * 1e-6 * n for n in row) for b, row in enumerate(candidates)
            ),
            tuple(
                tuple((b + 1) * kv_s * (n_cached - n) for n in r) for b, r in enumerate(candidates)
            ),
            tuple(tuple(0.0 for _ in row) for row in candidates),
            6e-4,
            0.0,
            n_slices,
        )

    return tabulate


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"candidates": ()}, "candidates: is empty"),
        ({"candidates": ((0, 4), (0, 6, 6))}, r"candidates\[1\]"),
        ({"candidates": ((0, 4), ())}, r"candidates\[1\]"),
        ({"candidates": ((-1, 4), (0, 2, 6))}, r"candidates\[0\]"),
        ({"compute_s": ((3.0,), (2.0, 4.0, 8.0))}, "compute_s: rows of"),
        ({"kv_disk_s": ((1.0, 0.5),)}, "kv_disk_s: rows of"),
        ({"kv_h2d_s": ((6.0, -2.0), (9.0, 5.0, 1.0))}, r"kv_h2d_s\[0\]: -2.0"),
        ({"compute_s": ((3.0, float("inf")), (2.0, 4.0, 8.0))}, r"compute_s\[0\]: inf"),
        ({"slice_h2d_s": float("nan")}, "slice_h2d_s: nan"),
        ({"slice_disk_s": -1.0}, "slice_disk_s: -1.0"),
        ({"n_slices": -1}, "n_slices: -1"),
    ],
)
def test_bad_problem_is_named(changes, message):
    with pytest.raises(ValueError, match=message):
        problem(**changes)


def test_objective_moves_the_next_batch_in_each_slot():
    # Slot 0: compute 7; H2D of batch 1 5 + 2 slices * 2 = 9; disk 6 + 0.5.
    # Slot 1: compute 4; H2D of batch 0 2 + 1 slice * 2 = 4; disk 0.5 + 0.25.
    assert objective(problem(), (1, 1), (2, 1)) == 9.0 + 4.0
    assert objective(problem(serial_links=True), (1, 1), (2, 1)) == (9.0 + 6.5) + (4.0 + 0.75)


@pytest.mark.parametrize(
    ("indices", "slices", "message"),
    [
        ((0,), (3,), "must be 2 of each"),
        ((0, 3), (3, 0), r"n_recompute_indices\[1\]: 3 must be in 0..2"),
        ((0, -1), (3, 0), r"n_recompute_indices\[1\]: -1"),
        ((0, 0), (2, 0), r"slices: \(2, 0\)"),
        ((0, 0), (4, -1), r"slices: \(4, -1\)"),
    ],
)
def test_bad_decision_is_named(indices, slices, message):
    with pytest.raises(ValueError, match=message):
        objective(problem(), indices, slices)


def test_quantum_is_a_power_of_two_below_the_longest_time():
    longest_s = 12.0
    quantum_s = problem().quantum_s
    assert quantum_s == 2.0 ** round(np.log2(quantum_s))
    assert 2**19 < longest_s / quantum_s <= 2**20
    assert problem(slice_h2d_s=16.0, n_slices=2).quantum_s == 32.0 / 2**20
    zero = ((0.0, 0.0), (0.0,) * 3)
    still = problem(compute_s=zero, kv_h2d_s=zero, kv_disk_s=zero, n_slices=0)
    assert still.quantum_s == 1.0


@pytest.mark.parametrize("solver", SOLVERS)
def test_ties_go_to_few_tokens_then_early_slices_then_even_batches(solver):
    flat = SlotProblem(
        ((0, 3),) * 3, ((5.0, 5.0),) * 3, ((0.0, 0.0),) * 3, ((0.0, 0.0),) * 3, 0, 0, 4
    )
    assert solve(flat, solver).n_recompute == (0, 0, 0)
    assert solve(flat, solver).slices == (4, 0, 0)
    # Compute and load have the same slope: every N_0 + N_1 = 8 takes 8 s.
    grid = tuple(range(9))
    even = SlotProblem(
        (grid, grid),
        (tuple(float(n) for n in grid),) * 2,
        (tuple(8.0 - n for n in grid),) * 2,
        ((0.0,) * 9,) * 2,
        0.0,
        0.0,
        0,
    )
    assert solve(even, solver).n_recompute == (4, 4)


def test_decision_is_the_same_when_every_time_is_halved():
    def scaled(factor):
        base = linear()(((0, 500, 1000, 2048),) * 4)
        return SlotProblem(
            base.candidates,
            *(
                tuple(tuple(v * factor for v in row) for row in table)
                for table in (base.compute_s, base.kv_h2d_s, base.kv_disk_s)
            ),
            base.slice_h2d_s * factor,
            base.slice_disk_s * factor,
            base.n_slices,
        )

    whole, half = solve(scaled(1.0)), solve(scaled(0.5))
    assert (half.n_recompute, half.slices) == (whole.n_recompute, whole.slices)
    assert half.objective_s == whole.objective_s / 2


def test_keys_beyond_64_bits_stay_exact():
    tokens = 10**15
    wide = problem(candidates=((0, tokens), (0, 2, tokens + 1)))
    chain = Chain(Quantised.of(wide))
    assert chain._dtype is object
    small = solve(problem(), "dp")
    assert chain.decision()[1] == small.slices
    assert solve(wide, "dp").objective_s == small.objective_s


def test_pruning_drops_candidates_and_keeps_the_decision():
    tabulated = linear()((tuple(range(0, 2049, 64)),) * 4)
    exact = Quantised.of(tabulated)
    pruned = prune(exact)
    assert sum(map(len, pruned.tokens)) < 0.5 * sum(map(len, exact.tokens))
    assert Chain(pruned).decision() == Chain(exact).decision()


# ---- refinement ------------------------------------------------------------------------------


@pytest.mark.parametrize("max_candidates", [9, 15, 33])
def test_plan_ends_at_the_best_token(max_candidates):
    n_max = (150, 90, 1, 0)
    calls = []
    tabulate = linear(n_cached=150, n_slices=5, calls=calls)
    best = solve(tabulate(tuple(tuple(range(n + 1)) for n in n_max)), "dp")
    calls.clear()
    found = plan(tabulate, n_max, max_candidates=max_candidates)
    assert found.objective_s <= best.objective_s * 1.002
    if max_candidates == 33:
        assert found.n_recompute == best.n_recompute
    for grid in calls:
        assert all(row[0] == 0 and row[-1] == n for row, n in zip(grid, n_max, strict=True))
        assert max(map(len, grid)) <= max_candidates
    for b, n in enumerate(found.n_recompute):  # both neighbours were compared
        assert {max(n - 1, 0), min(n + 1, n_max[b])} <= set(calls[-1][b])


def test_no_round_is_worse_than_the_one_before():
    calls = []
    tabulate = linear(calls=calls)
    found = plan(tabulate, (2048, 2000, 1500, 700), "dp", max_candidates=9)
    rounds = [solve(tabulate(grid), "dp").objective_s for grid in list(calls)]
    assert len(rounds) > 2
    assert all(later <= earlier for earlier, later in pairwise(rounds))
    assert found.objective_s == rounds[-1]


def test_plan_with_no_token_to_recompute_places_slices():
    found = plan(linear(n_batches=3, n_slices=4), (0, 0, 0))
    assert found.n_recompute == (0, 0, 0)
    assert sum(found.slices) == 4


@pytest.mark.parametrize(
    ("n_max", "max_candidates", "message"),
    [((), 33, "n_max"), ((4, -1), 33, "n_max"), ((4,), 8, "max_candidates: 8")],
)
def test_plan_names_bad_arguments(n_max, max_candidates, message):
    with pytest.raises(ValueError, match=message):
        plan(linear(), n_max, max_candidates=max_candidates)


# ---- which solver runs -----------------------------------------------------------------------


def test_unknown_solver_is_named():
    with pytest.raises(ValueError, match="'cplex' is none of auto, gurobi, highs, dp"):
        solve(problem(), "cplex")


def test_gurobi_is_the_default_and_silent(capfd):
    solver_module._gurobi_env.cache_clear()  # so that this test sees the licence being read
    assert solve(problem()).solver == "gurobi"
    assert capfd.readouterr() == ("", "")


def test_named_solvers_run():
    assert [solve(problem(), name).solver for name in SOLVERS] == list(SOLVERS)


def _absent(monkeypatch):
    monkeypatch.setitem(sys.modules, "gurobipy", None)


def _expired(monkeypatch):
    def env(pid):
        raise gurobipy.GurobiError(10009, "License expired")

    monkeypatch.setattr(solver_module, "_gurobi_env", env)


@pytest.mark.parametrize("trouble", [_absent, _expired])
def test_highs_replaces_a_gurobi_that_cannot_start(monkeypatch, trouble):
    expected = solve(problem())
    trouble(monkeypatch)
    with pytest.raises(SolverUnavailableError, match="solver gurobi: "):
        solve(problem(), "gurobi")
    found = solve(problem())
    assert found.solver == "highs"
    assert (found.n_recompute, found.slices) == (expected.n_recompute, expected.slices)


def test_highs_replaces_a_size_limited_gurobi():
    n = 46  # 46 * 46 choices exceed the bundled licence
    size = (((1.0,) * n),) * n
    big = SlotProblem((tuple(range(n)),) * n, size, size, size, 0.0, 0.0, 0)
    found = solve(big)
    if found.solver == "gurobi":
        pytest.skip("a Gurobi licence without size limit is installed")
    assert found.solver == "highs"
    assert found.n_recompute == (0,) * n
    with pytest.raises(SolverUnavailableError, match="size-limited license"):
        solve(big, "gurobi")


def test_dynamic_program_is_the_last_resort(monkeypatch):
    _absent(monkeypatch)

    class Stopped:
        status, message = 1, "Node limit reached"

    monkeypatch.setattr(solver_module, "milp", lambda *args, **options: Stopped)
    assert solve(problem()).solver == "dp"
    with pytest.raises(SolverStoppedError, match="Node limit reached"):
        solve(problem(), "highs")


def test_a_false_proof_is_refused(monkeypatch):
    true = solver_module._gurobi_optimum
    monkeypatch.setattr(solver_module, "_gurobi_optimum", lambda exact: true(exact) + 1)
    assert solve(problem()).solver == "dp"
    with pytest.raises(SolverStoppedError, match="are feasible"):
        solve(problem(), "gurobi")
