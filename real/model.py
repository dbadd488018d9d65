"""The decoder: OPT and Llama as one forward over weight and KV views that somebody else owns.

Everything is token-major: hidden states are ``[tokens, sequences, d_model]``, and the KV of a batch
in a layer is ``[tokens, sequences, 2, kv_heads, head_dim]``. So the GEMM that projects keys and
values writes straight to the place behind the cached tokens, and no KV is ever moved on the GPU.
What readers get wrong: K and V are one GEMM, Q is another. Merging all three would save a launch
and cost a copy of every new key and value; and loaded layer inputs need no Q.

Shapes: T tokens computed, S sequences, K keys, H heads, G KV heads, D head_dim, F ffn, d d_model.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import NamedTuple

import torch
import torch.nn.functional as F  # noqa: N812  # the name that torch's own documentation uses
from torch import Tensor

from policies.spec.model import ModelSpec
from real.architecture import Numerics


class Chunk(NamedTuple):
    """Rows of a linear layer that lie together: ``y[:, start:stop] = x @ weight_t + bias``."""

    weight_t: Tensor  # [in, out]
    bias: Tensor | None  # [out]
    start: int
    stop: int


Linear = tuple[Chunk, ...]


class Norm(NamedTuple):
    """Weights of a norm; a bias makes it LayerNorm."""

    weight: Tensor  # [d]
    bias: Tensor | None  # [d]


class AttentionWeights(NamedTuple):
    """Views of a layer's attention weights."""

    norm: Norm
    q: Linear
    kv: Linear
    out: Linear


class MlpWeights(NamedTuple):
    """Views of a layer's MLP weights; no ``gate`` where the MLP has none."""

    norm: Norm
    gate: Linear | None
    up: Linear
    down: Linear


class EdgeWeights(NamedTuple):
    """Weights outside the layers, always on the GPU."""

    embed: Tensor  # [vocab, d]
    positions: Tensor | None  # [positions, d]
    norm: Norm
    head_t: Tensor  # [d, vocab]


@dataclass(slots=True)
class Rotation:
    """Rotary cosines and sines of the tokens in hand, ``[T, 1 or S, 1, D / 2]``."""

    cos: Tensor | None = None
    sin: Tensor | None = None


class NewKeys(NamedTuple):
    """Neighbouring tokens whose keys and values are made."""

    rows: slice  # of the hidden states or inputs of these tokens
    kv: Tensor  # [T * S, 2 * G * D], where they belong among the cached ones
    rotation: Rotation
    q: Tensor | None = None  # [T * S, H * D], of tokens that attend


class Attended(NamedTuple):
    """Tokens that attend to one set of keys."""

    hidden: Tensor  # [T * S, d]
    attend: Callable[[], Tensor]  # -> [T * S, H * D]


@dataclass(frozen=True, slots=True)
class AttentionCall:
    """Buffers of one attention: all views, made before the run.

    ``keys`` are those of ``hidden``; ``projected`` are made of the loaded layer inputs ``inputs``.
    """

    hidden: Tensor  # [T * S, d]
    q: Tensor  # [T * S, H * D]
    keys: tuple[NewKeys, ...]
    attended: tuple[Attended, ...]
    inputs: Tensor | None = None  # [P * S, d]
    projected: tuple[NewKeys, ...] = ()


