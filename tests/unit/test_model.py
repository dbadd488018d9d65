"""Laws of ModelSpec and the shipped model files."""

from dataclasses import fields, replace
from pathlib import Path

import pytest
import yaml
from hypothesis import given, settings
from hypothesis import strategies as st

from policies.plan.op import Scope
from policies.spec.model import ModelSpec

CONF = Path(__file__).parents[2] / "conf" / "model"
NAMES = sorted(path.stem for path in CONF.glob("*.yaml"))
FIELDS = [field.name for field in fields(ModelSpec)]


def load(name: str) -> ModelSpec:
    return ModelSpec(**yaml.safe_load((CONF / f"{name}.yaml").read_text()))


@st.composite
def specs(draw: st.DrawFn) -> ModelSpec:
    """Small models of every kind: dense or MoE, grouped-query or MLA."""
    size = st.integers(1, 9)
    n_layers, group = draw(st.integers(1, 5)), draw(size)
    n_kv_heads = draw(size)
    moe, mla = draw(st.booleans()), draw(st.booleans())
    n_experts = draw(st.integers(1, 12))
    experts = {
        "n_experts": n_experts,
        "top_k": draw(st.integers(1, n_experts)),
        "d_expert": draw(size),
        "n_shared_experts": draw(st.integers(0, 2)),
        "router_bias": draw(st.booleans()),
        "n_dense_layers": draw(st.integers(0, n_layers)),
    }
    latent = {
        "kv_latent_dim": draw(size),
        "rope_dim": draw(size),
        "nope_dim": draw(size),
        "v_head_dim": draw(size),
        "q_lora_rank": draw(st.integers(0, 4)),
    }
    return ModelSpec(
        name="drawn",
        n_layers=n_layers,
        d_model=draw(size),
        n_heads=n_kv_heads * group,
        n_kv_heads=n_kv_heads,
        head_dim=draw(size),
        d_ffn=draw(size),
        vocab=draw(size),
        max_positions=8,
        gated_ffn=moe or draw(st.booleans()),
        tied_embeddings=draw(st.booleans()),
        learned_positions=draw(st.integers(0, 9)),
        linear_bias=not moe and not mla and draw(st.booleans()),
        qkv_bias=not mla and draw(st.booleans()),
        norm_bias=draw(st.booleans()),
        qk_norm=not mla and draw(st.booleans()),
        weight_bytes_per_elem=draw(st.sampled_from([0.5, 1.0, 2.0, 4.0])),
        **(experts if moe else {}),
        **(latent if mla else {}),
    )


law = settings(max_examples=80, deadline=None, database=None)


@law
@given(specs())
def test_active_parameters_are_at_most_all_of_them(model):
    assert 0 < model.n_params_active <= model.n_params
    all_experts = not model.n_experts or model.top_k == model.n_experts
    if all_experts or model.n_dense_layers == model.n_layers:
        assert model.n_params_active == model.n_params
    else:
        assert model.n_params_active < model.n_params


@law
@given(specs(), st.integers(1, 60))
def test_experts_touched_grow_from_top_k_to_all(model, rows):
    for layer in range(model.n_layers):
        touched = model.experts_touched(layer, rows)
        if not model.is_moe(layer):
            assert touched == 0
            continue
        assert model.top_k - 1e-9 <= touched <= model.n_experts
        assert model.experts_touched(layer, 1) == pytest.approx(model.top_k)
        more = model.experts_touched(layer, rows + 1)
        assert more >= touched
        if touched < model.n_experts * (1 - 1e-9):
            assert more > touched


@law
@given(specs())
def test_layer_bytes_are_attention_plus_mlp_at_any_width(model):
    for layer in range(model.n_layers):
        halves = [model.layer_bytes(layer, scope) for scope in (Scope.ATTENTION, Scope.MLP)]
        assert model.layer_bytes(layer) == sum(halves)
        assert model.layer_bytes(layer) == pytest.approx(
            model.layer_params(layer) * model.weight_bytes_per_elem, abs=1
        )


@law
@given(specs())
def test_totals_are_edges_plus_layers(model):
    layers = range(model.n_layers)
    assert model.n_params == model.edge_params + sum(map(model.layer_params, layers))
    assert model.weight_bytes == model.edge_bytes + sum(map(model.layer_bytes, layers))
    untied = replace(model, tied_embeddings=False)
    tied = replace(model, tied_embeddings=True)
    assert untied.n_params - tied.n_params == model.vocab * model.d_model
    for start in range(model.n_layers + 1):
        each = (model.layer_bytes(i) for i in range(start, model.n_layers))
        assert model.layers_bytes(start) == sum(each)


def test_opt_layer_counts_weights_and_biases():
    """12 d^2 weights and 13 d of biases and norms: 9 d of biases, two LayerNorms of 2 d."""
    model = load("opt-30b")
    assert model.layer_params(0) == 12 * model.d_model**2 + 13 * model.d_model


