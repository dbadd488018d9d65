"""The best mix of three sources: against enumeration, a linear program, and the two-source form."""

import math
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy.optimize import linprog

from policies.cost.balance import n_recompute_closed_form
from policies.cost.kappa import kappa_of
from policies.cost.layer_work import layer_work
from policies.cost.model import CostModel
from policies.cost.three_sources import TokenSeconds, three_sources, without_overlap
from policies.placement import ON_GPU, Placement
from policies.plan.op import Kind, Op
from tests.serving_table import machine, model

TIMES = st.one_of(st.sampled_from([0.0, 1.0, 2.0, 4.0]), st.floats(1e-3, 10.0))
TOKENS = st.builds(TokenSeconds, TIMES, TIMES, TIMES, TIMES)
FIXED = st.one_of(st.just(0.0), st.floats(0.0, 300.0))
MODELS = ("opt-30b", "llama2-13b", "llama3.1-70b", "qwen3-30b-a3b", "mixtral-8x7b", "deepseek-v3")


def sides(token, n, n_seqs, weights_s, base_s):
    """Compute and link seconds of a mix, written out."""
    n_kv, n_input, n_recompute = n
    compute_s = base_s + n_seqs * (token.project_s * n_input + token.recompute_s * n_recompute)
    return compute_s, weights_s + n_seqs * (token.load_kv_s * n_kv + token.load_input_s * n_input)


def mixes(n_ctx):
    return [(i, j, n_ctx - i - j) for i in range(n_ctx + 1) for j in range(n_ctx + 1 - i)]


@settings(max_examples=150, deadline=None)
@given(token=TOKENS, n_ctx=st.integers(0, 14), n_seqs=st.integers(1, 5), weights=FIXED, base=FIXED)
def test_no_mix_of_whole_tokens_is_faster_and_one_is_as_fast(token, n_ctx, n_seqs, weights, base):
    found = three_sources(token, n_ctx, n_seqs, weights, base)
    block = (n_seqs, weights, base)
    enumerated = {n: max(sides(token, n, *block)) for n in mixes(n_ctx)}
    best = min(enumerated.values())
    assert found.step_s <= best * (1 + 1e-12) + 1e-12
    # Rounding moves at most one token from one source to another.
    assert best <= found.step_s + n_seqs * max(sum(point) for point in token.points().values())
    n = (found.n_kv, found.n_input, found.n_recompute)
    assert min(n) >= 0
    assert sum(n) == pytest.approx(n_ctx)
    assert (found.compute_s, found.link_s) == pytest.approx(sides(token, n, *block))
    assert found.step_s == max(found.compute_s, found.link_s)
    assert found.load_all_s == pytest.approx(enumerated[(n_ctx, 0, 0)])
    pairs = [seconds for (_, inputs, _), seconds in enumerated.items() if inputs == 0]
    assert found.step_s * (1 - 1e-12) <= found.two_sources_s <= min(pairs) * (1 + 1e-12) + 1e-12
    assert found.limit == "both" or (found.limit == "link") == (found.link_s > found.compute_s)


@settings(max_examples=60, deadline=None)
@given(token=TOKENS, n_ctx=st.integers(1, 4096), n_seqs=st.integers(1, 64), w=FIXED, base=FIXED)
def test_it_is_the_optimum_of_the_linear_program(token, n_ctx, n_seqs, w, base):
    """Minimise T over shares (n_k, n_a, n_r, T): T is at least each side."""
    t, n = token, n_seqs * n_ctx
    scale = base + w + n * max(*(sum(point) for point in t.points().values()), 1e-9)
    solved = linprog(
        [0.0, 0.0, 0.0, 1.0],
        A_ub=np.array(
            [
                [0.0, n * t.project_s / scale, n * t.recompute_s / scale, -1.0],
                [n * t.load_kv_s / scale, n * t.load_input_s / scale, 0.0, -1.0],
            ]
        ),
        b_ub=[-base / scale, -w / scale],
        A_eq=[[1.0, 1.0, 1.0, 0.0]],
        b_eq=[1.0],
    )
    assert solved.status == 0
    found = three_sources(token, n_ctx, n_seqs, w, base)
    assert found.step_s / scale == pytest.approx(solved.fun, rel=1e-6, abs=1e-7)


