"""Memory footprint of a generation job: weights, KV cache, hidden states.

Two counts of the same job. The paper's is FlexGen's byte formula, which TightLLM prints as whole
"GB"; these are GiB, rounded down, of the *prompt* alone: generated tokens are not in it. The exact
count takes the parameters of the real model, positions and all biases included.
"""

from __future__ import annotations

from dataclasses import dataclass

from policies.placement import ACT_BYTES_PER_ELEM
from policies.spec.model import ModelSpec

GIB = 2**30


@dataclass(frozen=True, slots=True)
class Footprint:
    """Bytes of a job by what holds them."""

    weight_bytes: int
    kv_bytes: int
    hidden_bytes: int

    @property
    def total_bytes(self) -> int:
        """Sum of the three."""
        return self.weight_bytes + self.kv_bytes + self.hidden_bytes

    @property
    def whole_gib(self) -> int:
        """Total in whole GiB, rounded down: what TightLLM prints as GB."""
        return self.total_bytes // GIB


def paper_footprint(model: ModelSpec, n_seqs: int, n_tokens: int) -> Footprint:
    """FlexGen's formula for ``n_seqs`` sequences of ``n_tokens`` (papers.md section 7).

    weights ``2 (L (12 d^2 + 11 d) + V (d + 1))``, KV ``4 L d b s``, one layer of hidden states
    ``2 b s d``, in bytes. ``ValueError`` for a model whose shape is not built into it: it takes
    multi-head attention, an MLP of two matrices of width 4 d, and 16 bits.
    """
    _check(n_seqs, n_tokens)
    d, layers = model.d_model, model.n_layers
    fits = (
        model.n_kv_heads == model.n_heads
        and model.n_heads * model.head_dim == d
        and model.d_ffn == 4 * d
        and not (model.gated_ffn or model.n_experts or model.kv_latent_dim)
        and model.weight_bytes_per_elem == model.kv_bytes_per_elem == 2
    )
    if not fits:
        raise ValueError(
            f"model: {model.name} has not the shape that the paper's formula assumes "
            "(multi-head attention, a two-matrix MLP of width 4 d_model, 2 bytes)"
        )
    return Footprint(
        weight_bytes=2 * (layers * (12 * d * d + 11 * d) + model.vocab * (d + 1)),
        kv_bytes=4 * layers * d * n_seqs * n_tokens,
        hidden_bytes=2 * n_seqs * n_tokens * d,
    )


def exact_footprint(model: ModelSpec, n_seqs: int, n_tokens: int) -> Footprint:
    """The same three from the model's own shape, any architecture."""
    _check(n_seqs, n_tokens)
    return Footprint(
        weight_bytes=model.weight_bytes,
        kv_bytes=round(n_seqs * n_tokens * model.kv_bytes_per_token),
        hidden_bytes=n_seqs * n_tokens * model.d_model * ACT_BYTES_PER_ELEM,
    )


def _check(n_seqs: int, n_tokens: int) -> None:
    for name, value in (("n_seqs", n_seqs), ("n_tokens", n_tokens)):
        if value < 1:
            raise ValueError(f"{name}: {value} must be >= 1")
