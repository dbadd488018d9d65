"""Where recomputing a token costs as much as loading its KV: closed forms for constant rates.

Both answer how many of the cached tokens to recompute while the others load. They hold when load
and compute overlap fully, every batch is the same, rates do not depend on the number of tokens,
and weights are resident; outside that it takes the integer program of ``policies.ilp``. What
readers get wrong is the size of the effect: recomputing runs a token through the *whole* layer,
so at healthy link rates only a few per cent of the cache are worth it, and with grouped-query
attention, whose KV is small, next to nothing.
"""

from __future__ import annotations

import math


def n_recompute_closed_form(n_cached: int, n_new: int, kappa_crit: float) -> float:
    """Recomputed tokens N at which the request leaves the transfer-bound regime.

    ``(K - N) / (T + N) = kappa_crit`` gives ``N = (K - kappa_crit * T) / (1 + kappa_crit)`` for K
    cached and T new tokens. The optimum of a request that is compute-bound already
    (``K / T <= kappa_crit``) is its lower end, 0; N never exceeds K. Real-valued: the best integer
    is one of the two beside it. Sources: arXiv 2601.19910 for kappa_crit, TightLLM for N.
    """
    _check("n_cached", n_cached, n_cached >= 0, ">= 0")
    _check("n_new", n_new, n_new >= 0, ">= 0")
    _check("kappa_crit", kappa_crit, kappa_crit >= 0, ">= 0")
    return max(0.0, (n_cached - kappa_crit * n_new) / (1.0 + kappa_crit))


def balanced_recompute_share(
    n_ctx: int,
    flops_per_token: float,
    attention_flops_per_pair: float,
    kv_bytes_per_token: float,
    flops_per_s: float,
    bytes_per_s: float,
) -> float:
    """Share f = r / n_ctx of the cached tokens at which recompute takes as long as the load.

        r * (a + e * (n_ctx + r)) / flops_per_s = (n_ctx - r) * kv_bytes_per_token / bytes_per_s

    All quantities are of one layer and one sequence; the new token is left out. ``a`` is
    ``flops_per_token``, the linear layers (24 d^2 for multi-head attention and an MLP of 4 d), and
    ``e`` is ``attention_flops_per_pair``. The TightLLM paper counts e = 2 d, the scores without
    the values, and n_ctx + r keys for every recomputed token, without the causal mean (papers.md
    2.3); that reading gives the table of papers.md 2.5. e = 0 leaves attention out.
    """
    _check("n_ctx", n_ctx, n_ctx >= 1, ">= 1")
    _check("flops_per_token", flops_per_token, flops_per_token > 0, "> 0")
    _check("attention_flops_per_pair", attention_flops_per_pair, attention_flops_per_pair >= 0)
    _check("kv_bytes_per_token", kv_bytes_per_token, kv_bytes_per_token >= 0)
    _check("flops_per_s", flops_per_s, flops_per_s > 0, "> 0")
    _check("bytes_per_s", bytes_per_s, bytes_per_s > 0, "> 0")
    # q f^2 + (a + q + load) f - load = 0 with every term in FLOPs per token; the root in [0, 1],
    # in the form that does not cancel when q is small.
    load = kv_bytes_per_token / bytes_per_s * flops_per_s
    q = attention_flops_per_pair * n_ctx
    linear = flops_per_token + q + load
    return 2.0 * load / (linear + math.sqrt(linear * linear + 4.0 * q * load))


def _check(name: str, value: float, allowed: bool, domain: str = ">= 0") -> None:
    if not (allowed and math.isfinite(value)):
        raise ValueError(f"{name}: {value} must be a finite number {domain}")