@settings(max_examples=100, deadline=None)
@given(
    cached=st.integers(0, 100_000),
    n_new=st.integers(0, 3000),
    load_kv_s=st.floats(1e-9, 1e-3),
    recompute_s=st.floats(1e-9, 1e-3),
    n_seqs=st.integers(1, 64),
    worse=st.floats(1.0, 10.0),
)
def test_without_inputs_and_weights_it_is_the_two_source_form(
    cached, n_new, load_kv_s, recompute_s, n_seqs, worse
):
    """An input above the chord changes nothing, and N_r* = (K - kappa_crit T)/(1 + kappa_crit)."""
    token = TokenSeconds(load_kv_s, 0.5 * worse * load_kv_s, 0.5 * worse * recompute_s, recompute_s)
    found = three_sources(token, cached, n_seqs, 0.0, n_seqs * n_new * recompute_s)
    assert found.n_input == 0
    closed = n_recompute_closed_form(cached, n_new, recompute_s / load_kv_s)
    assert found.n_recompute == pytest.approx(closed, rel=1e-9, abs=1e-6)
    assert found.gain_over_two_sources == 1.0
    below = replace(token, load_input_s=0.4 * load_kv_s, project_s=0.4 * recompute_s)
    if closed > 1:
        assert three_sources(below, cached, n_seqs, 0.0, n_seqs * n_new * recompute_s).n_input > 0


@pytest.mark.parametrize("name", ["llama3.1-70b", "deepseek-v3", "opt-30b"])
def test_kappa_crit_of_a_model(name):
    """Of a dense model, whose layers are alike, or of one layer of others."""
    spec = replace(model(name), n_layers=1, n_dense_layers=0)
    work = layer_work(spec, 4096, 1, 8, resident=True, attention=False)
    kappa_crit = kappa_of(spec, 20e9, 500e12).kappa_crit
    found = replace(work, input_bytes=work.kv_bytes).mix(20e9, 500e12)  # inputs off the hull
    assert found.n_recompute == pytest.approx(n_recompute_closed_form(4096, 1, kappa_crit))


@settings(max_examples=100, deadline=None)
@given(token=TOKENS, n_ctx=st.integers(0, 12), n_seqs=st.integers(1, 5), weights=FIXED, base=FIXED)
def test_without_overlap_it_is_an_end_point(token, n_ctx, n_seqs, weights, base):
    found = without_overlap(token, n_ctx, n_seqs, weights, base)
    best = min(sum(sides(token, n, n_seqs, weights, base)) for n in mixes(n_ctx))
    assert found.step_s == pytest.approx(best)
    assert sorted(found.shares)[:2] == [0.0, 0.0]
    assert three_sources(token, n_ctx, n_seqs, weights, base).step_s <= best * (1 + 1e-12)


# ---- of models -----------------------------------------------------------------------------------


@pytest.mark.parametrize("name", MODELS)
@pytest.mark.parametrize("n_ctx", [1, 512, 2048, 100_000])
def test_inputs_pay_with_multi_head_attention_alone(name, n_ctx):
    """Not with grouped-query or latent attention, whose KV is smaller than the input."""
    multi_head = name in ("opt-30b", "llama2-13b")
    for link, flops, resident in ((1e9, 1e15, True), (50e9, 700e12, False), (1e12, 1e13, False)):
        work = layer_work(model(name), n_ctx, 4, 16, resident=resident)
        assert work.token_s(link, flops).input_pays == multi_head
        found = work.mix(link, flops)
        if not multi_head:
            assert (found.n_input, found.gain_over_two_sources) == (0.0, 1.0)
    assert (layer_work(model(name), n_ctx, 4, 16).boundaries().input is not None) == multi_head


