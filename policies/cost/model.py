"""The cost model: seconds, bytes and FLOPs of one op on one machine.

The simulator charges one cost model (the plant) and policies reason with one (their belief); they
may be different objects. A compute time is a sum of kernels, each the longer of its arithmetic and
its memory traffic, never a single utilisation number.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable

from policies.cost import flops as count
from policies.cost.size import nbytes
from policies.placement import ACT_BYTES_PER_ELEM, Placement
from policies.plan.op import Attention, Kind, Op, Scope, Tier
from policies.spec.curve import Curve
from policies.spec.hardware import HardwareProfile, Link
from policies.spec.model import ModelSpec

# Kernels that a forward of each scope launches: norm, projections, cache append, attention, add;
# norm, two GEMMs, activation, add. Separate attention kernels: two batched GEMMs, mask, softmax and
# three transpositions instead of one fused kernel.
_N_KERNELS = {
    Scope.LAYER: 13,
    Scope.ATTENTION: 8,
    Scope.MLP: 5,
    Scope.QKV: 5,
    Scope.OUTPUT: 2,
    Scope.HEAD: 3,
}
_N_NORMS = {
    Scope.LAYER: 2,
    Scope.ATTENTION: 1,
    Scope.MLP: 1,
    Scope.QKV: 1,
    Scope.OUTPUT: 0,
    Scope.HEAD: 1,
}
_N_RESIDUALS = {
    Scope.LAYER: 2,
    Scope.ATTENTION: 1,
    Scope.MLP: 1,
    Scope.QKV: 0,
    Scope.OUTPUT: 1,
    Scope.HEAD: 0,
}
_UNFUSED_EXTRA_KERNELS = 6
_PROJECT_EXTRA_KERNELS = 2  # norm and GEMM over loaded layer inputs
# Passes over queries and keys to rotate them: two products of the first half, two of the second,
# each with its reads and write, and the first half copied back.
ROPE_PASSES = 6
NORM_PASSES = 2  # a read and a write
# Passes over the score matrix through HBM: written by the first product, read and written by mask
# and by softmax, read by the second product.
_SCORE_PASSES = 6
# Passes over the cached KV of unfused decode attention: transposed into place (read, write), read.
_UNFUSED_KV_PASSES = 3


# A piece of a forward: names of the profile's rates that may limit it, and its seconds at each. The
# longest holds.
Kernel = tuple[tuple[str, float], ...]


class CostModel:
    """Costs of ops for one (model, hardware, placement); results are cached by amounts.

    ``layer_kinds`` has a layer of each kind and how many cost the same.
    """

    def __init__(self, model: ModelSpec, hardware: HardwareProfile, placement: Placement) -> None:
        self.model = model
        self.hardware = hardware
        self.placement = placement
        self.extrapolated: set[str] = set()  # curves used beyond their last measured point
        classes: dict[object, int] = {}
        self._layer_class = [
            classes.setdefault((placement.weights[i], model.is_moe(i)), len(classes))
            for i in range(model.n_layers)
        ] + [-1]  # the LM head
        alike = Counter(self._layer_class[:-1])
        self.layer_kinds = {self._layer_class.index(kind): n for kind, n in alike.items()}
        kv_classes: dict[object, int] = {}
        self._kv_class = [kv_classes.setdefault(s, len(kv_classes)) for s in placement.kv]
        self._seconds: dict[tuple[object, ...], float] = {}
        self._nbytes: dict[tuple[object, ...], int] = {}
        self._flops: dict[tuple[object, ...], float] = {}

    # ---- of an op -------------------------------------------------------------------------

    def nbytes(self, op: Op) -> int:
        """Bytes that the op moves over its link."""
        if op.kind is Kind.FORWARD or op.kind is Kind.FENCE:
            return 0
        key = self._transfer_key(op)
        value = self._nbytes.get(key)
        if value is None:
            value = self._nbytes[key] = nbytes(op, self.model, self.placement)
        return value

    def flops(self, op: Op) -> float:
        """Exact FLOPs of the op; 0 for a transfer."""
        if op.kind is not Kind.FORWARD and op.kind is not Kind.CPU_ATTEND:
            return 0.0
        key = self._forward_key(op)
        value = self._flops.get(key)
        if value is None:
            value = self._flops[key] = float(self._count_flops(op))
        return value

    def seconds(self, op: Op) -> float:
        """Uncontended duration of the op."""
        if op.kind is Kind.FORWARD:
            key = self._forward_key(op)
        elif op.kind is Kind.FENCE:
            return self.hardware.sync_s
        else:
            key = (self._pageable(op), *self._transfer_key(op))
        value = self._seconds.get(key)
        if value is None:
            value = self._seconds[key] = self._price(op)
        return value

    def weight_bytes(self, layer: int, scope: Scope, tier: str) -> int:
        """Bytes of a layer's weights (or of a part) whose home is ``tier``; see ``Placement``."""
        key = (self._layer_class[layer], scope, tier)
        value = self._nbytes.get(key)
        if value is None:
            value = self.placement.weight_bytes(self.model, layer, scope, tier)
            self._nbytes[key] = value
        return value

    def heaviest_layer(self) -> int:
        """The first layer with most weights to stream."""
        n = self.model.n_layers
        return max(
            range(n), key=lambda i: self.placement.streamed_bytes(self.model, i, Scope.LAYER)
        )

    def _transfer_key(self, op: Op) -> tuple[object, ...]:
        layer, kv = self._layer_class[op.layer], self._kv_class[op.block]
        piece = op.part % op.n_parts
        return (op.kind, layer, kv, op.scope, piece, op.n_parts, op.n_seqs, op.stop - op.start)

    def _forward_key(self, op: Op) -> tuple[object, ...]:
        layer = self._layer_class[op.layer]
        return (op.kind, layer, op.scope, op.attention, op.n_seqs, op.n_new, op.n_recompute,
                op.n_ctx, op.n_front, op.n_project)  # fmt: skip

    @staticmethod
    def _pageable(op: Op) -> bool:
        for slot in (*op.reads, *op.writes):
            if slot.tier is Tier.HOST and not slot.pinned:
                return True
        return False

    def _price(self, op: Op) -> float:
        hardware = self.hardware
        if op.kind is Kind.FORWARD:
            return self.forward_seconds(op)
        if op.kind is Kind.CPU_ATTEND:
            return self.nbytes(op) / hardware.cpu_attention_bytes_per_s
        return self.link(op).seconds(self.nbytes(op))

    def link(self, op: Op) -> Link:
        """The link that a transfer crosses, by its kind and by whether its host side is pinned."""
        hardware, kind = self.hardware, op.kind
        if kind in (Kind.LOAD_WEIGHT, Kind.LOAD_KV, Kind.LOAD_ACT):
            return hardware.h2d_pageable if self._pageable(op) else hardware.h2d
        if kind in (Kind.STORE_KV, Kind.STORE_ACT):
            return hardware.d2h_pageable if self._pageable(op) else hardware.d2h
        if kind in (Kind.READ_WEIGHT, Kind.READ_KV, Kind.READ_ACT):
            return hardware.disk_read
        if kind in (Kind.WRITE_KV, Kind.WRITE_ACT):
            return hardware.disk_write
        if kind is Kind.HOST_COPY:
            return hardware.host_copy
        raise ValueError(f"kind: {kind} crosses no link")

    def _count_flops(self, op: Op) -> int:
        if op.kind is Kind.CPU_ATTEND:
            return count.attention_flops(self.model, op.n_seqs, op.n_new, 0, op.n_ctx)
        rows = op.n_seqs * (op.n_new + op.n_recompute + op.n_front)
        flops = count.gemm_flops(self.model, op.layer, op.scope, rows)
        flops += 2 * op.n_seqs * op.n_project * count.projection_elems(self.model)
        if op.scope in (Scope.LAYER, Scope.ATTENTION):
            flops += count.attention_flops(
                self.model, op.n_seqs, op.n_new, op.n_recompute, op.n_ctx, op.n_front
            )
        return flops

    # ---- compute --------------------------------------------------------------------------

    def forward_seconds(self, op: Op) -> float:
        """GPU time of a FORWARD: kernels in sequence, at least the time to issue them."""
        return max(total_s(self.kernels(op)), self.n_launches(op) * self.hardware.launch_s)

    def n_launches(self, op: Op) -> int:
        """Kernels that a FORWARD launches."""
        n = _N_KERNELS[op.scope] + (_PROJECT_EXTRA_KERNELS if op.n_project else 0)
        unfused = op.attention is Attention.UNFUSED and op.scope in (Scope.LAYER, Scope.ATTENTION)
        return n + (_UNFUSED_EXTRA_KERNELS if unfused else 0)

    def kernels(self, op: Op) -> list[Kernel]:
        """The work of a FORWARD on the GPU, each piece with the rates that may limit it."""
        rows = op.n_seqs * (op.n_new + op.n_recompute + op.n_front)
        found = [*self._gemms(op.layer, op.scope, rows), *self._passes(op.layer, op.scope, rows)]
        if op.n_project:
            found += self._projection(op.n_seqs * op.n_project)
        if op.scope in (Scope.LAYER, Scope.ATTENTION):
            unfused = op.attention is Attention.UNFUSED
            found += self._unfused_attention(op) if unfused else self._fused_attention(op)
        return found

    def projection_seconds(self, rows: int) -> float:
        """K and V of ``rows`` loaded layer inputs."""
        return total_s(self._projection(rows))

    def _gemm(self, elems: float, rows: float, weight_elems: float | None = None) -> Kernel:
        """GEMMs of ``rows`` tokens with ``elems`` weights, floored by reading the weights.

        ``weight_elems`` is what must be read where that is not ``elems`` (experts).
        """
        if self.hardware.gemm.extrapolated(rows):
            self.extrapolated.add("gemm")
        read = (elems if weight_elems is None else weight_elems) * self.model.weight_bytes_per_elem
        arithmetic = 2.0 * rows * elems / self.hardware.gemm(rows)
        return (("gemm", arithmetic), self._through_memory(read))

    def _gemms(self, layer: int, scope: Scope, rows: int) -> list[Kernel]:
        model = self.model
        if scope is Scope.HEAD:
            return [self._gemm(model.vocab * model.d_model, rows)]
        found = []
        if scope in (Scope.LAYER, Scope.ATTENTION):
            found.append(self._gemm(count.attention_gemm_elems(model), rows))
        elif scope in (Scope.QKV, Scope.OUTPUT):
            found.append(self._gemm(count.attention_gemm_elems(model, scope), rows))
        if scope in (Scope.LAYER, Scope.MLP):
            found.append(self._gemm(count.dense_mlp_elems(model, layer), rows))
            if model.is_moe(layer):
                touched = model.experts_touched(layer, rows)
                # Each touched expert runs its own GEMM over its share of the tokens.
                per_expert = max(1.0, rows * model.top_k / touched)
                found.append(self._gemm(touched * count.expert_elems(model), per_expert))
        return found

    def _passes(self, layer: int, scope: Scope, rows: int) -> list[Kernel]:
        """Norms, residual additions, rotary embeddings, and of the MLP what its GEMMs leave.

        As it writes, a GEMM with a bias applies an ungated activation, and one without adds the
        residual. Else an activation is read and written, an addition, and the product of a gated
        activation with the other half, have two reads and a write.
        """
        model = self.model
        passes = (3 if model.linear_bias else 1) * _N_RESIDUALS[scope] * model.d_model
        if scope in (Scope.LAYER, Scope.MLP):
            if model.is_moe(layer):
                active = model.top_k + model.n_shared_experts
                passes += 5 * active * model.d_expert + 2 * model.top_k * model.d_model
            elif model.gated_ffn:
                passes += 5 * model.d_ffn
            elif not model.linear_bias:
                passes += 2 * model.d_ffn
        found: list[Kernel] = [(self._through_memory(rows * passes * ACT_BYTES_PER_ELEM),)]
        found += [self._norm(rows)] * _N_NORMS[scope]
        if scope in (Scope.LAYER, Scope.ATTENTION, Scope.QKV):
            found += [*self._rotary(rows, model.n_heads), *self._rotary(rows, self._key_heads)]
        return found

    def _norm(self, rows: int) -> Kernel:
        """One norm of ``rows`` hidden states: read and written."""
        moved = NORM_PASSES * rows * self.model.d_model * ACT_BYTES_PER_ELEM
        return (self._measured_pass("layer_norm" if self.model.norm_bias else "rms_norm", moved),)

    def _measured_pass(self, name: str, moved: int) -> tuple[str, float]:
        """Kernels that read and write ``moved`` bytes at a rate of their own, if one is known."""
        curve: Curve | None = getattr(self.hardware, name)
        if curve is None or not moved:
            return self._through_memory(moved)
        if curve.extrapolated(moved):
            self.extrapolated.add(name)
        return name, moved / curve(moved)

    def _through_memory(self, moved: float) -> tuple[str, float]:
        return "hbm_bytes_per_s", moved / self.hardware.hbm_bytes_per_s

    @property
    def _key_heads(self) -> int:
        """Heads of keys that are rotated: MLA has one for all."""
        return 1 if self.model.kv_latent_dim else self.model.n_kv_heads

    def _rotary(self, rows: int, n_heads: int) -> list[Kernel]:
        """Rotary embeddings of ``n_heads`` heads of ``rows`` tokens; none for learned positions."""
        model = self.model
        if model.learned_positions:
            return []
        elems = rows * n_heads * (model.rope_dim or model.head_dim)
        return [(self._measured_pass("rotary", ROPE_PASSES * elems * ACT_BYTES_PER_ELEM),)]

    def _projection(self, rows: int) -> list[Kernel]:
        """A norm, one GEMM, rotated keys."""
        gemm = self._gemm(count.projection_elems(self.model), rows)
        return [self._norm(rows), gemm, *self._rotary(rows, self._key_heads)]

    def _fused_attention(self, op: Op) -> list[Kernel]:
        """Attention of new tokens and of the tail; before it, that of the front to itself."""
        found: list[Kernel] = []
        if op.n_front:
            if self.hardware.attention_window.extrapolated(op.n_front, op.n_front):
                self.extrapolated.add("attention_window")
            pairs = op.n_seqs * count.causal_pairs(op.n_front, op.n_front)
            flops = pairs * count.attention_pair_flops(self.model, op.n_ctx)
            rate = self.hardware.attention_window(op.n_front, op.n_front)
            found.append((("attention_window", flops / rate),))
        return [*found, self._window(op)]

    def _window(self, op: Op) -> Kernel:
        hardware = self.hardware
        queries, keys = op.n_new + op.n_recompute, op.n_ctx + op.n_new
        flops = count.attention_flops(self.model, op.n_seqs, op.n_new, op.n_recompute, op.n_ctx)
        if not op.n_ctx:  # prefill; in decode even a tail that is everything takes decode's kernel
            if hardware.attention_prefill.extrapolated(keys):
                self.extrapolated.add("attention_prefill")
            return (("attention_prefill", flops / hardware.attention_prefill(keys)),)
        if hardware.attention_decode.extrapolated(keys):
            self.extrapolated.add("attention_decode")
        kv = op.n_seqs * keys * self.model.kv_bytes_per_token_layer
        read = ("attention_decode", kv / hardware.attention_decode(keys))
        if queries == 1 and not self.model.kv_latent_dim:
            return (read,)
        # All heads of MLA share one latent, so even one query a sequence computes a lot.
        if hardware.attention_window.extrapolated(queries, keys):
            self.extrapolated.add("attention_window")
        shared = queries * (self.model.n_heads if self.model.kv_latent_dim else 1)
        return (read, ("attention_window", flops / hardware.attention_window(shared, keys)))

    def _unfused_attention(self, op: Op) -> list[Kernel]:
        """Attention by separate kernels: measured where the profile says so, else passes over HBM.

        Moving the cache into place does not depend on the number of queries, every other kernel is
        linear in it: the first query pays for the cache, each further one for its scores.
        """
        model, hardware = self.model, self.hardware
        queries, keys = op.n_new + op.n_recompute, op.n_ctx + op.n_new
        kv = op.n_seqs * keys * model.kv_bytes_per_token_layer
        first, further = hardware.attention_unfused_decode, hardware.attention_unfused_scores
        if first is not None and further is not None:
            if first.extrapolated(keys) or (queries > 1 and further.extrapolated(keys)):
                self.extrapolated.add("attention_unfused")
            scores = op.n_seqs * model.n_heads * (queries - 1) * keys
            return [
                (("attention_unfused_decode", kv / first(keys)),),
                (("attention_unfused_scores", scores / further(keys)),),
            ]
        scores = op.n_seqs * model.n_heads * queries * keys
        traffic = _UNFUSED_KV_PASSES * kv + _SCORE_PASSES * scores * ACT_BYTES_PER_ELEM
        # The mask is applied after the product: all pairs are computed, causal or not.
        flops = scores * count.attention_pair_flops(model, op.n_ctx) / model.n_heads
        arithmetic = ("gemm", flops / hardware.gemm(op.n_seqs * queries))
        return [(arithmetic, self._through_memory(traffic))]


def total_s(kernels: Iterable[Kernel]) -> float:
    """Seconds of kernels one after another."""
    total = 0.0
    for limits in kernels:
        longest = limits[0][1]
        if len(limits) > 1:
            longest = max(seconds for _, seconds in limits)
        total += longest
    return total
