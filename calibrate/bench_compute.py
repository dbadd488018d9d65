"""Kernels: GEMM by rows, attention in the engine's KV layout, norms, rotations, launch and sync.

Attention is the engine's own, over token-major KV ``[token, batch, 2, head, dim]``: which kernel
runs depends on how it is asked for. What readers get wrong is timing on zeros or on operands that a
cache holds: the first draws less power, the second never touches memory, and both are too fast.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from calibrate.bench import Bench, rotation
from calibrate.grid import UNFUSED, kv_bytes

if TYPE_CHECKING:
    from torch import Tensor

HEAVY_ROWS = 512  # from here on GEMMs keep a GPU at its power limit


def gemm(bench: Bench, x: Mapping[str, float], rotate_bytes: int) -> list[float]:
    """Seconds of one linear layer: ``rows`` tokens times ``k`` by ``n`` weights."""
    from torch.nn.functional import linear

    rows, k, n = int(x["rows"]), int(x["k"]), int(x["n"])
    copies = rotation(k * n * x["elem_bytes"], rotate_bytes)
    weights = [bench.random(n, k) for _ in range(copies)]  # [n, k] each
    tokens = bench.random(rows, k)
    return bench.kernel(lambda i: linear(tokens, weights[i % copies]), heat=rows >= HEAVY_ROWS)


def attention(bench: Bench, group: str, x: Mapping[str, float], rotate_bytes: int) -> list[float]:
    """Seconds of one attention call; the last ``queries`` of ``keys`` tokens attend."""
    import torch

    from real.attention import fused, unfused

    batch, queries, keys = int(x["batch"]), int(x["queries"]), int(x["keys"])
    heads, kv_heads, dim = int(x["n_heads"]), int(x["n_kv_heads"]), int(x["head_dim"])
    copies = rotation(kv_bytes(x), rotate_bytes)
    cached = [bench.random(keys, batch, 2, kv_heads, dim) for _ in range(copies)]
    q = bench.random(queries, batch, heads, dim)
    if group in UNFUSED:
        attend = [unfused(q, kv, None) for kv in cached]
    else:
        prefill = group == "attention_prefill"
        attend = [fused(q, kv, None, prefill=prefill) for kv in cached]
    with torch.inference_mode():
        # Where there are many queries there are large GEMMs around their attention.
        take = bench.amid_gemms if queries * batch >= HEAVY_ROWS else bench.kernel
        return take(lambda i: attend[i % copies]())


def _keys_values(kv: Tensor) -> tuple[Tensor, Tensor]:
    """Views ``[batch, head, token, dim]`` of a token-major cache."""
    by_head = kv.permute(2, 1, 3, 0, 4)  # [2, batch, head, token, dim]
    return by_head[0], by_head[1]


def norm(bench: Bench, group: str, x: Mapping[str, float]) -> list[float]:
    """Seconds of one norm of ``rows`` hidden states."""
    from real.model import Norm, normed

    rows, d = int(x["rows"]), int(x["d_model"])
    hidden = bench.random(rows, d)
    weights = Norm(bench.random(d), bench.random(d) if group == "layer_norm" else None)
    return bench.amid_gemms(lambda _: normed(hidden, weights, 1e-5))


def rotary(bench: Bench, x: Mapping[str, float]) -> list[float]:
    """Seconds in which the keys of ``rows`` tokens are rotated where they lie."""
    from real.model import rotate

    rows, heads, dim = int(x["rows"]), int(x["n_heads"]), int(x["head_dim"])
    cached = bench.random(rows, 1, 2, heads, dim)  # [T, S, 2, G, D]
    angles = 100.0 * bench.random(rows, 1, 1, dim // 2)
    cos, sin = angles.cos(), angles.sin()  # of real angles: others would fade the keys to zeros
    return bench.amid_gemms(lambda _: rotate(cached[:, :, 0], cos, sin))


def elementwise(bench: Bench, x: Mapping[str, float]) -> list[float]:
    """Seconds of a gated layer's elementwise passes: norms, additions, activation, product."""
    from torch.nn.functional import silu

    from real.model import Norm, normed

    rows, d, ffn = int(x["rows"]), int(x["d_model"]), int(x["d_ffn"])
    hidden, update = bench.random(rows, d), 0.01 * bench.random(rows, d)
    gate, up, weights = bench.random(rows, ffn), bench.random(rows, ffn), bench.random(d)

    def call(_: int) -> None:
        for _ in range(2):
            normed(hidden, Norm(weights, weights), 1e-5)
            hidden.add_(update)
        silu(gate).mul_(up)  # in place, call after call, the gate would fade to zeros

    return bench.amid_gemms(call)


def launch(bench: Bench) -> list[float]:
    """Host seconds to issue one small linear layer."""
    from torch.nn.functional import linear

    size = 256 if bench.is_cuda else 16
    weight, tokens = bench.random(size, size), bench.random(1, size)
    return bench.issue(lambda _: linear(tokens, weight))


def sync(bench: Bench) -> list[float]:
    """Host seconds of a tiny addition and a synchronisation of the device."""
    value = bench.random(16)
    return bench.round_trip(lambda _: value.mul_(1.0))


def cpu_attention(bench: Bench, x: Mapping[str, float], rotate_bytes: int) -> list[float]:
    """Seconds of decode attention on the CPU over a cache in host memory, in float32."""
    import torch
    from torch.nn.functional import scaled_dot_product_attention as sdpa

    batch, keys = int(x["batch"]), int(x["keys"])
    heads, kv_heads, dim = int(x["n_heads"]), int(x["n_kv_heads"]), int(x["head_dim"])
    copies = rotation(kv_bytes(x), rotate_bytes)
    # Drawn in float32: half-precision normal numbers are slow to draw on a CPU.
    cached = [torch.randn(keys, batch, 2, kv_heads, dim).to(bench.dtype) for _ in range(copies)]
    q = torch.randn(batch, heads, 1, dim)  # [batch, head, query, dim]
    how: dict[str, Any] = {"enable_gqa": True} if heads != kv_heads else {}

    def call(i: int) -> object:
        k, v = _keys_values(cached[i % copies].float())
        return sdpa(q, k, v, **how)

    with torch.no_grad():
        return bench.blocking(call)
