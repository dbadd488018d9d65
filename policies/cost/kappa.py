"""The kappa analysis: when loading a cached prefix takes longer than computing the new tokens.

``extend(K, T)`` moves ``K * B_kv`` bytes and computes ``T * F_pfl`` FLOPs. It is transfer-bound
when ``kappa_ratio = K / T`` exceeds ``kappa_crit = (F_pfl / B_kv) * (BW / C)`` (arXiv 2601.19910,
eq. 6; papers.md 1.2). What readers get wrong: BW and C must be of the same thing, both of one GPU
or both of the whole tensor-parallel group, and C of the precision that runs. Every rate here is of
the group, as in ``HardwareProfile``.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Literal

from policies.cost.flops import attention_pair_flops, gemm_flops
from policies.plan.op import Scope
from policies.spec.model import ModelSpec

FlopCount = Literal["layers", "layers+head", "2N"]
ContextCount = Literal["exact", "kaplan", "kv-width"]


@dataclass(frozen=True, slots=True)
class Kappa:
    """One model on one machine: FLOPs and KV bytes per token, link and compute rates."""

    flops_per_token: float  # F_pfl
    kv_bytes_per_token: float  # B_kv
    bytes_per_s: float  # BW, host to GPU, one way
    flops_per_s: float  # C_eff

    def __post_init__(self) -> None:
        for name in ("flops_per_token", "kv_bytes_per_token", "bytes_per_s", "flops_per_s"):
            value = getattr(self, name)
            if not (math.isfinite(value) and value > 0):
                raise ValueError(f"{name}: {value} must be a finite number > 0")

    @property
    def kappa_model(self) -> float:
        """``kappa_M = F_pfl / B_kv`` in FLOP/B; the paper's Table 1 prints millions."""
        return self.flops_per_token / self.kv_bytes_per_token

    @property
    def kappa_hardware(self) -> float:
        """``kappa_HW = BW / C_eff`` in B/FLOP; the paper's Table 2 prints millionths."""
        return self.bytes_per_s / self.flops_per_s

    @property
    def kappa_crit(self) -> float:
        """``kappa_M * kappa_HW``: the K / T beyond which loading takes longer than computing."""
        return self.kappa_model * self.kappa_hardware

    @property
    def load_tokens_per_s(self) -> float:
        """Cached tokens that arrive per second: ``BW / B_kv``."""
        return self.bytes_per_s / self.kv_bytes_per_token

    @property
    def compute_tokens_per_s(self) -> float:
        """Tokens prefilled per second: ``C / F_pfl``."""
        return self.flops_per_s / self.flops_per_token

    @property
    def ridge_flops_per_byte(self) -> float:
        """Arithmetic intensity at which load and compute take the same time: ``C / BW``."""
        return self.flops_per_s / self.bytes_per_s

    def arithmetic_intensity(self, n_cached: float, n_new: float) -> float:
        """``T * F_pfl / (K * B_kv)`` in FLOP/B; infinite where nothing is loaded."""
        if n_cached == 0:
            return math.inf
        return n_new * self.flops_per_token / (n_cached * self.kv_bytes_per_token)

    def load_s(self, n_cached: float) -> float:
        """``t_PCIe = K * B_kv / BW``."""
        return n_cached / self.load_tokens_per_s

    def compute_s(self, n_new: float, floor_s: float = 0.0) -> float:
        """``t_GPU = max(floor, T * F_pfl / C)``; measured times have such a floor."""
        return max(floor_s, n_new / self.compute_tokens_per_s)

    def ttft_s(self, n_cached: float, n_new: float, *, overlap: bool = False) -> float:
        """Time to the first token of a request alone: the sum, or the longer with overlap."""
        load, compute = self.load_s(n_cached), self.compute_s(n_new)
        return max(load, compute) if overlap else load + compute

    def transfer_overhead(self, n_cached: float, n_new: float, floor_s: float = 0.0) -> float:
        """``POH = t_PCIe / t_GPU``; ``kappa_ratio / kappa_crit`` where there is no floor."""
        return self.load_s(n_cached) / self.compute_s(n_new, floor_s)

    def balanced_s(self, n_cached: float, n_new: float) -> float:
        """Load or compute total when just as much is recomputed that both are equal.

        ``(K + T) / (BW / B_kv + C / F_pfl)``: every token is either loaded or computed and both
        sides work all the time. Holds from ``K = kappa_crit * T`` on.
        """
        return (n_cached + n_new) / (self.load_tokens_per_s + self.compute_tokens_per_s)

    @property
    def recompute_gain_bound(self) -> float:
        """Most that recompute can take off the time with overlap: ``1 / (1 + kappa_crit)``.

        ``1 - balanced_s / load_s(K)`` tends to this from below as K / T grows.
        """
        return 1.0 / (1.0 + self.kappa_crit)


