"""Goldens of papers.md sections 2.5 and 8: weight slices and the recompute balance."""

import pytest

from policies.cost.balance import balanced_recompute_share, n_recompute_closed_form
from policies.ilp import plan
from policies.slot_problem import SlotProblem, objective
from policies.solver import solve

MS = 1e-3


def block(kv_ms, n_batches=4, weights_ms=40.0, compute_ms=10.0):
    """A block without recompute, its weights cut into one slice a batch."""
    one = ((kv_ms * MS,),) * n_batches
    return SlotProblem(
        ((0,),) * n_batches,
        ((compute_ms * MS,),) * n_batches,
        one,
        ((0.0,),) * n_batches,
        weights_ms * MS / n_batches,
        0.0,
        n_batches,
    )


@pytest.mark.parametrize(
    ("kv_ms", "flexgen_ms", "sliced_ms"),
    [(2.0, 72.0, 48.0), (12.0, 88.0, 88.0)],
    ids=["SLICE-1", "SLICE-2"],
)
def test_slices(kv_ms, flexgen_ms, sliced_ms):
    """FlexGen issues all weights behind batch 0; slicing helps only where batches have slack."""
    problem = block(kv_ms)
    assert objective(problem, (0,) * 4, (4, 0, 0, 0)) / MS == pytest.approx(flexgen_ms)
    for name in ("gurobi", "highs", "dp"):
        assert solve(problem, name).objective_s / MS == pytest.approx(sliced_ms)


def test_slice_1_spreads_and_slice_2_ties():
    assert solve(block(2.0)).slices == (1, 1, 1, 1)
    assert solve(block(12.0)).slices == (4, 0, 0, 0)  # no gain, so the earliest


def test_recompute_with_slices():
    """SLICE-RC: a sixth recomputed takes a slot from 22 to 20 ms; 22 is without recompute."""
    n_cached = 6000

    def tabulate(candidates):
        share = [[n / n_cached for n in row] for row in candidates]
        return SlotProblem(
            candidates,
            tuple(tuple((10.0 + 60.0 * f) * MS for f in row) for row in share),
            tuple(tuple(12.0 * (1.0 - f) * MS for f in row) for row in share),
            tuple((0.0,) * len(row) for row in share),
            10.0 * MS,
            0.0,
            n_batches,
        )

    # One batch: its slice count is fixed, so the optimum is the balance of its one slot.
    n_batches = 1
    alone = plan(tabulate, (n_cached,))
    assert alone.n_recompute[0] / n_cached == pytest.approx(0.1667, abs=5e-5)
    assert alone.objective_s / MS == pytest.approx(20.0, abs=1e-3)
    assert solve(tabulate(((0,),))).objective_s / MS == pytest.approx(22.0)
    # Four batches: 20 ms a slot within the spacing of the last grids.
    n_batches = 4
    even = objective(tabulate(((1000,),) * 4), (0,) * 4, (1,) * 4)
    assert even / MS == pytest.approx(4 * 20.0)
    assert plan(tabulate, (n_cached,) * 4).objective_s == pytest.approx(even, rel=1e-3)


def mha_share(d, n, bytes_per_s, flops_per_s):
    """The TightLLM paper's own counts for multi-head attention and an MLP of 4 d, 16 bit."""
    return balanced_recompute_share(n, 24.0 * d * d, 2.0 * d, 4.0 * d, flops_per_s, bytes_per_s)


def test_tl_f1():
    assert mha_share(12288, 512, 25e9, 200e12) == pytest.approx(0.0976, rel=0.01)


def test_tl_f2():
    assert mha_share(5120, 512, 6e9, 200e12) == pytest.approx(0.517, rel=0.01)


def test_tl_gqa():
    """Llama-2-70B: two FLOPs a parameter and token, attention left out."""
    share = balanced_recompute_share(512, 2.0 * 855638016, 0.0, 4096.0, 200e12, 25e9)
    assert share == pytest.approx(0.0188, rel=0.01)


@pytest.mark.parametrize(
    ("d", "flops_per_s", "shares"),
    [
        (5120, 50e12, (0.349, 0.212, 0.118, 0.061)),
        (7168, 50e12, (0.278, 0.161, 0.088, 0.044)),
        (5120, 200e12, (0.682, 0.517, 0.349, 0.205)),
        (7168, 200e12, (0.606, 0.435, 0.278, 0.156)),
        (9216, 200e12, (0.545, 0.375, 0.231, 0.126)),
        (12288, 200e12, (0.474, 0.310, 0.184, 0.098)),
    ],
)
def test_break_even_table(d, flops_per_s, shares):
    found = [mha_share(d, 512, rate, flops_per_s) for rate in (3e9, 6e9, 12e9, 25e9)]
    assert found == pytest.approx(shares, abs=6e-4)


def test_balance_solves_its_equation():
    n, a, e, kv, flops_per_s, bytes_per_s = 8192, 3.6e9, 24576.0, 49152.0, 2e14, 6e9
    share = balanced_recompute_share(n, a, e, kv, flops_per_s, bytes_per_s)
    r = share * n
    assert r * (a + e * (n + r)) / flops_per_s == pytest.approx((n - r) * kv / bytes_per_s)
    assert balanced_recompute_share(n, a, e, 0.0, flops_per_s, bytes_per_s) == 0.0


@pytest.mark.parametrize(
    ("n_cached", "n_new", "kappa_crit", "expected"),
    [
        (1000, 1, 1.0, 499.5),
        (1000, 0, 0.0, 1000.0),
        (1000, 0, 4.0, 200.0),
        (100, 50, 2.0, 0.0),
        (100, 60, 2.0, 0.0),  # compute-bound: recompute would only lengthen it
        (0, 1, 3.0, 0.0),
    ],
)
def test_closed_form(n_cached, n_new, kappa_crit, expected):
    assert n_recompute_closed_form(n_cached, n_new, kappa_crit) == pytest.approx(expected)


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda: n_recompute_closed_form(-1, 1, 1.0), "n_cached: -1"),
        (lambda: n_recompute_closed_form(1, -1, 1.0), "n_new: -1"),
        (lambda: n_recompute_closed_form(1, 1, float("inf")), "kappa_crit: inf"),
        (lambda: balanced_recompute_share(0, 1.0, 0.0, 1.0, 1.0, 1.0), "n_ctx: 0"),
        (lambda: balanced_recompute_share(1, 0.0, 0.0, 1.0, 1.0, 1.0), "flops_per_token: 0.0"),
        (lambda: balanced_recompute_share(1, 1.0, 0.0, 1.0, 1.0, 0.0), "bytes_per_s: 0.0"),
    ],
)
def test_bad_input_is_named(call, message):
    with pytest.raises(ValueError, match=message):
        call()