def test_costs_of_the_three_kinds_of_attention():
    """Bytes and FLOPs a token, written out: MHA 2 n_h d_h, GQA 2 n_kv d_h, MLA latent + rope."""
    for name, elems in (
        ("opt-30b", 2 * 56 * 128), ("llama3.1-70b", 2 * 8 * 128), ("deepseek-v3", 512 + 64)
    ):  # fmt: skip
        spec = model(name)
        work = layer_work(spec, 2048, 4, 16)
        assert work.kv_bytes == 2 * elems
        assert work.input_bytes == 2 * spec.d_model
        assert work.project_flops == 2 * spec.d_model * elems
        assert work.weight_bytes == spec.layer_bytes(spec.n_layers - 1)
        assert layer_work(spec, 2048, 4, 16, resident=True).weight_bytes == 0.0
    d, ffn = 7168, 28672
    work = layer_work(model("opt-30b"), 2048, 4, 16)
    assert work.recompute_flops == 2 * (4 * d * d + 2 * d * ffn) + 2048 * 4 * d
    assert work.base_flops == 64 * (work.recompute_flops + 4 * d)
    bare = layer_work(model("opt-30b"), 2048, 4, 16, attention=False)
    assert bare.recompute_flops == 2 * (4 * d * d + 2 * d * ffn)


@pytest.mark.parametrize("name", MODELS)
def test_links_that_are_infinitely_fast_or_slow(name):
    work = layer_work(model(name), 1024, 2, 8, resident=True)
    fast = work.mix(math.inf, 1e14)
    assert (fast.region, fast.limit, fast.gain_over_load_all) == ("kv", "compute", 1.0)
    slow = work.mix(1e-6, 1e14)
    assert slow.shares[2] > 1 - 1e-9
    assert slow.step_s == pytest.approx((work.base_flops + 16 * 1024 * work.recompute_flops) / 1e14)
    streamed = layer_work(model(name), 1024, 2, 8).mix(1e-3, 1e14)
    assert (streamed.region, streamed.limit) == ("recompute", "link")
    assert streamed.step_s == pytest.approx(1e3 * model(name).layer_bytes(model(name).n_layers - 1))


@settings(max_examples=80, deadline=None)
@given(
    name=st.sampled_from(MODELS),
    n_ctx=st.integers(1, 100_000),
    n_batches=st.integers(1, 8),
    resident=st.booleans(),
    ratio=st.floats(1e-7, 1e-1),
    flops=st.floats(1e12, 1e16),
)
def test_only_the_ratio_of_the_rates_matters(name, n_ctx, n_batches, resident, ratio, flops):
    work = layer_work(model(name), n_ctx, n_batches, 16, resident=resident)
    here, there = work.mix(ratio * flops, flops), work.mix(ratio * 1e14, 1e14)
    assert here.shares == pytest.approx(there.shares, abs=1e-9)
    assert here.gain_over_load_all == pytest.approx(there.gain_over_load_all)
    edges = work.boundaries()
    if ratio > edges.load_all * (1 + 1e-9):
        expected = "kv"
    elif ratio < edges.recompute * (1 - 1e-9):
        expected = "recompute"
    elif edges.input is None:
        expected = "kv+recompute"
    else:
        expected = "kv+input" if ratio > edges.input else "input+recompute"
    near = [e for e in (edges.load_all, edges.input, edges.recompute) if e]
    if all(abs(ratio / edge - 1) > 1e-6 for edge in near):
        assert here.region == expected


# ---- measured ------------------------------------------------------------------------------------

# A timing probe on an H200 (its record: the measured data's README): milliseconds of a decode step
# of 12 layers of OPT-30B, 4 batches of 16, by context and shares of (KV, inputs, recomputed).
PROBE = {
    (512, (1.0, 0.0, 0.0)): 470, (1024, (1.0, 0.0, 0.0)): 673, (2048, (1.0, 0.0, 0.0)): 1079,
    (512, (0.72, 0.0, 0.28)): 413, (1024, (0.72, 0.0, 0.28)): 560, (2048, (0.72, 0.0, 0.28)): 862,
    (512, (0.0, 1.0, 0.0)): 369, (1024, (0.0, 1.0, 0.0)): 470, (2048, (0.0, 1.0, 0.0)): 673,
    (512, (0.0, 0.95, 0.05)): 363, (1024, (0.0, 0.95, 0.05)): 460, (2048, (0.0, 0.95, 0.05)): 653,
    (512, (0.0, 0.9, 0.1)): 359, (1024, (0.0, 0.9, 0.1)): 450, (2048, (0.0, 0.9, 0.1)): 701,
}  # fmt: skip


