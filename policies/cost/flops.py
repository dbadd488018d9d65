"""FLOPs of a forward in two named counts: the exact one and TightLLM's.

The exact count has a multiply and an add per weight and token, and both attention products over
exactly the causal pairs. TightLLM's (papers.md 2.3, after Kaplan) counts one attention product and
gives every recomputed token the context ``n_ctx + n_recompute``. Simulated times use the exact one.
"""

from __future__ import annotations

from policies.plan.op import Scope
from policies.spec.model import ModelSpec


def causal_pairs(n_queries: int, n_keys: int) -> int:
    """(query, key) pairs when the last ``n_queries`` of ``n_keys`` tokens attend causally."""
    return n_queries * (n_keys - n_queries) + n_queries * (n_queries + 1) // 2


def attention_gemm_elems(model: ModelSpec, scope: Scope = Scope.ATTENTION) -> int:
    """Weight elements that each token multiplies with in attention's linear layers.

    ``Scope.QKV`` is the part before attention, ``Scope.OUTPUT`` the part after it.
    """
    d = model.d_model
    out = model.n_heads * model.v_dim * d
    if model.kv_latent_dim:
        q_dim = model.n_heads * model.qk_dim
        rank = model.q_lora_rank
        queries = d * rank + rank * q_dim if rank else d * q_dim
        expand = model.kv_latent_dim * model.n_heads * (model.nope_dim + model.v_head_dim)
        inputs = queries + d * (model.kv_latent_dim + model.rope_dim) + expand
    else:
        inputs = d * (model.n_heads + 2 * model.n_kv_heads) * model.head_dim
    return {Scope.QKV: inputs, Scope.OUTPUT: out, Scope.ATTENTION: inputs + out}[scope]


def dense_mlp_elems(model: ModelSpec, layer: int) -> int:
    """Weight elements that every token of a layer multiplies with in the MLP, experts apart."""
    if model.is_moe(layer):
        shared = 3 * model.d_model * model.d_expert * model.n_shared_experts
        return model.d_model * model.n_experts + shared
    return (3 if model.gated_ffn else 2) * model.d_model * model.d_ffn


def expert_elems(model: ModelSpec) -> int:
    """Weight elements of one expert."""
    return 3 * model.d_model * model.d_expert


def attention_pair_flops(model: ModelSpec, n_ctx: int) -> int:
    """FLOPs per (query token, key token) pair, all heads, QK^T and AV.

    MLA over a cache attends in the latent space (absorbed projections); without one it expands.
    """
    if model.kv_latent_dim and n_ctx > 0:
        return 2 * model.n_heads * (2 * model.kv_latent_dim + model.rope_dim)
    return 2 * model.n_heads * (model.qk_dim + model.v_dim)


def attention_flops(
    model: ModelSpec, n_seqs: int, n_new: int, n_recompute: int, n_ctx: int, n_front: int = 0
) -> int:
    """FLOPs of the two attention products of one layer; the front attends to itself alone."""
    pairs = causal_pairs(n_new + n_recompute, n_ctx + n_new) + causal_pairs(n_front, n_front)
    return n_seqs * pairs * attention_pair_flops(model, n_ctx)


def projection_elems(model: ModelSpec) -> int:
    """Weight elements with which a layer's input becomes one token's K and V.

    With MLA that is its latent and its rotary key.
    """
    if model.kv_latent_dim:
        return model.d_model * (model.kv_latent_dim + model.rope_dim)
    return model.d_model * 2 * model.n_kv_heads * model.head_dim


def gemm_flops(model: ModelSpec, layer: int, scope: Scope, rows: int) -> int:
    """FLOPs of the linear layers of ``scope`` for ``rows`` tokens."""
    if scope is Scope.HEAD:
        return 2 * rows * model.vocab * model.d_model
    elems = 0
    if scope in (Scope.LAYER, Scope.ATTENTION):
        elems += attention_gemm_elems(model)
    elif scope in (Scope.QKV, Scope.OUTPUT):
        elems += attention_gemm_elems(model, scope)
    if scope in (Scope.LAYER, Scope.MLP):
        elems += dense_mlp_elems(model, layer)
        if model.is_moe(layer):
            elems += model.top_k * expert_elems(model)
    return 2 * rows * elems


def exact_recompute_flops(model: ModelSpec, n_seqs: int, n_ctx: int, n_recompute: int) -> int:
    """Exact FLOPs of recomputing the last ``n_recompute`` of ``n_ctx`` tokens in layer 0."""
    linear = gemm_flops(model, 0, Scope.LAYER, n_seqs * n_recompute)
    pairs = n_seqs * causal_pairs(n_recompute, n_ctx)
    return linear + pairs * attention_pair_flops(model, n_ctx)


def paper_recompute_flops(model: ModelSpec, n_seqs: int, n_ctx: int, n_recompute: int) -> int:
    """TightLLM's FLOPs of the same: ``b r 2 d_attn (4 d + n + r) + b r 4 d d_ffn``.

    Two-matrix FFN and MHA are built into the formula (TightLLM, KV distributor, attention and FFN
    terms; papers.md 2.3).
    """
    d_attn = model.n_heads * model.head_dim
    attention = 2 * d_attn * (4 * model.d_model + n_ctx + n_recompute)
    return n_seqs * n_recompute * (attention + 4 * model.d_model * model.d_ffn)
