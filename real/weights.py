"""Weights in their homes, and the views that a forward multiplies with.

Every tensor is written once, chunk by chunk, into the place where it stays: the host arena, the
disk, or the GPU. What readers get wrong: views into a GPU weight slot are made per slot and layout,
not per layer, because a slot holds one layer after another at the same addresses.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Protocol

import torch
from torch import Tensor

from policies.plan.op import Scope
from real.disk import DiskStore
from real.geometry import Blob, Geometry
from real.layout import Extent, Layout, Shape, edge_shapes, layout_of, matrix_shapes
from real.model import AttentionWeights, Chunk, EdgeWeights, Linear, MlpWeights, Norm

Flat = Mapping[str, tuple[Tensor, Extent]]  # tensor name -> flat buffer, place in it


class Source(Protocol):
    """Where weights come from."""

    def chunks(self, name: str, layer: int | None, shape: Shape) -> Iterator[Tensor]:
        """A tensor's elements in order, flat, in the run's dtype."""
        ...


def region(layer: int, scope: Scope) -> str:
    """Name of a blob's part on disk."""
    return f"weights/l{layer}/{scope.value}"


@dataclass(slots=True)
class WeightHomes:
    """All weights of a run: layouts, blobs in host memory and on disk, resident buffers."""

    geometry: Geometry
    streamed: set[tuple[int, Scope]]
    layouts: dict[tuple[int, Scope], Layout] = field(default_factory=dict)
    blobs: dict[tuple[int, Scope], Blob] = field(default_factory=dict)
    host: dict[tuple[int, Scope], Tensor] = field(default_factory=dict)
    resident: dict[tuple[int, Scope], Tensor] = field(default_factory=dict)
    _shared: dict[object, Layout] = field(default_factory=dict)

    def __post_init__(self) -> None:
        for layer in range(self.geometry.model.n_layers):
            whole = (layer, Scope.LAYER) in self.streamed
            for scope in (Scope.LAYER,) if whole else (Scope.ATTENTION, Scope.MLP):
                self.layouts[layer, scope] = self._layout(layer, scope)
                if (layer, scope) in self.streamed:
                    self.blobs[layer, scope] = self.geometry.blob(layer, scope)
                elif self.layouts[layer, scope].streamed:
                    raise ValueError(
                        f"plan: {scope} of layer {layer} is not on the GPU and is never loaded"
                    )

    def _layout(self, layer: int, scope: Scope) -> Layout:
        placement = self.geometry.placement
        key = (placement.weights[layer], scope)  # all layers of a dense model have one shape
        if key not in self._shared:
            self._shared[key] = layout_of(self.geometry.model, placement, layer, scope)
        return self._shared[key]

    def scope_of(self, layer: int, part: Scope) -> Scope:
        """The scope whose layout holds attention or MLP of a layer."""
        return Scope.LAYER if (layer, Scope.LAYER) in self.layouts else part

    def host_sizes(self) -> dict[tuple[int, Scope], int]:
        """Host bytes of every blob."""
        return {key: blob.host for key, blob in self.blobs.items() if blob.host}

    def disk_sizes(self) -> dict[str, int]:
        """Disk bytes of every blob, by region."""
        return {region(*key): blob.disk for key, blob in self.blobs.items() if blob.disk}

    def resident_bytes(self) -> int:
        """GPU bytes of resident weights."""
        elems = sum(layout.resident_elems for layout in self.layouts.values())
        return elems * self.geometry.elem_bytes

    def allocate_resident(self, device: torch.device) -> None:
        """Make the GPU buffers of resident weights."""
        for key, layout in self.layouts.items():
            if layout.resident_elems:
                self.resident[key] = torch.empty(
                    layout.resident_elems, dtype=self.geometry.dtype, device=device
                )

    def fill(self, source: Source, disk: DiskStore | None) -> None:
        """Write every tensor of every layer into its home."""
        elem = self.geometry.elem_bytes
        for (layer, scope), layout in self.layouts.items():
            for name, extent in layout.resident.items():
                at = extent.offset
                for chunk in source.chunks(name, layer, extent.shape):
                    self.resident[layer, scope][at : at + chunk.numel()].copy_(chunk)
                    at += chunk.numel()
            for name, extent in layout.streamed.items():
                at = extent.offset * elem
                for chunk in source.chunks(name, layer, extent.shape):
                    self._write((layer, scope), at, chunk.view(torch.uint8), disk)
                    at += chunk.numel() * elem

    def _write(self, key: tuple[int, Scope], at: int, data: Tensor, disk: DiskStore | None) -> None:
        """Write bytes of a blob from byte ``at`` on: disk first, then host memory."""
        on_disk = max(0, min(data.numel(), self.blobs[key].disk - at))
        if on_disk and disk is not None:
            disk.fill(region(*key), at, data[:on_disk].cpu())
        if on_disk < data.numel():
            start = at + on_disk - self.blobs[key].disk
            self.host[key][start : start + data.numel() - on_disk].copy_(data[on_disk:])

    # ---- views ----------------------------------------------------------------------------

    def attention(self, layer: int, slot: Tensor | None) -> AttentionWeights:
        """Views of attention weights; ``slot`` is the flat GPU slot that the blob is loaded to."""
        flat = self._flat(layer, self.scope_of(layer, Scope.ATTENTION), slot)
        shapes = matrix_shapes(self.geometry.model, Scope.ATTENTION)
        return AttentionWeights(
            _norm(flat, "attention_norm"),
            _linear(flat, shapes, ("q",)),
            _linear(flat, shapes, ("k", "v")),
            _linear(flat, shapes, ("out",)),
        )

    def mlp(self, layer: int, slot: Tensor | None) -> MlpWeights:
        """Views of MLP weights."""
        flat = self._flat(layer, self.scope_of(layer, Scope.MLP), slot)
        shapes = matrix_shapes(self.geometry.model, Scope.MLP)
        gated = self.geometry.model.gated_ffn
        return MlpWeights(
            _norm(flat, "mlp_norm"),
            _linear(flat, shapes, ("gate",)) if gated else None,
            _linear(flat, shapes, ("up",)),
            _linear(flat, shapes, ("down",)),
        )

    def _flat(self, layer: int, scope: Scope, slot: Tensor | None) -> Flat:
        layout = self.layouts[layer, scope]
        flat = {n: (self.resident[layer, scope], e) for n, e in layout.resident.items()}
        if layout.streamed:
            if slot is None:
                raise ValueError(f"plan: a forward of layer {layer} reads no weight slot")
            flat |= {n: (slot, e) for n, e in layout.streamed.items()}
        return flat


