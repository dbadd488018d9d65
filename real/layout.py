"""Layout of weights: which tensor lies where in a layer's blob, and which stay on the GPU.

What is streamed of a layer is one flat blob, so a slice is a byte range. Weights come first, then
biases, then norms, in the order in which a forward uses them: Q, K and V (and gate and up) are
neighbours and multiply as one matrix. What readers get wrong: where FlexGen's percentages keep
whole matrices on the GPU, the norm stays there too, and the blob carries filler in its place,
because the plan counts a layer's bytes in proportion.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass

from policies.placement import Placement, Shares
from policies.plan.op import Scope
from policies.spec.model import ModelSpec

Shape = tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Extent:
    """A tensor in a buffer: its first element and its shape."""

    offset: int
    shape: Shape

    @property
    def n_elems(self) -> int:
        """Number of elements."""
        return math.prod(self.shape)

    @property
    def end(self) -> int:
        """Element behind the last one."""
        return self.offset + self.n_elems


@dataclass(frozen=True, slots=True)
class Layout:
    """Tensors of one scope of a layer: in the streamed blob and in the resident buffer."""

    streamed: Mapping[str, Extent]
    resident: Mapping[str, Extent]

    @property
    def streamed_elems(self) -> int:
        """Elements of the blob, filler not counted."""
        return max((extent.end for extent in self.streamed.values()), default=0)

    @property
    def resident_elems(self) -> int:
        """Elements kept on the GPU."""
        return max((extent.end for extent in self.resident.values()), default=0)


def matrix_shapes(model: ModelSpec, scope: Scope) -> dict[str, tuple[Shape, bool]]:
    """Shape ``(out, in)`` of each linear layer of attention or MLP, and whether it has a bias."""
    d, kv = model.d_model, model.n_kv_heads * model.head_dim
    q = model.n_heads * model.head_dim
    if scope is Scope.ATTENTION:
        biased = model.linear_bias or model.qkv_bias
        inputs = {"q": ((q, d), biased), "k": ((kv, d), biased), "v": ((kv, d), biased)}
        return {**inputs, "out": ((d, q), model.linear_bias)}
    gate = {"gate": ((model.d_ffn, d), model.linear_bias)} if model.gated_ffn else {}
    up, down = (model.d_ffn, d), (d, model.d_ffn)
    return {**gate, "up": (up, model.linear_bias), "down": (down, model.linear_bias)}


def tensor_shapes(model: ModelSpec, scope: Scope) -> dict[str, Shape]:
    """All tensors of attention or MLP in blob order: weights, biases, norm."""
    matrices = matrix_shapes(model, scope)
    shapes: dict[str, Shape] = {f"{name}.weight": s for name, (s, _) in matrices.items()}
    shapes |= {f"{name}.bias": s[:1] for name, (s, biased) in matrices.items() if biased}
    norm = "attention_norm" if scope is Scope.ATTENTION else "mlp_norm"
    shapes[f"{norm}.weight"] = (model.d_model,)
    if model.norm_bias:
        shapes[f"{norm}.bias"] = (model.d_model,)
    return shapes


def edge_shapes(model: ModelSpec) -> dict[str, Shape]:
    """Tensors outside the layers."""
    shapes: dict[str, Shape] = {"embed.weight": (model.vocab, model.d_model)}
    if model.learned_positions:
        shapes["positions.weight"] = (model.learned_positions, model.d_model)
    shapes["final_norm.weight"] = (model.d_model,)
    if model.norm_bias:
        shapes["final_norm.bias"] = (model.d_model,)
    if not model.tied_embeddings:
        shapes["head.weight"] = (model.vocab, model.d_model)
    return shapes


def layout_of(model: ModelSpec, placement: Placement, layer: int, scope: Scope) -> Layout:
    """Layout of a layer, or of its attention or MLP.

    ``ValueError`` if the placement cuts a matrix between the GPU and the rest, or counts fewer
    bytes than the streamed tensors have.
    """
    streamed: dict[str, Extent] = {}
    resident: dict[str, Extent] = {}
    for part, shares in zip((Scope.ATTENTION, Scope.MLP), placement.weights[layer], strict=True):
        if scope not in (Scope.LAYER, part):
            continue
        kept = set(_resident_matrices(model, layer, part, shares))
        for name, shape in tensor_shapes(model, part).items():
            on_gpu = name.split(".")[0] in kept or ("norm" in name and bool(kept))
            target = resident if on_gpu else streamed
            offset = max((extent.end for extent in target.values()), default=0)
            target[name] = Extent(offset, shape)
    layout = Layout(streamed, resident)
    have = placement.streamed_bytes(model, layer, scope)
    need = layout.streamed_elems * model.weight_bytes_per_elem
    if have < need:
        raise ValueError(
            f"placement.weights[{layer}]: rounding its shares leaves {have} bytes to stream, the "
            f"tensors have {need:g}"
        )
    return layout


def _resident_matrices(model: ModelSpec, layer: int, part: Scope, shares: Shares) -> Iterator[str]:
    """Matrices on the GPU: the last ones, whose sizes sum to the GPU's share."""
    sizes = model.attention_matrices() if part is Scope.ATTENTION else model.mlp_matrices(layer)
    total = sum(sizes.values())
    left = shares.gpu * total
    for name in reversed(sizes):
        if left < 0.5:
            return
        if left < sizes[name] - 0.5:
            break
        left -= sizes[name]
        yield name
    if left >= 0.5:
        raise ValueError(
            f"placement.weights[{layer}]: a share {shares.gpu} of {part} on the GPU cuts a matrix; "
            "the engine keeps whole ones"
        )
