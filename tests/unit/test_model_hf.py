"""Reading Hugging Face config files: every family, and every refusal by name and value."""

import json
from dataclasses import replace
from pathlib import Path

import pytest
import yaml

from policies.spec.model import ModelSpec
from policies.spec.model_hf import load_hf_config, model_from_hf

CONF = Path(__file__).parents[2] / "conf" / "model"
ABSENT = object()


def config(architecture, layers, hidden, heads, ffn, vocab, positions, **more):
    """The fields that every family but OPT spells alike."""
    return {
        "architectures": [architecture],
        "num_hidden_layers": layers,
        "hidden_size": hidden,
        "num_attention_heads": heads,
        "intermediate_size": ffn,
        "vocab_size": vocab,
        "max_position_embeddings": positions,
        "torch_dtype": "bfloat16",
    } | more


OPT = {
    "_remove_final_layer_norm": False,
    "activation_function": "relu",
    "architectures": ["OPTForCausalLM"],
    "do_layer_norm_before": True,
    "ffn_dim": 28672,
    "hidden_size": 7168,
    "max_position_embeddings": 2048,
    "model_type": "opt",
    "num_attention_heads": 56,
    "num_hidden_layers": 48,
    "torch_dtype": "float16",
    "vocab_size": 50272,
    "word_embed_proj_dim": 7168,
}
LLAMA = config(
    *("LlamaForCausalLM", 80, 8192, 64, 28672, 128256, 131072),
    attention_bias=False,
    mlp_bias=False,
    model_type="llama",
    num_key_value_heads=8,
    tie_word_embeddings=False,
)
MISTRAL = config(
    *("MistralForCausalLM", 32, 4096, 32, 14336, 32768, 32768),
    model_type="mistral",
    num_key_value_heads=8,
    sliding_window=None,
    tie_word_embeddings=False,
)
MIXTRAL = config(
    *("MixtralForCausalLM", 32, 4096, 32, 14336, 32000, 32768),
    model_type="mixtral",
    num_experts_per_tok=2,
    num_key_value_heads=8,
    num_local_experts=8,
    sliding_window=None,
    tie_word_embeddings=False,
)
QWEN2 = config(
    *("Qwen2ForCausalLM", 28, 3584, 28, 18944, 152064, 131072),
    max_window_layers=28,
    model_type="qwen2",
    num_key_value_heads=4,
    sliding_window=131072,
    tie_word_embeddings=False,
    use_sliding_window=False,
)
QWEN3 = config(
    *("Qwen3ForCausalLM", 36, 4096, 32, 12288, 151936, 40960),
    attention_bias=False,
    head_dim=128,
    model_type="qwen3",
    num_key_value_heads=8,
    sliding_window=None,
    tie_word_embeddings=False,
    use_sliding_window=False,
)
QWEN3_MOE = config(
    *("Qwen3MoeForCausalLM", 48, 2048, 32, 6144, 151936, 40960),
    attention_bias=False,
    decoder_sparse_step=1,
    head_dim=128,
    mlp_only_layers=[],
    model_type="qwen3_moe",
    moe_intermediate_size=768,
    num_experts=128,
    num_experts_per_tok=8,
    num_key_value_heads=4,
    sliding_window=None,
    tie_word_embeddings=False,
    use_sliding_window=False,
)
DEEPSEEK_V2 = config(
    *("DeepseekV2ForCausalLM", 27, 2048, 16, 10944, 102400, 163840),
    attention_bias=False,
    first_k_dense_replace=1,
    kv_lora_rank=512,
    model_type="deepseek_v2",
    moe_intermediate_size=1408,
    moe_layer_freq=1,
    n_routed_experts=64,
    n_shared_experts=2,
    num_experts_per_tok=6,
    num_key_value_heads=16,
    q_lora_rank=None,
    qk_nope_head_dim=128,
    qk_rope_head_dim=64,
    tie_word_embeddings=False,
    topk_method="greedy",
    v_head_dim=128,
)
DEEPSEEK_V3 = config(
    *("DeepseekV3ForCausalLM", 61, 7168, 128, 18432, 129280, 163840),
    attention_bias=False,
    first_k_dense_replace=3,
    kv_lora_rank=512,
    model_type="deepseek_v3",
    moe_intermediate_size=2048,
    moe_layer_freq=1,
    n_routed_experts=256,
    n_shared_experts=1,
    num_experts_per_tok=8,
    num_key_value_heads=128,
    num_nextn_predict_layers=1,
    q_lora_rank=1536,
    qk_nope_head_dim=128,
    qk_rope_head_dim=64,
    quantization_config={
        "activation_scheme": "dynamic",
        "fmt": "e4m3",
        "quant_method": "fp8",
        "weight_block_size": [128, 128],
    },
    tie_word_embeddings=False,
    topk_method="noaux_tc",
    v_head_dim=128,
)


