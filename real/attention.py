"""Attention of the GPU over token-major KV: one fused kernel, or separate kernels.

The cache is ``[keys, sequences, 2, kv_heads, head_dim]``; kernels want ``[sequences, heads, keys,
head_dim]``, which is a permuted view with unit stride in ``head_dim``: nothing is copied. Queries
are the *last* T of the K tokens, so causality is aligned to the lower right. What readers get
wrong: a padded batch needs a mask, and a padded query must see at least itself, or its softmax is
NaN and spreads through the values that masked keys still contribute (0 * NaN).

Shapes as in ``real.model``.
"""

from __future__ import annotations

import math
from collections.abc import Callable

import torch
import torch.nn.functional as F  # noqa: N812
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel

Attend = Callable[[], Tensor]
MaskOf = Callable[[], Tensor]  # -> [S, T, K] bool, true where a query sees a key

_FLASH_DTYPES = (torch.float16, torch.bfloat16)


def padding_mask(pad: Tensor, n_queries: int, n_keys: int) -> Tensor:
    """Mask ``[S, T, K]`` of left-padded sequences: ``pad [S]`` keys in front are nobody's."""
    keys = torch.arange(n_keys, device=pad.device)  # [K]
    queries = keys[n_keys - n_queries :].unsqueeze(1)  # [T, 1], as positions among the keys
    real = keys >= pad.view(-1, 1, 1)  # [S, 1, K]
    return ((keys <= queries) & real) | (keys == queries)  # [S, T, K]


def fused(q: Tensor, kv: Tensor, mask_of: MaskOf | None, *, prefill: bool) -> Attend:
    """One kernel. ``q [T, S, H, D]``, ``kv [K, S, 2, G, D]``; the result is ``[T * S, H * D]``.

    cuDNN's kernel, torch's first choice on recent GPUs, is the fastest prefill, but it plans anew
    for every shape. Decode has a new shape every step, so it takes the flash kernel, whose causal
    flag is lower-right aligned.
    """
    n_queries, n_seqs, n_heads, head_dim = q.shape
    n_keys, gqa = kv.shape[0], kv.shape[3] != n_heads
    queries = q.permute(1, 2, 0, 3)  # [S, H, T, D]
    keys, values = (kv[:, :, i].permute(1, 2, 0, 3) for i in (0, 1))  # [S, G, K, D]

    if mask_of is not None:
        return lambda: _masked(queries, keys, values, mask_of())
    flash = q.is_cuda and q.dtype in _FLASH_DTYPES and head_dim % 8 == 0 and head_dim <= 256

    def attend() -> Tensor:
        if flash and not prefill:
            op = torch.ops.aten._scaled_dot_product_flash_attention
            out = op(queries, keys, values, 0.0, n_queries > 1)[0]  # [S, H, T, D]
        elif n_queries in (1, n_keys):
            causal = n_queries > 1
            out = F.scaled_dot_product_attention(
                queries, keys, values, is_causal=causal, enable_gqa=gqa
            )
        else:
            seen = torch.ones(n_queries, n_keys, dtype=torch.bool, device=q.device)
            seen = seen.tril(n_keys - n_queries)  # [T, K], lower-right causal
            out = F.scaled_dot_product_attention(
                queries, keys, values, attn_mask=seen, enable_gqa=gqa
            )
        return out.permute(2, 0, 1, 3).reshape(n_queries * n_seqs, n_heads * head_dim)

    return attend


def _masked(q: Tensor, k: Tensor, v: Tensor, mask: Tensor) -> Tensor:
    """Attention with a mask ``[S, T, K]``; heads that share KV become more queries."""
    n_seqs, n_heads, n_queries, head_dim = q.shape  # [S, H, T, D]
    n_groups = k.shape[1]
    shared = n_heads // n_groups
    grouped = q.reshape(n_seqs, n_groups, shared * n_queries, head_dim)  # [S, G, H/G * T, D]
    repeated = mask.repeat(1, shared, 1).unsqueeze(1)  # [S, 1, H/G * T, K]
    # Not cuDNN: it plans anew for every shape.
    with sdpa_kernel([SDPBackend.EFFICIENT_ATTENTION, SDPBackend.MATH]):
        out = F.scaled_dot_product_attention(grouped, k, v, attn_mask=repeated)
    out = out.reshape(n_seqs, n_heads, n_queries, head_dim)  # [S, H, T, D]
    return out.permute(2, 0, 1, 3).reshape(n_queries * n_seqs, n_heads * head_dim)


def unfused(q: Tensor, kv: Tensor, mask_of: MaskOf | None) -> Attend:
    """As FlexGen attends: transposed copies, batched GEMM, mask, softmax, batched GEMM."""
    n_queries, n_seqs, n_heads, head_dim = q.shape
    n_keys, n_groups = kv.shape[0], kv.shape[3]
    shared = n_heads // n_groups

    def attend() -> Tensor:
        queries = (q * (1.0 / math.sqrt(head_dim))).permute(1, 2, 0, 3)  # [S, H, T, D]
        queries = queries.reshape(-1, shared * n_queries, head_dim)  # [S * G, H/G * T, D]
        keys = kv[:, :, 0].permute(1, 2, 3, 0).reshape(-1, head_dim, n_keys)  # [S * G, D, K]
        values = kv[:, :, 1].permute(1, 2, 0, 3).reshape(-1, n_keys, head_dim)  # [S * G, K, D]
        scores = torch.bmm(queries, keys)  # [S * G, H/G * T, K]
        if mask_of is not None or n_queries > 1:
            seen = _causal(q, n_keys) if mask_of is None else mask_of()  # [1 or S, T, K]
            by_head = scores.view(n_seqs, n_heads, n_queries, n_keys)
            by_head.masked_fill_(~seen.unsqueeze(1), float("-inf"))
        weights = torch.softmax(scores, dim=-1)
        out = torch.bmm(weights, values)  # [S * G, H/G * T, D]
        out = out.view(n_seqs, n_heads, n_queries, head_dim)
        return out.permute(2, 0, 1, 3).reshape(n_queries * n_seqs, n_heads * head_dim)

    return attend


def _causal(q: Tensor, n_keys: int) -> Tensor:
    seen = torch.ones(q.shape[0], n_keys, dtype=torch.bool, device=q.device)
    return seen.tril(n_keys - q.shape[0]).unsqueeze(0)  # [1, T, K]
