"""A ``ModelSpec`` from the ``config.json`` of a Hugging Face checkpoint.

Readers get one thing wrong: a field that is absent is not zero. It means what the family's own
configuration class in ``transformers`` says, and that differs: without ``head_dim`` Llama divides
``hidden_size`` by the heads, without ``sliding_window`` Mistral has a window of 4096 tokens,
without ``tie_word_embeddings`` OPT ties and Llama does not. ``_WHEN_ABSENT`` is the whole list;
any other absent field is refused by name, and so is every value that ``ModelSpec`` cannot
represent exactly.

Two things are approximate, and only these. A checkpoint in fine-grained FP8 counts one byte per
parameter, although its scales, norms and embeddings are wider (under 1 % for DeepSeek-V3). Layers
that only draft tokens (``num_nextn_predict_layers``) are not part of the model's own forward and
are left out, as ``transformers`` leaves them out.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from enum import Enum
from pathlib import Path
from typing import Any

from policies.spec.model import ModelSpec
from policies.text_file import read_text


class _Derived(Enum):
    """An absent or null field that follows from other fields."""

    HIDDEN = "hidden_size"
    HEADS = "num_attention_heads"
    PER_HEAD = "hidden_size / num_attention_heads"


_FAMILY_OF_ARCHITECTURE = {
    "OPTForCausalLM": "opt",
    "LlamaForCausalLM": "llama",
    "MistralForCausalLM": "mistral",
    "MixtralForCausalLM": "mixtral",
    "Qwen2ForCausalLM": "qwen2",
    "Qwen3ForCausalLM": "qwen3",
    "Qwen3MoeForCausalLM": "qwen3_moe",
    "DeepseekV2ForCausalLM": "deepseek_v2",
    "DeepseekV3ForCausalLM": "deepseek_v3",
}

_UNTIED: dict[str, object] = {"tie_word_embeddings": False}
_QWEN: dict[str, object] = _UNTIED | {"use_sliding_window": False}
_DEEPSEEK: dict[str, object] = _UNTIED | {
    "num_key_value_heads": _Derived.HEADS,
    "attention_bias": False,
    "mlp_bias": False,
    "moe_layer_freq": 1,
}

# family -> field -> meaning of its absence (source: the configuration and model classes of
# transformers 4 and 5). A derived field may also be null.
_WHEN_ABSENT: dict[str, dict[str, object]] = {
    "opt": {
        "tie_word_embeddings": True,
        "word_embed_proj_dim": _Derived.HIDDEN,
        "do_layer_norm_before": True,
        "_remove_final_layer_norm": False,
        "layer_norm_elementwise_affine": True,
        "enable_bias": True,
    },
    "llama": _UNTIED
    | {
        "num_key_value_heads": _Derived.HEADS,
        "head_dim": _Derived.PER_HEAD,
        "attention_bias": False,
        "mlp_bias": False,
    },
    "mistral": _UNTIED | {"head_dim": _Derived.PER_HEAD, "sliding_window": 4096},
    "mixtral": _UNTIED | {"head_dim": _Derived.PER_HEAD, "sliding_window": None},
    "qwen2": _QWEN | {"head_dim": _Derived.PER_HEAD},
    "qwen3": _QWEN | {"attention_bias": False},
    "qwen3_moe": _QWEN
    | {
        "head_dim": _Derived.PER_HEAD,
        "attention_bias": False,
        "decoder_sparse_step": 1,
        "mlp_only_layers": None,
    },
    "deepseek_v2": _DEEPSEEK | {"topk_method": "greedy"},
    "deepseek_v3": _DEEPSEEK | {"topk_method": "noaux_tc"},
}

_BYTES_OF_DTYPE = {
    "float32": 4.0,
    "float16": 2.0,
    "bfloat16": 2.0,
    "float8_e4m3fn": 1.0,
    "float8_e5m2": 1.0,
}


@dataclass(frozen=True, slots=True)
class _Config:
    """Checked reading of one configuration; every method raises ``ValueError`` naming the field."""

    raw: Mapping[str, object]
    family: str

    def value(self, field: str) -> object:
        """The field, or what its absence means in this family."""
        absent = _WHEN_ABSENT[self.family]
        if self.raw.get(field) is not None:
            return self.raw[field]
        if field not in absent and field not in self.raw:
            raise ValueError(f"missing field '{field}'")
        meaning = absent.get(field)
        if meaning is _Derived.PER_HEAD:
            return self.per_head()
        if isinstance(meaning, _Derived):
            return self.size(meaning.value)
        return None if field in self.raw else meaning

    def per_head(self) -> int:
        """``hidden_size / num_attention_heads``, which must be whole."""
        hidden, heads = self.size("hidden_size"), self.size("num_attention_heads")
        if hidden % heads:
            raise ValueError(
                f"hidden_size is {hidden}, must be a multiple of "
                f"num_attention_heads {heads} where head_dim is not given"
            )
        return hidden // heads

    def size(self, field: str, least: int = 1) -> int:
        """An integer of at least ``least``."""
        value = self.value(field)
        if isinstance(value, bool) or not isinstance(value, int) or value < least:
            raise ValueError(f"{field} is {value!r}, must be an integer >= {least}")
        return value

    def flag(self, field: str) -> bool:
        """True or false."""
        value = self.value(field)
        if not isinstance(value, bool):
            raise ValueError(f"{field} is {value!r}, must be true or false")
        return value

    def only(self, field: str, *allowed: object) -> None:
        """Refuse a value that ``ModelSpec`` cannot represent."""
        value = self.value(field)
        if not any(value == a and type(value) is type(a) for a in allowed):
            names = " or ".join(json.dumps(a) for a in allowed)
            raise ValueError(
                f"{field} is {value!r}, which the model spec cannot represent; allowed: {names}"
            )


def model_from_hf(config: Mapping[str, object], name: str) -> ModelSpec:
    """Shape of the model that a parsed ``config.json`` describes.

    ``kv_bytes_per_elem`` is the width of ``torch_dtype``: transformers caches K and V in the dtype
    in which it computes, also where the weights are FP8. ``ValueError`` names the field that is
    missing, malformed or not representable; the file is named by who read it.
    """
    family = _family(config)
    read = _Config(config, family)
    _refuse_mixed_attention(config)
    kv_bytes = _dtype_bytes(config)
    return ModelSpec(
        name=name,
        n_layers=read.size("num_hidden_layers"),
        d_model=read.size("hidden_size"),
        n_heads=read.size("num_attention_heads"),
        vocab=read.size("vocab_size"),
        max_positions=read.size("max_position_embeddings"),
        tied_embeddings=read.flag("tie_word_embeddings"),
        weight_bytes_per_elem=1.0 if _is_fp8(config) else kv_bytes,
        kv_bytes_per_elem=kv_bytes,
        **_BUILDERS[family](read),
    )


def load_hf_config(path: str) -> ModelSpec:
    """Model of a ``config.json``, or of the folder that holds one; named after the folder."""
    file = Path(path)
    if file.is_dir():
        file = file / "config.json"
    text = read_text(file)
    try:
        config = json.loads(text)
    except json.JSONDecodeError as error:
        raise ValueError(f"{file}: is not valid JSON ({error})") from error
    if not isinstance(config, dict):
        raise ValueError(f"{file}: holds a {type(config).__name__}, must hold one JSON object")
    try:
        return model_from_hf(config, file.resolve().parent.name)
    except ValueError as error:
        raise ValueError(f"{file}: {error}") from error


# ---- what all families share --------------------------------------------------------------------


def _family(config: Mapping[str, object]) -> str:
    """Family by ``architectures``, else by ``model_type``; both must agree where both are given."""
    architectures, model_type = config.get("architectures"), config.get("model_type")
    if architectures is None and model_type is None:
        raise ValueError("missing field 'architectures' (or 'model_type')")
    if architectures is None:
        if not isinstance(model_type, str) or model_type not in _WHEN_ABSENT:
            known = ", ".join(_WHEN_ABSENT)
            raise ValueError(f"unknown model_type {model_type!r}, known: {known}")
        return model_type
    if not isinstance(architectures, list) or len(architectures) != 1:
        raise ValueError(f"architectures is {architectures!r}, must be a list of one")
    family = _FAMILY_OF_ARCHITECTURE.get(str(architectures[0]))
    if family is None:
        known = ", ".join(_FAMILY_OF_ARCHITECTURE)
        raise ValueError(f"unknown architecture {architectures[0]!r}, known: {known}")
    if model_type not in (None, family):
        raise ValueError(
            f"model_type is {model_type!r}, but architecture {architectures[0]!r} needs {family!r}"
        )
    return family


def _dtype_bytes(config: Mapping[str, object]) -> float:
    """Bytes per element of ``torch_dtype`` (``dtype`` in newer files)."""
    given = {field: config[field] for field in ("torch_dtype", "dtype") if config.get(field)}
    if not given:
        raise ValueError("missing field 'torch_dtype' (or 'dtype')")
    if len(set(map(str, given.values()))) > 1:
        raise ValueError(f"torch_dtype and dtype differ: {given}")
    field, value = next(iter(given.items()))
    if not isinstance(value, str) or value not in _BYTES_OF_DTYPE:
        known = ", ".join(_BYTES_OF_DTYPE)
        raise ValueError(f"{field} is {value!r}, allowed: {known}")
    return _BYTES_OF_DTYPE[value]


def _is_fp8(config: Mapping[str, object]) -> bool:
    """Whether the weights are stored in FP8; other quantisation is refused by its name."""
    quantization = config.get("quantization_config")
    if quantization is None:
        return False
    method = quantization.get("quant_method") if isinstance(quantization, Mapping) else None
    if method != "fp8":
        raise ValueError(
            f"quantization_config.quant_method is {method!r}, allowed: 'fp8' "
            "(or no quantization_config)"
        )
    return True


def _refuse_mixed_attention(config: Mapping[str, object]) -> None:
    """Refuse ``layer_types`` with anything but full attention (newer files list them)."""
    types = config.get("layer_types")
    if types is not None and (
        not isinstance(types, list) or any(t != "full_attention" for t in types)
    ):
        raise ValueError(f"layer_types is {types!r}, only 'full_attention' can be represented")


# ---- one function a family ----------------------------------------------------------------------


def _refuse_window(read: _Config) -> None:
    """Refuse a sliding window that is shorter than the longest sequence; null is no window."""
    if read.value("sliding_window") is None:
        return
    window, longest = read.size("sliding_window"), read.size("max_position_embeddings")
    if window < longest:
        raise ValueError(
            f"sliding_window is {window} (absent, it means what the family's config "
            f"class says), allowed: null or at least max_position_embeddings {longest}"
        )


def _grouped_query(read: _Config) -> dict[str, Any]:
    """Grouped-query attention, a gated MLP and RMSNorm."""
    return {
        "n_kv_heads": read.size("num_key_value_heads"),
        "head_dim": read.size("head_dim"),
        "d_ffn": read.size("intermediate_size"),
        "gated_ffn": True,
    }


def _opt(read: _Config) -> dict[str, Any]:
    read.only("word_embed_proj_dim", read.size("hidden_size"))
    read.only("do_layer_norm_before", True)
    read.only("_remove_final_layer_norm", False)
    read.only("layer_norm_elementwise_affine", True)
    return {
        "n_kv_heads": read.size("num_attention_heads"),
        "head_dim": read.per_head(),
        "d_ffn": read.size("ffn_dim"),
        "gated_ffn": False,
        "norm_bias": True,
        "linear_bias": read.flag("enable_bias"),
        # The table starts two rows in: OPT inherited the offset of padding ids from fairseq.
        "learned_positions": read.size("max_position_embeddings") + 2,
    }


def _llama(read: _Config) -> dict[str, Any]:
    bias = read.flag("attention_bias")
    read.only("mlp_bias", bias)  # biases on all linear layers or on none
    return _grouped_query(read) | {"linear_bias": bias}


def _mistral(read: _Config) -> dict[str, Any]:
    _refuse_window(read)
    return _grouped_query(read)


def _mixtral(read: _Config) -> dict[str, Any]:
    _refuse_window(read)
    return _grouped_query(read) | {
        "n_experts": read.size("num_local_experts"),
        "top_k": read.size("num_experts_per_tok"),
        "d_expert": read.size("intermediate_size"),
    }


def _qwen2(read: _Config) -> dict[str, Any]:
    read.only("use_sliding_window", False)
    return _grouped_query(read) | {"qkv_bias": True}


def _qwen3(read: _Config) -> dict[str, Any]:
    read.only("use_sliding_window", False)
    read.only("attention_bias", False)
    return _grouped_query(read) | {"qk_norm": True}


def _qwen3_moe(read: _Config) -> dict[str, Any]:
    read.only("decoder_sparse_step", 1)
    read.only("mlp_only_layers", None, [])
    return _qwen3(read) | {
        "n_experts": read.size("num_experts"),
        "top_k": read.size("num_experts_per_tok"),
        "d_expert": read.size("moe_intermediate_size"),
    }


def _deepseek(read: _Config) -> dict[str, Any]:
    heads = read.size("num_attention_heads")
    nope, rope = read.size("qk_nope_head_dim"), read.size("qk_rope_head_dim")
    read.only("num_key_value_heads", heads)
    read.only("attention_bias", False)
    read.only("mlp_bias", False)
    read.only("moe_layer_freq", 1)
    no_query_rank = read.value("q_lora_rank") is None  # null: queries are projected directly
    return {
        "n_kv_heads": heads,
        "head_dim": nope + rope,
        "d_ffn": read.size("intermediate_size"),
        "gated_ffn": True,
        "n_experts": read.size("n_routed_experts"),
        "top_k": read.size("num_experts_per_tok"),
        "d_expert": read.size("moe_intermediate_size"),
        "n_shared_experts": read.size("n_shared_experts"),
        "n_dense_layers": read.size("first_k_dense_replace", least=0),
        "kv_latent_dim": read.size("kv_lora_rank"),
        "rope_dim": rope,
        "nope_dim": nope,
        "v_head_dim": read.size("v_head_dim"),
        "q_lora_rank": 0 if no_query_rank else read.size("q_lora_rank"),
    }


def _deepseek_v2(read: _Config) -> dict[str, Any]:
    read.only("topk_method", "greedy", "group_limited_greedy")
    return _deepseek(read)


def _deepseek_v3(read: _Config) -> dict[str, Any]:
    read.only("topk_method", "noaux_tc")
    return _deepseek(read) | {"router_bias": True}


_BUILDERS: dict[str, Callable[[_Config], dict[str, Any]]] = {
    "opt": _opt,
    "llama": _llama,
    "mistral": _mistral,
    "mixtral": _mixtral,
    "qwen2": _qwen2,
    "qwen3": _qwen3,
    "qwen3_moe": _qwen3_moe,
    "deepseek_v2": _deepseek_v2,
    "deepseek_v3": _deepseek_v3,
}