def shipped(name):
    return ModelSpec(**yaml.safe_load((CONF / f"{name}.yaml").read_text()))


def changed(base, **change):
    """The config with fields set, or removed where the value is ABSENT."""
    return {k: v for k, v in (base | change).items() if v is not ABSENT}


def total(base, **change):
    return model_from_hf(changed(base, **change), "x").n_params


# ---- families -------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("base", "name"),
    [
        (OPT, "opt-30b"),
        (LLAMA, "llama3.1-70b"),
        (MIXTRAL, "mixtral-8x7b"),
        (QWEN3_MOE, "qwen3-30b-a3b"),
        (changed(DEEPSEEK_V3, quantization_config=ABSENT), "deepseek-v3"),
    ],
)
def test_public_config_equals_the_shipped_model(base, name):
    assert model_from_hf(base, name) == shipped(name)


@pytest.mark.parametrize(
    ("base", "n_params"),
    [
        (MISTRAL, 7_248_023_552),  # Mistral-7B-v0.3
        (QWEN2, 7_615_616_512),  # Qwen2.5-7B
        (QWEN3, 8_190_735_360),  # Qwen3-8B
        (DEEPSEEK_V2, 15_706_484_224),  # DeepSeek-V2-Lite, without a query rank
    ],
)
def test_families_that_are_not_shipped_match_their_checkpoint(base, n_params):
    """Element counts of the published safetensors files."""
    assert total(base) == n_params


def test_qwen2_has_qkv_biases_only():
    bias = (28 + 2 * 4) * 128
    spec = model_from_hf(QWEN2, "x")
    assert spec.n_params - replace(spec, qkv_bias=False).n_params == 28 * bias


def test_fp8_checkpoint_halves_weights_and_leaves_kv():
    spec = model_from_hf(DEEPSEEK_V3, "deepseek-v3")
    assert spec == replace(shipped("deepseek-v3"), weight_bytes_per_elem=1.0)
    assert spec.kv_bytes_per_token == 70272


def test_tied_and_untied_are_both_representable():
    untied = model_from_hf(QWEN3, "x")
    tied = model_from_hf(QWEN3 | {"tie_word_embeddings": True}, "x")
    assert untied.n_params - tied.n_params == 151936 * 4096
    assert not model_from_hf(OPT | {"tie_word_embeddings": False}, "x").tied_embeddings


def test_model_type_alone_or_architecture_alone_is_enough():
    for base in (changed(LLAMA, architectures=ABSENT), changed(LLAMA, model_type=ABSENT)):
        assert model_from_hf(base, "llama3.1-70b") == shipped("llama3.1-70b")


@pytest.mark.parametrize(
    ("dtype", "width"),
    [("float16", 2), ("bfloat16", 2), ("float32", 4), ("float8_e4m3fn", 1), ("float8_e5m2", 1)],
)
@pytest.mark.parametrize("field", ["torch_dtype", "dtype"])
def test_dtype_sets_both_widths(dtype, width, field):
    spec = model_from_hf(changed(LLAMA, torch_dtype=ABSENT) | {field: dtype}, "x")
    assert (spec.weight_bytes_per_elem, spec.kv_bytes_per_elem) == (width, width)


# ---- what absence means ---------------------------------------------------------------------


@pytest.mark.parametrize("empty", [ABSENT, None])
def test_absent_or_null_derived_fields(empty):
    full = model_from_hf(LLAMA, "x")
    assert model_from_hf(changed(LLAMA, head_dim=empty), "x") == full
    assert model_from_hf(changed(LLAMA, num_key_value_heads=empty), "x") == replace(
        full, n_kv_heads=64
    )
    assert total(OPT, word_embed_proj_dim=empty) == total(OPT)
    assert total(DEEPSEEK_V2, num_key_value_heads=empty) == total(DEEPSEEK_V2)
    assert model_from_hf(changed(QWEN3_MOE, head_dim=empty), "x").head_dim == 2048 // 32


def test_absent_switches_mean_what_the_family_says():
    assert model_from_hf(changed(OPT, tie_word_embeddings=ABSENT), "x").tied_embeddings
    for base in (LLAMA, MISTRAL, MIXTRAL, QWEN2, QWEN3, QWEN3_MOE, DEEPSEEK_V2, DEEPSEEK_V3):
        assert total(base, tie_word_embeddings=ABSENT) == total(base)
    off = ("attention_bias", "mlp_bias", "use_sliding_window", "moe_layer_freq", "topk_method")
    for base in (LLAMA, QWEN2, QWEN3, QWEN3_MOE, DEEPSEEK_V2, DEEPSEEK_V3):
        bare = changed(base, **dict.fromkeys(off, ABSENT))
        assert model_from_hf(bare, "x") == model_from_hf(base, "x")
    assert total(MIXTRAL, sliding_window=ABSENT) == total(MIXTRAL)
    assert total(QWEN3_MOE, decoder_sparse_step=ABSENT, mlp_only_layers=None) == total(QWEN3_MOE)
    opt = changed(OPT, do_layer_norm_before=ABSENT, _remove_final_layer_norm=ABSENT)
    assert model_from_hf(opt, "x") == model_from_hf(OPT, "x")