class Decoder:
    """The forward of each scope; stateless but for constants."""

    def __init__(self, model: ModelSpec, numerics: Numerics, edge: EdgeWeights) -> None:
        self.model, self.edge = model, edge
        self._eps = numerics.norm_eps

    # ---- scopes ---------------------------------------------------------------------------

    def project(self, w: AttentionWeights, c: AttentionCall) -> None:
        """Norm and Q, K, V of the tokens in hand, K and V of loaded inputs; keys and values land
        where they stay.
        """
        if c.inputs is not None:
            self._make_keys(normed(c.inputs, w.norm, self._eps), w.kv, c.projected)
        x = normed(c.hidden, w.norm, self._eps)  # [T * S, d]
        _linear(x, w.q, c.q)
        self._make_keys(x, w.kv, c.keys)

    def output(self, w: AttentionWeights, hidden: Tensor, attended: Tensor) -> None:
        """Output projection of ``attended [T * S, H * D]``, added to ``hidden [T * S, d]``."""
        _linear_add(attended, w.out, hidden)

    def attention(self, w: AttentionWeights, c: AttentionCall) -> None:
        """Attention with its norm and residual."""
        self.project(w, c)
        for hidden, attend in c.attended:
            self.output(w, hidden, attend())

    def mlp(self, w: MlpWeights, hidden: Tensor, inner: Tensor) -> None:
        """MLP of ``hidden [T * S, d]`` with its norm and residual; ``inner [1 or 2, T * S, F]``.

        Gate and up are two GEMMs: side by side in one result they would be strided, and elementwise
        kernels take three times as long over those.
        """
        x = normed(hidden, w.norm, self._eps)  # [T * S, d]
        if w.gate is not None:
            _linear(x, w.gate, inner[0])  # [T * S, F]
            _linear(x, w.up, inner[1])
            gate = F.silu(inner[0], inplace=True).mul_(inner[1])
        else:
            gate = _linear_relu(x, w.up, inner[0])  # [T * S, F]
        del x  # its memory serves what follows
        _linear_add(gate, w.down, hidden)

    def head(self, last: Tensor, logits: Tensor, tokens: Tensor) -> None:
        """Greedy token of each sequence from the hidden state of its last token.

        ``last [S, d]``, ``logits [S, vocab]`` (written), ``tokens [S]`` (written).
        """
        x = normed(last, self.edge.norm, self._eps)  # [S, d]
        torch.mm(x, self.edge.head_t, out=logits)
        torch.argmax(logits, dim=-1, out=tokens)

    def embed(self, ids: Tensor, positions: Tensor | None, hidden: Tensor) -> None:
        """Embed ``ids [T * S]`` into ``hidden [T * S, d]``.

        ``positions`` holds rows of the position table: ``[T, 1, d]``, or ``[T * S, d]`` where
        sequences differ.
        """
        torch.index_select(self.edge.embed, 0, ids, out=hidden)
        if positions is not None and positions.dim() == 3:
            hidden = hidden.view(positions.shape[0], -1, hidden.shape[-1])  # [T, S, d]
        if positions is not None:
            hidden.add_(positions)

    # ---- parts ----------------------------------------------------------------------------

    def _make_keys(self, x: Tensor, layer: Linear, made: tuple[NewKeys, ...]) -> None:
        """Keys and values of normed ``x [rows, d]``, one GEMM for neighbouring tokens; rotated."""
        spec = self.model
        for rows, kv, rotation, q in made:
            _linear(x[rows], layer, kv)
            cos, sin = rotation.cos, rotation.sin
            if cos is None or sin is None:
                continue
            shape = (cos.shape[0], -1)
            if q is not None:
                rotate(q.view(*shape, spec.n_heads, spec.head_dim), cos, sin)  # [T, S, H, D]
            by_head = kv.view(*shape, 2, spec.n_kv_heads, spec.head_dim)  # [T, S, 2, G, D]
            rotate(by_head[:, :, 0], cos, sin)  # keys only


def normed(x: Tensor, norm: Norm, eps: float) -> Tensor:
    """LayerNorm or RMSNorm over the last axis; the result is new memory."""
    shape = (x.shape[-1],)
    if norm.bias is not None:
        return F.layer_norm(x, shape, norm.weight, norm.bias, eps)
    return F.rms_norm(x, shape, norm.weight, eps)


def rotate(x: Tensor, cos: Tensor, sin: Tensor) -> None:
    """Rotate the two halves of each head of ``x [T, S, heads, D]`` in place."""
    half = x.shape[-1] // 2
    first, second = x[..., :half], x[..., half:]  # [T, S, heads, D / 2]
    rotated = first * cos
    rotated.addcmul_(second, sin, value=-1)
    second.mul_(cos).addcmul_(first, sin)
    first.copy_(rotated)


def _linear(x: Tensor, layer: Linear, out: Tensor) -> None:
    """``x [rows, in]`` through a linear layer into ``out [rows, out]``."""
    for weight_t, bias, start, stop in layer:
        y = out if len(layer) == 1 else out[:, start:stop]
        if bias is None:
            torch.mm(x, weight_t, out=y)
        else:
            torch.addmm(bias, x, weight_t, out=y)


def _linear_relu(x: Tensor, layer: Linear, out: Tensor) -> Tensor:
    """``_linear`` and ReLU; in one kernel where the layer is one piece."""
    if len(layer) == 1 and layer[0].bias is not None:
        return torch._addmm_activation(layer[0].bias, x, layer[0].weight_t, out=out)
    _linear(x, layer, out)
    return out.relu_()


def _linear_add(x: Tensor, layer: Linear, out: Tensor) -> None:
    """Add a linear layer of ``x [rows, in]`` to ``out [rows, out]`` in place.

    With a bias the product is new memory: the GEMM adds the bias on its way out, and the addition
    of two whole tensors takes half as long as that of a row to each of many.
    """
    for weight_t, bias, start, stop in layer:
        y = out if len(layer) == 1 else out[:, start:stop]
        if bias is None:
            y.addmm_(x, weight_t)
        else:
            y.add_(torch.addmm(bias, x, weight_t))
