"""What a forward needs to know of a model beyond its shape: dtype, norm epsilon, rotary angles.

One forward serves two families because they differ in switches that ``ModelSpec`` has: LayerNorm or
RMSNorm (``norm_bias``), learned positions or rotary ones (``learned_positions``), ReLU or SwiGLU
(``gated_ffn``). What readers get wrong: OPT's position table starts with two rows that no token
uses, so token 0 takes row 2.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from policies.spec.model import ModelSpec

DTYPES = {
    "float16": torch.float16,
    "bfloat16": torch.bfloat16,
    "float32": torch.float32,
    "float64": torch.float64,
}
POSITION_OFFSET = 2


@dataclass(frozen=True, slots=True)
class RopeScaling:
    """Stretched rotary frequencies.

    ``linear`` divides all by ``factor``; ``llama3`` divides those whose wavelength exceeds
    ``original_positions / low_freq_factor``, keeps those below ``original_positions /
    high_freq_factor`` and interpolates between (Llama 3.1 model card).
    """

    kind: str
    factor: float
    low_freq_factor: float = 1.0
    high_freq_factor: float = 4.0
    original_positions: int = 8192

    def __post_init__(self) -> None:
        if self.kind not in ("linear", "llama3"):
            raise ValueError(f"rope_scaling: {self.kind!r} must be linear or llama3")
        if not self.factor >= 1:
            raise ValueError(f"rope_scaling.factor: {self.factor} must be >= 1")
        if not 0 < self.low_freq_factor < self.high_freq_factor:
            raise ValueError(
                f"rope_scaling: low_freq_factor {self.low_freq_factor} must be below "
                f"high_freq_factor {self.high_freq_factor} and positive"
            )


@dataclass(frozen=True, slots=True)
class Numerics:
    """Constants of the norms and of the rotary embedding."""

    norm_eps: float = 1e-5
    rope_theta: float = 10000.0
    rope_scaling: RopeScaling | None = None


def check_supported(model: ModelSpec) -> None:
    """``ValueError`` for a shape that this engine has no forward for."""
    unsupported = {
        "n_experts": model.n_experts > 0,
        "kv_latent_dim": model.kv_latent_dim > 0,
        "qk_norm": model.qk_norm,
    }
    for field, present in unsupported.items():
        if present:
            raise ValueError(
                f"model.{field}: {getattr(model, field)} is not supported by the engine, which "
                "runs dense OPT and Llama families"
            )
    if model.head_dim % 2 and not model.learned_positions:
        raise ValueError(
            f"model.head_dim: {model.head_dim} must be even where positions are rotary"
        )


def rope_tables(
    model: ModelSpec, numerics: Numerics, n_positions: int, dtype: torch.dtype
) -> tuple[Tensor, Tensor]:
    """Cosines and sines ``[n_positions, head_dim / 2]`` of ``position * theta^(-2i / head_dim)``.

    Computed in float64 and rounded once.
    """
    half = torch.arange(0, model.head_dim, 2, dtype=torch.float64)  # [head_dim / 2]
    frequency = numerics.rope_theta ** (-half / model.head_dim)  # [head_dim / 2]
    if numerics.rope_scaling is not None:
        frequency = _scaled(frequency, numerics.rope_scaling)
    positions = torch.arange(n_positions, dtype=torch.float64)
    angles = torch.outer(positions, frequency)  # [n_positions, head_dim / 2]
    return angles.cos().to(dtype), angles.sin().to(dtype)


def _scaled(frequency: Tensor, scaling: RopeScaling) -> Tensor:
    slow = frequency / scaling.factor
    if scaling.kind == "linear":
        return slow
    turns = scaling.original_positions * frequency / (2 * math.pi)  # over the original context
    low, high = scaling.low_freq_factor, scaling.high_freq_factor
    keep = ((turns - low) / (high - low)).clamp(0.0, 1.0)
    return keep * frequency + (1.0 - keep) * slow


def numerics_from_hf(config: Mapping[str, object]) -> Numerics:
    """Constants in a parsed ``config.json``; ``ValueError`` naming a field that is not supported.

    Files of transformers 5 nest the rotary fields in ``rope_parameters``.
    """
    activation = config.get("activation_function", config.get("hidden_act"))
    if activation not in ("relu", "silu"):
        raise ValueError(f"config.json: activation {activation!r} must be relu or silu")
    nested = config.get("rope_parameters") or config.get("rope_scaling") or {}
    if not isinstance(nested, Mapping):
        raise ValueError(f"config.json: rope_scaling is {nested!r}, must be an object or null")
    theta = nested.get("rope_theta", config.get("rope_theta", 10000.0))
    kind = nested.get("rope_type", nested.get("type", "default"))
    scaling = None
    if kind != "default":
        scaling = RopeScaling(
            kind=str(kind),
            factor=_number(nested, "factor", 1.0),
            low_freq_factor=_number(nested, "low_freq_factor", 1.0),
            high_freq_factor=_number(nested, "high_freq_factor", 4.0),
            original_positions=int(_number(nested, "original_max_position_embeddings", 8192)),
        )
    return Numerics(
        norm_eps=_number(config, "rms_norm_eps", 1e-5),
        rope_theta=_number({"rope_theta": theta}, "rope_theta", 0.0),
        rope_scaling=scaling,
    )


def _number(config: Mapping[str, object], field: str, absent: float) -> float:
    value = config.get(field, absent)
    if isinstance(value, bool) or not isinstance(value, int | float):
        raise ValueError(f"config.json: {field} is {value!r}, must be a number")
    return float(value)