def test_gated_mlp_with_biases_counts_the_gate_bias():
    model = replace(load("llama3.1-8b"), linear_bias=True)
    bias = 2 * model.d_ffn + model.d_model
    plain = load("llama3.1-8b")
    extra = model.layer_params(0, Scope.MLP) - plain.layer_params(0, Scope.MLP)
    assert extra == bias


# ---- three lessons on heads -----------------------------------------------------------------


def test_lesson_projections_of_k_and_v_use_kv_heads():
    grouped = load("llama3.1-70b").attention_matrices()
    every = replace(load("llama3.1-70b"), n_kv_heads=64).attention_matrices()
    assert grouped["k"] == grouped["v"] == 8192 * 8 * 128
    assert (every["k"], every["v"]) == (8 * grouped["k"], 8 * grouped["v"])
    assert (every["q"], every["out"]) == (grouped["q"], grouped["out"])


def test_lesson_attention_flops_follow_query_heads():
    """The width of QK^T and AV is n_heads * head_dim, whatever the number of KV heads."""
    grouped = load("llama3.1-70b")
    every = replace(grouped, n_kv_heads=64)
    for model in (grouped, every):
        assert model.n_heads * model.qk_dim == model.n_heads * model.v_dim == 8192
        assert model.attention_matrices()["out"] == model.n_heads * model.v_dim * model.d_model
    assert load("qwen3-235b-a22b").n_heads * load("qwen3-235b-a22b").v_dim == 8192  # d_model 4096
    latent = load("deepseek-v3")
    assert (latent.n_heads * latent.qk_dim, latent.n_heads * latent.v_dim) == (24576, 16384)


def test_lesson_kv_bytes_use_kv_heads():
    grouped = load("llama3.1-70b")
    assert grouped.kv_bytes_per_token == 2 * 80 * 8 * 128 * 2
    every = replace(grouped, n_kv_heads=64)
    assert every.kv_bytes_per_token == 8 * grouped.kv_bytes_per_token
    assert load("deepseek-v3").kv_bytes_per_token == 61 * (512 + 64) * 2  # no heads at all


# ---- the shipped files ----------------------------------------------------------------------


@pytest.mark.parametrize("name", NAMES)
def test_yaml_has_exactly_the_fields_of_model_spec(name):
    text = (CONF / f"{name}.yaml").read_text()
    assert list(yaml.safe_load(text)) == FIELDS
    assert text.startswith("# Source: ")


@pytest.mark.parametrize("name", NAMES)
def test_yaml_builds_the_model_that_it_is_named_after(name):
    model = load(name)
    assert model.name == name
    assert (model.weight_bytes_per_elem, model.kv_bytes_per_elem) == (2.0, 2.0)
    assert model.weight_bytes == 2 * model.n_params
    for field in fields(ModelSpec):
        expected = {"int": int, "bool": bool, "float": float, "str": str}[field.type]
        assert type(getattr(model, field.name)) is expected


def test_tiny_is_tiny():
    model = load("tiny")
    assert (model.n_layers, model.d_model) == (2, 64)
    assert model.weight_bytes < 1e6


# ---- refusals -------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("name", "change", "message"),
    [
        ("opt-30b", {"n_layers": 0}, r"model\.n_layers: 0 must be positive"),
        ("opt-30b", {"weight_bytes_per_elem": -2.0}, r"weight_bytes_per_elem: -2\.0 must be"),
        ("llama3.1-8b", {"n_kv_heads": 5}, r"n_kv_heads: 5 must divide n_heads 32"),
        ("mixtral-8x7b", {"top_k": 9}, r"top_k: 9 must be in 1\.\.8"),
        ("mixtral-8x7b", {"d_expert": 0}, r"d_expert: 0 must be positive"),
        ("deepseek-v3", {"n_dense_layers": 62}, r"n_dense_layers: 62 must be in 0\.\.61"),
        ("deepseek-v3", {"v_head_dim": 0}, r"kv_latent_dim: MLA needs"),
        ("opt-30b", {"learned_positions": -1}, r"learned_positions: -1 must be >= 0"),
        ("deepseek-v3", {"n_shared_experts": -1}, r"n_shared_experts: -1 must be >= 0"),
        ("llama3.1-8b", {"top_k": 2}, r"top_k: 2 needs n_experts > 0"),
        ("llama3.1-8b", {"rope_dim": 64}, r"rope_dim: 64 needs kv_latent_dim > 0"),
        ("mixtral-8x7b", {"linear_bias": True}, r"linear_bias: true must be false"),
        ("deepseek-v3", {"qkv_bias": True}, r"qkv_bias, model\.qk_norm: true must be false"),
        ("mixtral-8x7b", {"gated_ffn": False}, r"gated_ffn: false must be true"),
    ],
)
def test_refuses_what_it_would_miscount(name, change, message):
    with pytest.raises(ValueError, match=message):
        replace(load(name), **change)