def edge_weights(
    geometry: Geometry, source: Source, device: torch.device
) -> tuple[EdgeWeights, int]:
    """Weights outside the layers, on the GPU, and their bytes."""
    held: dict[str, Tensor] = {}
    for name, shape in edge_shapes(geometry.model).items():
        tensor = held[name] = torch.empty(shape, dtype=geometry.dtype, device=device)
        at = 0
        for chunk in source.chunks(name, None, shape):
            tensor.view(-1)[at : at + chunk.numel()].copy_(chunk)
            at += chunk.numel()
    norm = Norm(held["final_norm.weight"], held.get("final_norm.bias"))
    head = held.get("head.weight", held["embed.weight"])
    edge = EdgeWeights(held["embed.weight"], held.get("positions.weight"), norm, head.t())
    return edge, sum(tensor.nbytes for tensor in held.values())


def _view(flat: Flat, name: str) -> Tensor:
    buffer, extent = flat[name]
    return buffer[extent.offset : extent.end].view(extent.shape)


def _norm(flat: Flat, name: str) -> Norm:
    bias = f"{name}.bias"
    return Norm(_view(flat, f"{name}.weight"), _view(flat, bias) if bias in flat else None)


def _linear(flat: Flat, shapes: Mapping[str, tuple[Shape, bool]], names: Sequence[str]) -> Linear:
    """Matrices side by side as few GEMMs as their places allow: neighbours multiply as one."""
    chunks: list[Chunk] = []
    start = 0
    for run in _runs(flat, names):
        buffer, first = flat[f"{run[0]}.weight"]
        last = flat[f"{run[-1]}.weight"][1]
        rows = sum(shapes[name][0][0] for name in run)
        weight = buffer[first.offset : last.end].view(rows, first.shape[1])
        bias = None
        if shapes[run[0]][1]:
            where, low = flat[f"{run[0]}.bias"]
            bias = where[low.offset : flat[f"{run[-1]}.bias"][1].end]
        chunks.append(Chunk(weight.t(), bias, start, start + rows))
        start += rows
    return tuple(chunks)


def _runs(flat: Flat, names: Sequence[str]) -> list[list[str]]:
    """Names grouped where both weights and biases follow one another in one buffer."""
    runs = [[names[0]]]
    for before, name in pairwise(names):
        joined = all(
            _follows(flat[f"{before}.{kind}"], flat[f"{name}.{kind}"])
            for kind in ("weight", "bias")
            if f"{name}.{kind}" in flat
        )
        if joined:
            runs[-1].append(name)
        else:
            runs.append([name])
    return runs


def _follows(before: tuple[Tensor, Extent], after: tuple[Tensor, Extent]) -> bool:
    return before[0] is after[0] and before[1].end == after[1].offset
