"""The kappa analysis: formulas and the advice that follows."""

import math

import pytest

from policies.cost.kappa import (
    Kappa,
    advise,
    concurrent_requests,
    context_flops_per_token,
    kappa_of,
    prefill_flops_per_token,
    scheduled_tokens,
    transfer_share,
)
from policies.cost.kappa_report import variants, what_if
from policies.spec.peaks import peak_of
from sim.kappa_search import kappa_record
from tests.serving_table import CONF, machine, model

K = Kappa(100.0, 10.0, 50.0, 1000.0)  # loads 5 tokens/s, computes 10 tokens/s


def test_the_factors_multiply():
    assert (K.kappa_model, K.kappa_hardware, K.kappa_crit) == (10.0, 0.05, 0.5)
    assert K.kappa_crit == K.load_tokens_per_s / K.compute_tokens_per_s


def test_load_and_compute_are_equal_at_kappa_crit():
    assert K.load_s(5) == K.compute_s(10) == 1.0
    assert K.transfer_overhead(5, 10) == 1.0
    assert K.arithmetic_intensity(5, 10) == K.ridge_flops_per_byte
    assert K.arithmetic_intensity(0, 10) == math.inf


def test_ttft_adds_or_overlaps():
    assert K.ttft_s(5, 20) == 3.0
    assert K.ttft_s(5, 20, overlap=True) == 2.0


def test_a_floor_flattens_the_overhead():
    assert K.transfer_overhead(50, 1, floor_s=5.0) == 2.0
    assert transfer_share(3.0) == 0.75
    assert transfer_share(math.inf) == 1.0


def test_balance_loads_and_computes_every_token_once():
    seconds = K.balanced_s(100, 20)
    assert seconds * (K.load_tokens_per_s + K.compute_tokens_per_s) == pytest.approx(120)
    assert 1 - seconds / K.load_s(100) < K.recompute_gain_bound


def test_advice_for_gqa_is_load_all_and_for_mha_on_a_slow_link_it_is_not():
    gqa = kappa_of(model("llama3.1-70b"), 57e9, 743e12)
    assert advise(gqa).load_all
    assert advise(gqa).gain_bound == pytest.approx(1 / (1 + gqa.kappa_crit))
    assert advise(gqa).gain_bound < 0.04
    mha = kappa_of(model("opt-13b"), 6e9, 200e12)
    assert not advise(mha).load_all
    assert "at most" in advise(mha).text


def test_flop_counts_differ_by_what_they_say():
    spec = model("llama3.1-8b")
    layers = prefill_flops_per_token(spec)
    head = prefill_flops_per_token(spec, "layers+head")
    assert head - layers == 2 * spec.vocab * spec.d_model
    assert layers < prefill_flops_per_token(spec, "2N")
    moe = model("qwen3-30b-a3b")
    assert prefill_flops_per_token(moe) < 0.15 * 2 * moe.n_params


def test_context_counts():
    spec = model("llama3.1-8b")
    exact = context_flops_per_token(spec, 1000)
    assert exact == 4 * 32 * 1000 * 4096
    assert context_flops_per_token(spec, 1000, "kaplan") == exact / 2
    assert context_flops_per_token(spec, 1000, "kv-width") == exact / 8
    assert context_flops_per_token(spec, 0) == 0
    with_context = kappa_of(spec, 57e9, 743e12, context="exact", n_ctx=1000)
    assert with_context.kappa_crit > kappa_of(spec, 57e9, 743e12).kappa_crit


def test_scheduled_tokens_are_bound_by_memory_or_budget():
    assert concurrent_requests(100, 8, 2) == 10
    assert scheduled_tokens(50, 100, 8, 2) == 20
    assert scheduled_tokens(15, 100, 8, 2) == 15


def test_every_shipped_machine_has_a_peak_that_its_profile_does_not_beat():
    names = sorted(path.stem for path in (CONF / "hardware").glob("*.yaml"))
    for name in names:
        peak, profile = peak_of(name), machine(name)
        assert peak is not None, name
        assert profile.h2d.bytes_per_s <= peak.link_bytes_per_s * (1 + 1e-9), name
        assert max(profile.gemm.y) <= peak.fp16_flops_per_s, name
    assert peak_of("my-machine") is None


def test_groups_add_up():
    one, eight = machine("h100"), machine("h100x8")
    assert eight.h2d.bytes_per_s == 8 * 64e9
    assert machine("h100x8-paper").h2d.bytes_per_s == 15e9
    for name in ("gpu_bytes", "gpu_reserve_bytes", "hbm_bytes_per_s", "idle_watts", "tdp_watts"):
        assert getattr(eight, name) == 8 * getattr(one, name), name
    for name in ("gemm", "attention_decode", "attention_prefill"):
        assert getattr(eight, name).y == pytest.approx([8 * y for y in getattr(one, name).y])
    assert eight.n_gpus == 8


def test_the_report_names_its_variants():
    names = {
        v.name: v.kappa.kappa_crit for v in variants(model("llama3.1-70b"), machine("h100"), 65536)
    }
    assert names["paper"] == pytest.approx(13.8, rel=0.01)
    assert names["paper, 15 GB/s"] == pytest.approx(3.2, rel=0.02)
    assert names["measured, with context"] > 2 * names["measured"]
    changed = {v.name: v.kappa.kappa_crit for v in what_if(model("llama3.1-70b"), machine("h100"))}
    assert changed["KV in FP4"] == pytest.approx(4 * names["measured"])
    assert changed["NVLink-C2C, paper"] == pytest.approx(2 * changed["NVLink-C2C, physical"])
    assert changed["MLA cache"] / names["measured"] == pytest.approx(2048 / 576)
    assert "MLA cache" not in {v.name for v in what_if(model("deepseek-v3"), machine("h100"))}


def test_the_record_shows_what_the_formula_leaves_out():
    row = kappa_record(model("llama3.1-70b"), machine("h100"))
    assert abs(row.simulated_deviation) < 0.01
    assert row.kappa_crit_t64 > row.kappa_crit_t512 > row.kappa_crit_t4096 > row.kappa_crit
    assert row.kappa_crit_paper == pytest.approx(13.8, rel=0.01)
    assert row.load_all


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: Kappa(0.0, 1.0, 1.0, 1.0), "flops_per_token: 0"),
        (lambda: Kappa(1.0, 1.0, math.inf, 1.0), "bytes_per_s: inf"),
        (lambda: advise(K, 1.5), "worth: 1.5"),
        (lambda: prefill_flops_per_token(model("tiny"), "3N"), "count: '3N'"),
        (lambda: context_flops_per_token(model("tiny"), 1, "no"), "count: 'no'"),
        (lambda: context_flops_per_token(model("tiny"), -1), "n_ctx: -1"),
        (lambda: transfer_share(-1.0), "overhead: -1"),
        (lambda: concurrent_requests(-1, 1, 1), "capacity_tokens: -1"),
        (lambda: concurrent_requests(1, 0, 0), "n_cached"),
    ],
)
def test_bad_input_is_named(make, message):
    with pytest.raises(ValueError, match=message):
        make()