def probe_base_s(n_ctx):
    spec, hardware = model("opt-30b"), machine("h200")
    placement = Placement(((ON_GPU, ON_GPU),) * spec.n_layers, (ON_GPU,))
    op = Op(Kind.FORWARD, 0, 1, 0, n_seqs=16, n_new=1, n_ctx=n_ctx)
    return 4 * CostModel(spec, hardware, placement).seconds(op)


@pytest.mark.parametrize(("n_ctx", "shares"), PROBE)
def test_sides_of_a_mix_are_what_an_h200_took(n_ctx, shares):
    """Within 1 % where the link is longer; 10 % where compute is, for one number stands for a GEMM
    rate that the profile has at 667 to 711 TFLOP/s.
    """
    work, hardware = layer_work(model("opt-30b"), n_ctx, 4, 16), machine("h200")
    link, flops = hardware.h2d.bytes_per_s, hardware.gemm.y[-1]
    token, base_s = work.token_s(link, flops), probe_base_s(n_ctx)
    n = tuple(n_ctx * share for share in shares)
    compute_s, link_s = sides(token, n, 64, work.weight_bytes / link, base_s)
    allowed = 0.01 if link_s > compute_s else 0.1
    assert 12e3 * max(compute_s, link_s) == pytest.approx(PROBE[n_ctx, shares], rel=allowed)
    best = work.mix(link, flops, base_s)
    assert best.step_s <= max(compute_s, link_s)
    assert best.region == "input+recompute"


def test_the_best_mix_that_the_probe_found_is_the_best():
    """2048 tokens: 653 ms with 5 % recomputed and the rest projected, 1.65x over loading all."""
    work, hardware = layer_work(model("opt-30b"), 2048, 4, 16), machine("h200")
    best = work.mix(hardware.h2d.bytes_per_s, hardware.gemm.y[-1], probe_base_s(2048))
    assert best.shares == pytest.approx((0.0, 0.95, 0.05), abs=0.01)
    assert 12e3 * best.step_s == pytest.approx(653, rel=0.01)
    assert best.gain_over_load_all == pytest.approx(1079 / 653, rel=0.01)


# ---- input ---------------------------------------------------------------------------------------

ONE = TokenSeconds(1.0, 0.5, 0.1, 1.0)


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda: TokenSeconds(-1.0, 0.0, 0.0, 0.0), "load_kv_s: -1.0 must be a finite number"),
        (lambda: TokenSeconds(1.0, 0.0, 0.0, math.inf), "recompute_s: inf"),
        (lambda: three_sources(ONE, -1, 1), "n_ctx: -1 must be >= 0"),
        (lambda: three_sources(ONE, 1, 0), "n_seqs: 0 must be >= 1"),
        (lambda: three_sources(ONE, 1, 1, math.nan), "weights_s: nan"),
        (lambda: without_overlap(ONE, 1, 1, 0.0, -1.0), "base_s: -1.0"),
        (lambda: layer_work(model("opt-30b"), 0, 1, 1), "n_ctx: 0 must be >= 1"),
        (lambda: layer_work(model("opt-30b"), 1, 0, 1), "n_batches: 0 must be >= 1"),
        (lambda: layer_work(model("opt-30b"), 1, 1, 0), "batch_size: 0 must be >= 1"),
        (lambda: layer_work(model("opt-30b"), 1, 1, 1, layer=48), r"layer: 48 must be in 0\.\.47"),
        (lambda: layer_work(model("opt-30b"), 1, 1, 1).mix(0.0, 1.0), "bytes_per_s: 0.0"),
        (lambda: layer_work(model("opt-30b"), 1, 1, 1).mix(1.0, math.nan), "flops_per_s: nan"),
    ],
)  # fmt: skip
def test_bad_input_is_named(call, message):
    with pytest.raises(ValueError, match=message):
        call()


def test_nothing_cached_and_nothing_that_takes_time():
    empty = three_sources(ONE, 0, 4, 1.0, 2.0)
    assert (empty.region, empty.shares, empty.step_s) == ("none", (0.0, 0.0, 0.0), 2.0)
    free = three_sources(TokenSeconds(0.0, 0.0, 0.0, 0.0), 5, 1)
    assert (free.region, free.gain_over_load_all, free.gain_over_two_sources) == ("kv", 1.0, 1.0)
