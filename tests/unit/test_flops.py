"""FLOPs against brute force over (query, key) pairs and against the matrices themselves."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from policies.cost.flops import (
    attention_flops,
    attention_gemm_elems,
    attention_pair_flops,
    causal_pairs,
    dense_mlp_elems,
    exact_recompute_flops,
    expert_elems,
    gemm_flops,
    paper_recompute_flops,
)
from policies.plan.op import Scope
from tests.policies_table import GQA, MLA, MOE, OPT


@given(st.integers(0, 40), st.integers(0, 40))
def test_pairs_by_counting(n_queries, n_before):
    n_keys = n_queries + n_before
    counted = sum(n_before + i + 1 for i in range(n_queries))
    assert causal_pairs(n_queries, n_keys) == counted


@pytest.mark.parametrize("model", [OPT, GQA], ids=lambda m: m.name)
def test_gemms_are_the_weights_without_biases_and_norms(model):
    d, ffn, kv = model.d_model, model.d_ffn, model.n_kv_heads * model.head_dim
    attention = 2 * d * d + 2 * d * kv
    mlp = (3 if model.gated_ffn else 2) * d * ffn
    assert attention_gemm_elems(model) == attention
    assert dense_mlp_elems(model, 0) == mlp
    assert gemm_flops(model, 0, Scope.LAYER, 7) == 2 * 7 * (attention + mlp)
    parts = [gemm_flops(model, 0, s, 7) for s in (Scope.QKV, Scope.OUTPUT, Scope.MLP)]
    assert sum(parts) == gemm_flops(model, 0, Scope.LAYER, 7)
    assert gemm_flops(model, 0, Scope.HEAD, 3) == 2 * 3 * d * model.vocab


def test_moe_computes_top_k_experts():
    dense, routed = (gemm_flops(MOE, layer, Scope.MLP, 5) for layer in (0, 1))
    assert dense == 2 * 5 * 3 * MOE.d_model * MOE.d_ffn
    router = MOE.d_model * MOE.n_experts
    assert routed == 2 * 5 * (router + 2 * expert_elems(MOE))


def test_mla_attends_in_latent_space_over_a_cache_only():
    expanded, absorbed = attention_pair_flops(MLA, 0), attention_pair_flops(MLA, 1)
    assert expanded == 2 * 16 * (128 + 64 + 128)
    assert absorbed == 2 * 16 * (512 + 64 + 512)


def test_attention_of_a_window():
    """Two new tokens and three recomputed ones behind four that are loaded."""
    pairs = sum(range(5, 10))
    flops = attention_flops(OPT, 6, 2, 3, 7)
    assert flops == 6 * pairs * 4 * OPT.n_heads * OPT.head_dim
    assert attention_flops(OPT, 1, 9, 0, 0) == 45 * 4 * OPT.n_heads * OPT.head_dim


def test_two_named_counts():
    """The paper counts one product and gives every token the context n + r."""
    b, n, r = 3, 1000, 200
    d = OPT.d_model
    exact, paper = (f(OPT, b, n, r) for f in (exact_recompute_flops, paper_recompute_flops))
    assert paper == b * r * (2 * d * (4 * d + n + r) + 4 * d * OPT.d_ffn)
    mean_keys = (n - r) + (r + 1) / 2
    assert exact == pytest.approx(b * r * (2 * 12 * d * d + 4 * d * mean_keys))
    assert exact_recompute_flops(OPT, b, n, 0) == paper_recompute_flops(OPT, b, n, 0) == 0
