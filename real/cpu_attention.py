"""Decode attention where the KV lies, by all cores, in float32 (float64 if the model is).

Half precision is slow to multiply on most CPUs, so cached tokens are widened a chunk at a time into
a buffer that stays in the cores' caches, and each chunk is attended by torch's fused kernel. Chunks
(the new token is one more) are merged by their log-sum-exp ``l_c``: the result is
``sum_c exp(l_c - l) * out_c`` with ``l = logsumexp(l_c)``. What readers get wrong: this is bound by
memory, and widening all of the cache first would move five times its bytes.

Shapes as in ``real.model``; heads that share KV are more queries of one head.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

# Bytes of widened tokens per thread: about a core's part of the last cache.
_CHUNK_BYTES = 4 * 2**20
_MASKED = -1e30  # finite: a chunk of padding alone must not give NaN


def wide_dtype(dtype: torch.dtype) -> torch.dtype:
    """The dtype in which attention over KV of ``dtype`` is computed."""
    return torch.float64 if dtype is torch.float64 else torch.float32


def chunk_tokens(n_keys: int, row_elems: int, dtype: torch.dtype) -> int:
    """Cached tokens that are attended at a time; all of them where nothing is widened."""
    if dtype is wide_dtype(dtype):
        return n_keys
    room = _CHUNK_BYTES * int(torch.get_num_threads())
    return min(n_keys, max(1, room // (row_elems * int(wide_dtype(dtype).itemsize))))


def attend_on_cpu(
    qkv: Tensor, kv: Tensor, pad: Tensor | None, out: Tensor, n_heads: int, wide: Tensor
) -> None:
    """Attend with one new token of each sequence.

    ``qkv [S, (H + 2 G) * D]`` holds its projections, ``kv [K, S, 2, G, D]`` the cached tokens and
    ``pad [S]`` how many of them are padding; writes ``out [S, H * D]``. ``wide`` is a buffer for a
    chunk, flat.
    """
    n_keys, n_seqs, _, n_groups, head_dim = kv.shape
    dtype, scale = wide_dtype(qkv.dtype), 1.0 / math.sqrt(head_dim)
    split = [n_heads * head_dim, n_groups * head_dim, n_groups * head_dim]
    new_q, new_k, new_v = qkv.to(dtype).split(split, dim=-1)
    q = new_q.reshape(n_seqs, n_groups, -1, head_dim)  # [S, G, H/G, D]
    own_k = new_k.reshape(n_seqs, n_groups, head_dim, 1)
    own_v = new_v.reshape(n_seqs, n_groups, 1, head_dim)
    outs = [own_v.expand_as(q)]  # [S, G, H/G, D] each
    sums = [(q @ own_k).squeeze(-1).mul_(scale)]  # [S, G, H/G] each
    size = chunk_tokens(n_keys, kv[0].numel(), kv.dtype)
    last_pad = 0 if pad is None else int(pad.max())
    for start in range(0, n_keys, size):
        chunk = kv[start : start + size]  # [C, S, 2, G, D]
        if chunk.dtype is not dtype:
            chunk = wide[: chunk.numel()].view(chunk.shape).copy_(chunk)
        keys, values = (chunk[:, :, i].permute(1, 2, 0, 3) for i in (0, 1))  # [S, G, C, D]
        mask = None
        if pad is not None and start < last_pad:
            places = torch.arange(start, start + chunk.shape[0])  # [C]
            mask = torch.where(places < pad.unsqueeze(1), _MASKED, 0.0).to(dtype)[:, None, None]
        attended, total = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu(
            q, keys, values, 0.0, False, attn_mask=mask, scale=scale
        )
        outs.append(attended)
        sums.append(total)
    weights = torch.softmax(torch.stack(sums), dim=0)  # [1 + chunks, S, G, H/G]
    merged = torch.stack(outs).mul_(weights.unsqueeze(-1)).sum(dim=0)  # [S, G, H/G, D]
    out.copy_(merged.view(n_seqs, -1))
