"""A decoder in plain numpy: no cache, no batch, no padding; float64. It shares no code with real.

Whole sequences go through whole layers, every token attends to all before it, and rotary angles are
complex rotations. Weights are looked up by the engine's tensor names.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np
import numpy.typing as npt

from policies.spec.model import ModelSpec

Array = npt.NDArray[np.float64]
Lookup = Callable[[str, int | None], Array]

_EPS = 1e-5
_THETA = 10000.0


def plain_logits(model: ModelSpec, weights: Lookup, ids: Sequence[int]) -> Array:
    """Logits ``[tokens, vocab]`` of one sequence."""
    n = len(ids)
    x = weights("embed.weight", None)[list(ids)]
    if model.learned_positions:
        x = x + weights("positions.weight", None)[2 : 2 + n]
    for layer in range(model.n_layers):
        normed = _norm(model, weights, "attention_norm", layer, x)
        x = x + _attention(model, weights, layer, normed)
        normed = _norm(model, weights, "mlp_norm", layer, x)
        x = x + _mlp(model, weights, layer, normed)
    x = _norm(model, weights, "final_norm", None, x)
    head = "embed.weight" if model.tied_embeddings else "head.weight"
    return x @ weights(head, None).T


def plain_greedy(
    model: ModelSpec, weights: Lookup, prompt: Sequence[int], n_new: int
) -> tuple[list[int], Array]:
    """Greedy tokens and the logits ``[n_new, vocab]`` that each was taken from."""
    ids = list(prompt)
    rows = []
    for _ in range(n_new):
        rows.append(plain_logits(model, weights, ids)[-1])
        ids.append(int(rows[-1].argmax()))
    return ids[len(prompt) :], np.array(rows)


def _norm(model: ModelSpec, weights: Lookup, name: str, layer: int | None, x: Array) -> Array:
    weight = weights(f"{name}.weight", layer)
    if model.norm_bias:
        centred = x - x.mean(axis=-1, keepdims=True)
        scale = np.sqrt((centred**2).mean(axis=-1, keepdims=True) + _EPS)
        return centred / scale * weight + weights(f"{name}.bias", layer)
    return x / np.sqrt((x**2).mean(axis=-1, keepdims=True) + _EPS) * weight


def _linear(weights: Lookup, name: str, layer: int, x: Array, *, bias: bool) -> Array:
    y = x @ weights(f"{name}.weight", layer).T
    return y + weights(f"{name}.bias", layer) if bias else y


def _attention(model: ModelSpec, weights: Lookup, layer: int, x: Array) -> Array:
    biased = model.linear_bias or model.qkv_bias
    n, d = len(x), model.head_dim
    q = _linear(weights, "q", layer, x, bias=biased).reshape(n, model.n_heads, d)
    k = _linear(weights, "k", layer, x, bias=biased).reshape(n, model.n_kv_heads, d)
    v = _linear(weights, "v", layer, x, bias=biased).reshape(n, model.n_kv_heads, d)
    if not model.learned_positions:
        q, k = _rotary(q), _rotary(k)
    out = np.empty((n, model.n_heads, d))
    for head in range(model.n_heads):
        group = head // (model.n_heads // model.n_kv_heads)
        for i in range(n):
            scores = k[: i + 1, group] @ q[i, head] / np.sqrt(d)
            p = np.exp(scores - scores.max())
            out[i, head] = (p / p.sum()) @ v[: i + 1, group]
    return _linear(weights, "out", layer, out.reshape(n, -1), bias=model.linear_bias)


def _rotary(x: Array) -> Array:
    n, _, d = x.shape
    angle = np.outer(np.arange(n), _THETA ** (-np.arange(0, d, 2) / d))
    turned = (x[..., : d // 2] + 1j * x[..., d // 2 :]) * np.exp(1j * angle)[:, None, :]
    return np.concatenate([turned.real, turned.imag], axis=-1)


def _mlp(model: ModelSpec, weights: Lookup, layer: int, x: Array) -> Array:
    up = _linear(weights, "up", layer, x, bias=model.linear_bias)
    if model.gated_ffn:
        gate = _linear(weights, "gate", layer, x, bias=model.linear_bias)
        inner = gate / (1 + np.exp(-gate)) * up
    else:
        inner = np.maximum(up, 0.0)
    return _linear(weights, "down", layer, inner, bias=model.linear_bias)