def test_opt_and_llama_bias_switches_reach_the_count():
    assert total(OPT) - total(OPT, enable_bias=False) == 48 * 9 * 7168
    biases = 8192 + 2 * 1024 + 8192 + 2 * 28672 + 8192  # q, k, v, out, gate, up, down
    assert total(LLAMA, attention_bias=True, mlp_bias=True) - total(LLAMA) == 80 * biases


def test_mistral_without_window_field_has_a_window():
    with pytest.raises(ValueError, match=r"sliding_window is 4096 .* at least .* 32768"):
        model_from_hf(changed(MISTRAL, sliding_window=ABSENT), "x")
    wide = changed(MISTRAL, sliding_window=32768)  # as long as any sequence: never cuts
    assert model_from_hf(wide, "x") == model_from_hf(MISTRAL, "x")


@pytest.mark.parametrize(
    ("base", "field"),
    [(OPT, f) for f in ("ffn_dim", "hidden_size", "num_hidden_layers", "vocab_size")]
    + [(LLAMA, f) for f in ("num_attention_heads", "intermediate_size", "num_hidden_layers")]
    + [(MISTRAL, "num_key_value_heads"), (QWEN2, "num_key_value_heads"), (QWEN3, "head_dim")]
    + [(MIXTRAL, f) for f in ("num_local_experts", "num_experts_per_tok")]
    + [(QWEN3_MOE, f) for f in ("num_experts", "moe_intermediate_size")]
    + [(DEEPSEEK_V2, f) for f in ("q_lora_rank", "n_shared_experts", "first_k_dense_replace")]
    + [(DEEPSEEK_V3, f) for f in ("kv_lora_rank", "v_head_dim", "max_position_embeddings")],
)
def test_missing_size_is_refused_by_name(base, field):
    with pytest.raises(ValueError, match=rf"^missing field '{field}'$"):
        model_from_hf(changed(base, **{field: ABSENT}), "x")