@dataclass(frozen=True, slots=True)
class Advice:
    """Whether recompute is worth its trouble: the bound on its gain and a sentence that says so."""

    gain_bound: float
    load_all: bool
    text: str


def advise(kappa: Kappa, worth: float = 0.1) -> Advice:
    """Load all unless recompute may shorten the time by the share ``worth``.

    At a healthy link a GQA model has kappa_crit well above 10, so the gain stays below a few per
    cent; a decision that little is lost in the noise of the rates that it is taken with.
    """
    if not 0.0 < worth < 1.0:
        raise ValueError(f"worth: {worth} must be in (0, 1)")
    bound = kappa.recompute_gain_bound
    load_all = bound < worth
    verdict = "load all" if load_all else "recompute a part (adaptive) where K/T > kappa_crit"
    text = f"recompute can shorten a load by at most {bound:.1%}: {verdict}"
    return Advice(bound, load_all, text)


def kappa_of(
    model: ModelSpec,
    bytes_per_s: float,
    flops_per_s: float,
    *,
    count: FlopCount = "layers",
    context: ContextCount | None = None,
    n_ctx: float = 0.0,
    kv_bytes_per_token: float | None = None,
) -> Kappa:
    """Kappa of a model for the rates of one group.

    ``context`` adds the attention FLOPs of one token over ``n_ctx`` cached ones; the paper leaves
    them out. ``kv_bytes_per_token`` replaces the model's, as a quantised or latent cache would.
    """
    flops = prefill_flops_per_token(model, count)
    if context is not None:
        flops += context_flops_per_token(model, n_ctx, context)
    kv = model.kv_bytes_per_token if kv_bytes_per_token is None else kv_bytes_per_token
    return Kappa(flops, kv, bytes_per_s, flops_per_s)


def prefill_flops_per_token(model: ModelSpec, count: FlopCount = "layers") -> float:
    """F_pfl without context.

    ``layers``: the multiplications of all layers, the same layers that B_kv counts; ``layers+head``
    adds the LM head; ``2N``: twice the active parameters, embeddings included (the paper's).
    """
    if count == "2N":
        return 2.0 * model.n_params_active
    layers = sum(gemm_flops(model, i, Scope.LAYER, 1) for i in range(model.n_layers))
    if count == "layers":
        return float(layers)
    if count == "layers+head":
        return float(layers + gemm_flops(model, 0, Scope.HEAD, 1))
    raise ValueError(f"count: {count!r} is none of 'layers', 'layers+head', '2N'")


def context_flops_per_token(model: ModelSpec, n_ctx: float, count: ContextCount = "exact") -> float:
    """Attention FLOPs of one token over ``n_ctx`` tokens, all layers.

    ``exact``: QK^T and AV of all query heads. ``kaplan``: ``2 L n_ctx d_attn``, QK^T only.
    ``kv-width``: the same with the width of the KV heads; only that reading makes the term the
    "10 % at 65K" of the paper (papers.md 1.6 item 9).
    """
    if n_ctx < 0:
        raise ValueError(f"n_ctx: {n_ctx} must be >= 0")
    if count == "exact":
        return model.n_layers * n_ctx * attention_pair_flops(model, 1)
    if count == "kaplan":
        return 2.0 * model.n_layers * n_ctx * model.n_heads * model.qk_dim
    if count == "kv-width":
        return 2.0 * model.n_layers * n_ctx * model.n_kv_heads * model.qk_dim
    raise ValueError(f"count: {count!r} is none of 'exact', 'kaplan', 'kv-width'")


def transfer_share(overhead: float) -> float:
    """Share of a request's time on the link, without overlap: ``POH / (1 + POH)``."""
    if overhead < 0:
        raise ValueError(f"overhead: {overhead} must be >= 0")
    return 1.0 if math.isinf(overhead) else overhead / (1.0 + overhead)


def concurrent_requests(capacity_tokens: float, n_cached: float, n_new: float) -> float:
    """Requests whose K + T tokens fit in GPU memory at once: ``capacity / (K + T)``."""
    if capacity_tokens < 0:
        raise ValueError(f"capacity_tokens: {capacity_tokens} must be >= 0")
    if not n_cached + n_new > 0:
        raise ValueError(f"n_cached + n_new: {n_cached + n_new} must be > 0")
    return capacity_tokens / (n_cached + n_new)


def scheduled_tokens(
    budget_tokens: float, capacity_tokens: float, n_cached: float, n_new: float
) -> float:
    """New tokens in an iteration of like requests: ``min(budget, T * capacity / (K + T))``."""
    return min(budget_tokens, n_new * concurrent_requests(capacity_tokens, n_cached, n_new))
