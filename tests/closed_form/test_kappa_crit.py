"""The kappa analysis as closed form of the serving simulator under its own conditions."""

from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from policies.cost.balance import n_recompute_closed_form
from policies.cost.kappa import kappa_of
from policies.cost.ragged import constant_rates
from policies.prefix import Adaptive
from sim.arrivals import Arrivals
from sim.fleet import ServeSpec, serve
from sim.kappa_search import bare_options, search
from sim.sessions import Sessions, Turn
from tests.serving_table import machine, model

MODELS = ("llama3.1-70b", "qwen3-235b-a22b", "deepseek-v3", "qwen3-30b-a3b", "opt-13b")


@pytest.mark.parametrize("name", MODELS)
@pytest.mark.parametrize(("flops", "link"), [(7e14, 57e9), (3.2e15, 15e9), (2e14, 3e9)])
def test_bisection_in_the_simulator_finds_the_formula(name, flops, link):
    hardware = constant_rates(machine("h100"), flops, link)
    expected = kappa_of(model(name), link, flops).kappa_crit
    assert search(model(name), hardware, 16384) == pytest.approx(expected, rel=0.01)


@pytest.mark.parametrize("change", ["attention", "latency", "floor"])
def test_outside_its_conditions_the_formula_does_not_hold(change):
    """The test above must be able to fail: each condition that it drops moves the crossing."""
    spec, hardware = model("llama3.1-70b"), constant_rates(machine("h100"), 7e14, 57e9)
    expected = kappa_of(spec, 57e9, 7e14).kappa_crit
    if change == "latency":
        hardware = replace(hardware, h2d=replace(hardware.h2d, latency_s=1e-3))
    k = round(expected * 1024)
    options = replace(
        bare_options(k, 1024),
        attention=change == "attention",
        floor_s=1.0 if change == "floor" else 0.0,
    )
    load_s, compute_s = serve_alone(spec, hardware, options, k, 1024)
    assert abs(load_s / compute_s - 1) > 0.05


def serve_alone(spec, hardware, options, n_cached, n_new, prefix=None):
    turn = Turn(0, n_cached, n_new, 1)
    sessions = Sessions("one", (turn,), (turn,), False, None)
    more = {} if prefix is None else {"prefix": prefix}
    run = serve(ServeSpec(spec, (hardware,), options, Arrivals(mode="backlog"), **more), sessions)
    log = run.iterations
    assert log.n_rows == 1
    return float(log.column("load_s")[0]), float(log.column("compute_s")[0])


@settings(max_examples=60, deadline=None)
@given(
    name=st.sampled_from(MODELS),
    link=st.floats(1e9, 500e9),
    flops=st.floats(5e13, 5e15),
    n_new=st.integers(1, 3000),
    n_cached=st.integers(0, 60_000),
)
def test_adaptive_recompute_ends_load_and_compute_together(name, link, flops, n_new, n_cached):
    """Load <= compute for every K; from kappa_crit T on both take (K + T) / (sum of rates)."""
    spec, hardware = model(name), constant_rates(machine("h100"), flops, link)
    kappa = kappa_of(spec, link, flops)
    options = replace(bare_options(n_cached, n_new), overlap=True, budget_tokens=n_cached + n_new)
    balance = Adaptive(min_gain=None)
    load_s, compute_s = serve_alone(spec, hardware, options, n_cached, n_new, balance)
    token_s = max(1 / kappa.load_tokens_per_s, 1 / kappa.compute_tokens_per_s)
    assert load_s <= compute_s * (1 + 1e-9)
    if n_cached >= kappa.kappa_crit * n_new:
        balanced_s = kappa.balanced_s(n_cached, n_new)
        assert load_s == pytest.approx(balanced_s, abs=1.001 * token_s)
        assert compute_s == pytest.approx(balanced_s, abs=1.001 * token_s)
        recomputed = compute_s * kappa.compute_tokens_per_s - n_new
        closed = n_recompute_closed_form(n_cached, n_new, kappa.kappa_crit)
        assert recomputed == pytest.approx(closed, abs=1.001)
    else:
        assert compute_s == pytest.approx(kappa.compute_s(n_new))


@settings(max_examples=25, deadline=None)
@given(
    link=st.floats(1e9, 500e9),
    flops=st.floats(5e13, 5e15),
    n_new=st.integers(1, 2000),
    n_cached=st.integers(0, 30_000),
)
def test_the_integer_program_needs_no_more_time(link, flops, n_new, n_cached):
    """TightLLM's program, of one batch without weights to load, to the quantum of its times."""
    spec, hardware = model("llama3.1-70b"), constant_rates(machine("h100"), flops, link)
    kappa = kappa_of(spec, link, flops)
    options = replace(bare_options(n_cached, n_new), overlap=True, budget_tokens=n_cached + n_new)
    solved, crossing = (
        max(serve_alone(spec, hardware, options, n_cached, n_new, Adaptive(solver, None)))
        for solver in ("dp", None)
    )
    longest_s = max(kappa.load_s(n_cached), kappa.compute_s(n_cached + n_new))
    assert solved <= crossing * (1 + 1e-9) + 4 * longest_s / 2**19
    assert crossing <= solved + 1.001 * max(
        1 / kappa.load_tokens_per_s, 1 / kappa.compute_tokens_per_s
    )


@settings(max_examples=40, deadline=None)
@given(
    link=st.floats(1e9, 500e9),
    flops=st.floats(5e13, 5e15),
    n_new=st.integers(1, 2000),
    n_cached=st.integers(1, 60_000),
)
def test_the_gain_of_recompute_is_bounded(link, flops, n_new, n_cached):
    """With overlap it takes off at most 1 / (1 + kappa_crit) of what load-all needs."""
    kappa = kappa_of(model("llama3.1-70b"), link, flops)
    load_all = kappa.ttft_s(n_cached, n_new, overlap=True)
    best = max(kappa.balanced_s(n_cached, n_new), kappa.compute_s(n_new))
    assert 1 - best / load_all <= kappa.recompute_gain_bound + 1e-12


def test_without_overlap_the_optimum_is_an_end_point():
    spec = model("llama3.1-70b")
    for link, recomputed in ((57e9, 0), (1e8, 30_000)):
        hardware = constant_rates(machine("h100"), 7e14, link)
        options = replace(bare_options(30_000, 50), budget_tokens=30_050)
        load_s, compute_s = serve_alone(spec, hardware, options, 30_000, 50, Adaptive())
        kappa = kappa_of(spec, link, 7e14)
        assert load_s == pytest.approx(kappa.load_s(30_000 - recomputed))
        assert compute_s == pytest.approx(kappa.compute_s(50 + recomputed))