# ---- refusals -------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("base", "change", "message"),
    [
        (OPT, {"word_embed_proj_dim": 512}, r"word_embed_proj_dim is 512, .* allowed: 7168"),
        (OPT, {"do_layer_norm_before": False}, r"do_layer_norm_before is False, .* allowed: true"),
        (OPT, {"_remove_final_layer_norm": True}, r"_remove_final_layer_norm is True"),
        (OPT, {"layer_norm_elementwise_affine": False}, r"elementwise_affine is False"),
        (OPT, {"num_attention_heads": 55}, r"hidden_size is 7168, .* num_attention_heads 55"),
        (LLAMA, {"attention_bias": True}, r"mlp_bias is False, .* allowed: true"),
        (LLAMA, {"mlp_bias": True}, r"mlp_bias is True, .* allowed: false"),
        (LLAMA, {"num_attention_heads": 60}, r"hidden_size is 8192, .* num_attention_heads 60"),
        (LLAMA, {"num_key_value_heads": 7}, r"n_kv_heads: 7 must divide n_heads 64"),
        (LLAMA, {"num_hidden_layers": None}, r"num_hidden_layers is None, must be an integer"),
        (LLAMA, {"hidden_size": "8192"}, r"hidden_size is '8192', must be an integer >= 1"),
        (LLAMA, {"hidden_size": 8192.0}, r"hidden_size is 8192\.0, must be an integer"),
        (LLAMA, {"vocab_size": True}, r"vocab_size is True, must be an integer"),
        (LLAMA, {"num_hidden_layers": 0}, r"num_hidden_layers is 0, must be an integer >= 1"),
        (LLAMA, {"tie_word_embeddings": "no"}, r"tie_word_embeddings is 'no', must be true or"),
        (MISTRAL, {"sliding_window": 4096}, r"sliding_window is 4096"),
        (MIXTRAL, {"sliding_window": 4096}, r"sliding_window is 4096"),
        (QWEN2, {"use_sliding_window": True}, r"use_sliding_window is True"),
        (QWEN3, {"use_sliding_window": True}, r"use_sliding_window is True"),
        (QWEN3, {"attention_bias": True}, r"attention_bias is True"),
        (QWEN3, {"layer_types": ["full_attention", "sliding_attention"]}, r"layer_types is \["),
        (QWEN3_MOE, {"decoder_sparse_step": 2}, r"decoder_sparse_step is 2, .* allowed: 1"),
        (QWEN3_MOE, {"mlp_only_layers": [0]}, r"mlp_only_layers is \[0\]"),
        (QWEN3_MOE, {"num_experts_per_tok": 129}, r"top_k: 129 must be in 1\.\.128"),
        (DEEPSEEK_V2, {"moe_layer_freq": 2}, r"moe_layer_freq is 2"),
        (DEEPSEEK_V2, {"topk_method": "noaux_tc"}, r"topk_method is 'noaux_tc'"),
        (DEEPSEEK_V3, {"topk_method": "greedy"}, r"topk_method is 'greedy', .* \"noaux_tc\""),
        (DEEPSEEK_V3, {"attention_bias": True}, r"attention_bias is True"),
        (DEEPSEEK_V3, {"num_key_value_heads": 1}, r"num_key_value_heads is 1, .* allowed: 128"),
        (DEEPSEEK_V3, {"n_routed_experts": None}, r"n_routed_experts is None"),
        (DEEPSEEK_V3, {"first_k_dense_replace": -1}, r"first_k_dense_replace is -1, .* >= 0"),
        (LLAMA, {"torch_dtype": ABSENT}, r"missing field 'torch_dtype' \(or 'dtype'\)"),
        (LLAMA, {"torch_dtype": None}, r"missing field 'torch_dtype'"),
        (LLAMA, {"torch_dtype": "auto"}, r"torch_dtype is 'auto', allowed: float32, float16"),
        (LLAMA, {"dtype": "float32"}, r"torch_dtype and dtype differ"),
        (LLAMA, {"quantization_config": {"quant_method": "gptq"}}, r"quant_method is 'gptq'"),
        (LLAMA, {"quantization_config": {}}, r"quant_method is None, allowed: 'fp8'"),
    ],
)
def test_refuses_by_name_and_value(base, change, message):
    with pytest.raises(ValueError, match=message):
        model_from_hf(changed(base, **change), "x")


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"architectures": ["GemmaForCausalLM"]}, r"unknown architecture 'GemmaForCausalLM', kno"),
        ({"architectures": ["LlamaForSequenceClassification"]}, r"unknown architecture 'LlamaFor"),
        ({"architectures": ["Qwen2MoeForCausalLM"]}, r"known: OPTForCausalLM, LlamaForCausalLM"),
        ({"architectures": []}, r"architectures is \[\], must be a list of one"),
        ({"architectures": "LlamaForCausalLM"}, r"must be a list of one"),
        ({"model_type": "mistral"}, r"model_type is 'mistral', but architecture 'LlamaForCausalLM"),
        ({"architectures": ABSENT, "model_type": "gpt2"}, r"unknown model_type 'gpt2', known: opt"),
        ({"architectures": ABSENT, "model_type": ["llama"]}, r"unknown model_type \['llama'\]"),
        ({"architectures": ABSENT, "model_type": ABSENT}, r"missing field 'architectures'"),
    ],
)
def test_unknown_families_are_refused_by_name(change, message):
    with pytest.raises(ValueError, match=message):
        model_from_hf(changed(LLAMA, **change), "x")


# ---- files ----------------------------------------------------------------------------------


def test_loads_a_file_or_its_folder_named_after_the_folder(tmp_path):
    folder = tmp_path / "llama3.1-70b"
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps(LLAMA))
    assert load_hf_config(str(folder)) == shipped("llama3.1-70b")
    assert load_hf_config(str(folder / "config.json")) == shipped("llama3.1-70b")


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (None, r"config\.json: cannot be read \(No such file or directory\)"),
        (b"{oops", r"config\.json: is not valid JSON \(.*line 1 column 2"),
        (b"[1]", r"config\.json: holds a list, must hold one JSON object"),
        (b"\xff\xfe{", r"config\.json: is not UTF-8 text"),
        (b'{"architectures": ["T5"]}', r"unknown architecture 'T5'"),
    ],
)
def test_bad_files_are_value_errors_that_name_the_path(tmp_path, content, message):
    if content is not None:
        (tmp_path / "config.json").write_bytes(content)
    with pytest.raises(ValueError, match=message) as error:
        load_hf_config(str(tmp_path))
    assert str(tmp_path) in str(error.value)


def test_messages_name_the_file_that_was_read(tmp_path):
    path = tmp_path / "small.json"
    path.write_text(json.dumps(LLAMA | {"hidden_size": "8192"}))
    with pytest.raises(ValueError) as error:
        load_hf_config(str(path))
    assert str(error.value) == f"{path}: hidden_size is '8192', must be an integer >= 1"
