"""Prefix policies on simple machines."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from policies.prefix import Adaptive, Cake, IterationView, LoadAll, RecomputeAll, Split, Totals
from policies.spec.request import Request


def request(k, t=10):
    return Request(0, 0.0, k, t, 1)


def linear(k, t=10, load=1.0, compute=1.0, overlap=True, budget=10**6, quadratic=0.0):
    """``load`` and ``compute`` seconds a token; head chunks cost ``quadratic`` more by position."""

    def totals(split):
        n = split.n_head + split.n_tail
        a, b = (k - n) * load, (t + n) * compute
        return Totals(a, b, max(a, b) if overlap else a + b)

    def head_s(n):
        return n * compute + quadratic * n * n

    return IterationView(overlap, budget, totals, head_s, lambda n: n * load)


def test_end_points():
    assert LoadAll().split(request(50), linear(50)) == (0, 0)
    assert RecomputeAll().split(request(50), linear(50)) == (0, 50)


@settings(max_examples=100, deadline=None)
@given(
    k=st.integers(0, 3000),
    t=st.integers(1, 300),
    load=st.floats(0.01, 10.0),
    budget=st.sampled_from([0, 7, 10**6]),
)
def test_adaptive_takes_the_smallest_tail_with_load_below_compute(k, t, load, budget):
    view = linear(k, t, load, budget=budget)
    head, tail = Adaptive(min_gain=None).split(request(k, t), view)
    most = min(k, budget)
    good = [n for n in range(most + 1) if (k - n) * load <= t + n]
    assert (head, tail) == (0, good[0] if good else most)
    if k <= 200:
        solved = Adaptive("dp", None).split(request(k, t), view).n_tail
        assert tail - 1 <= solved <= tail


def test_without_overlap_all_or_nothing():
    assert Adaptive().split(request(90), linear(90, load=0.5, overlap=False)) == (0, 0)
    assert Adaptive().split(request(90), linear(90, load=2.0, overlap=False)) == (0, 90)


def test_a_gain_that_is_too_small_is_not_taken():
    view = linear(1000, 10, load=0.05)
    tail = Adaptive().split(request(1000), view).n_tail
    assert tail > 0
    gain = 1 - view.totals(Split(n_tail=tail)).whole_s / view.totals(Split()).whole_s
    assert 0.02 < gain < 0.9
    assert Adaptive(min_gain=gain * 1.01).split(request(1000), view) == (0, 0)
    assert Adaptive(min_gain=gain * 0.99).split(request(1000), view).n_tail == tail


def emergent(k, chunk, load, compute, quadratic):
    """Cake as a race: whoever is free first takes the next chunk from its end."""
    n = -(-k // chunk)
    front, back = 0, n
    compute_at = load_at = 0.0
    while front < back:
        if load_at <= compute_at:
            back -= 1
            load_at += chunk * load
        else:
            front += 1
            done = front * chunk
            compute_at = done * compute + quadratic * done * done
    return min(k, front * chunk)


@settings(max_examples=100, deadline=None)
@given(
    k=st.integers(0, 2000),
    chunk=st.sampled_from([1, 16, 100]),
    load=st.sampled_from([0.11, 1.03, 9.7]),
    quadratic=st.sampled_from([0.0, 0.00317]),
)
def test_cake_meets_where_the_race_ends(k, chunk, load, quadratic):
    view = linear(k, 1, load, quadratic=quadratic)
    head, tail = Cake(chunk).split(request(k, 1), view)
    assert tail == 0
    expected = emergent(k, chunk, load, 1.0, quadratic)
    assert abs(head - expected) <= chunk  # ties within a chunk


def test_cake_respects_the_budget_and_needs_overlap():
    assert Cake(10).split(request(1000), linear(1000, load=5.0, budget=25)).n_head == 20
    assert Cake(10).split(request(1000), linear(1000, load=5.0, overlap=False)) == (0, 0)


@pytest.mark.parametrize("make", [lambda: Adaptive(min_gain=1.0), lambda: Cake(0)])
def test_bad_input_is_named(make):
    with pytest.raises(ValueError, match=r"min_gain|chunk_tokens"):
        make()
