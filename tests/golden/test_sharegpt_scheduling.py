"""ShareGPT, backlogged, prefill only: what looking past the head of the queue is worth.

The whole trace is not shipped; its numbers are in experiments/README.md. Here the shipped sample
runs, several times over so that the end of the queue, where only large prefixes are left, weighs
as little as in the whole trace.
"""

import numpy as np
import pytest

from policies.admission import Fifo, UtilisationAware, VramAware
from sim.arrivals import Arrivals
from sim.fleet import ServeSpec, serve
from sim.serve_options import ServeOptions
from sim.sessions import load_sessions
from tests.serving_table import machine, model, singles, tiled_sharegpt

OPTIONS = ServeOptions(
    budget_tokens=8192,
    capacity_tokens=479_150,
    prefill_only=True,
    write_back=False,
    watermark=0.0,
)


@pytest.fixture(scope="module")
def runs():
    sessions = tiled_sharegpt(load_sessions("sharegpt", history="seedfit"), 8)

    def run(admission):
        spec = ServeSpec(
            model("llama3.1-70b"),
            (machine("h100x8"),),
            OPTIONS,
            Arrivals(mode="backlog"),
            admission,
        )
        return serve(spec, sessions)

    return {policy.name: run(policy) for policy in (Fifo(), VramAware(), UtilisationAware())}


def new_tokens(run):
    return run.iterations.column("n_prefill_tokens")


def ttft(run):
    return run.requests.column("first_token_s") - run.requests.column("arrival_s")


def test_more_new_tokens_in_the_first_half_and_not_fewer_over_the_whole(runs):
    fifo, aware = new_tokens(runs["fifo"]), new_tokens(runs["utilisation-aware"])
    half = len(fifo) // 2
    assert aware[:half].mean() > 1.05 * fifo[:half].mean()
    assert aware.mean() >= fifo.mean()
    assert new_tokens(runs["vram-aware"]).mean() >= fifo.mean()


def test_nobody_beats_the_conservation_bound(runs):
    """Memory holds ``capacity`` tokens an iteration: on average capacity * sum(T) / sum(K + T)."""
    for run in runs.values():
        new, cached = run.requests.column("n_prefill").sum(), run.requests.column("n_cached").sum()
        bound = 479_150 * new / (cached + new)
        assert 0.75 * bound < new_tokens(run).mean() <= bound


def test_the_formula_of_table_4(runs):
    """TS-SG at this trace's own means; the mean of ratios is not the ratio of means."""
    run = runs["fifo"]
    new, cached = run.requests.column("n_prefill"), run.requests.column("n_cached")
    formula = new.mean() * 479_150 / (cached + new).mean()
    assert new_tokens(run).mean() == pytest.approx(formula, rel=0.2)


def test_aging_keeps_the_slowest_close_to_fifo(runs):
    slowest = {name: np.percentile(ttft(run), 99) for name, run in runs.items()}
    assert slowest["utilisation-aware"] <= 1.2 * slowest["fifo"]


def test_where_the_budget_binds_no_order_helps():
    """Long prompts with little reuse, as Mooncake's: every iteration is full anyway."""
    rng = np.random.default_rng(0)
    new = np.minimum(rng.lognormal(np.log(2500), 1.4, 800), 60_000).astype(int) + 1
    cached = np.where(rng.random(800) < 0.5, 512, rng.integers(0, 12_000, 800))
    sessions = singles([(int(k), int(t), 1) for k, t in zip(cached, new, strict=True)])
    means = {}
    for policy in (Fifo(), UtilisationAware()):
        spec = ServeSpec(
            model("llama3.1-70b"), (machine("h100x8"),), OPTIONS, Arrivals(mode="backlog"), policy
        )
        means[policy.name] = new_tokens(serve(spec, sessions)).mean()
    assert means["fifo"] > 0.99 * 8192
    assert means["utilisation-aware"] >= 0.99 * means["fifo"]
