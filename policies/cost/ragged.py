"""Cost of one iteration of continuous batching: requests of every length in one forward.

All rows of an iteration (tokens of prefill chunks and one per decoding request) go through the
linear layers as one GEMM; attention is a sum over requests; each layer reads the experts that all
rows together touch. What readers get wrong: the marginal cost of a token depends on its company. A
decode token is almost free beside a full prefill chunk, because the weights are read anyway.
"""

from __future__ import annotations

from dataclasses import replace
from typing import NamedTuple

from policies.cost.model import CostModel, total_s
from policies.placement import ON_GPU, ON_HOST, Placement
from policies.plan.op import Kind, Op, Scope
from policies.spec.curve import Curve, Grid
from policies.spec.hardware import HardwareProfile, Link
from policies.spec.model import ModelSpec

_LAYER_KERNELS = 13  # as in policies.cost.model
_HEAD_KERNELS = 3


class LayerClass(NamedTuple):
    """``n`` successive layers, alike, the first of which is ``layer``."""

    layer: int
    n: int


class RaggedCosts(CostModel):
    """Costs of an iteration with resident weights and KV that comes from the host.

    ``attention`` False leaves out the context term, ``lm_head`` False the LM head: then a token
    costs exactly the F_pfl of ``policies.cost.kappa``. One layer of equal requests costs what
    ``CostModel`` charges for the FORWARD of such a batch.
    """

    def __init__(
        self,
        model: ModelSpec,
        hardware: HardwareProfile,
        *,
        attention: bool = True,
        lm_head: bool = True,
    ) -> None:
        weights = ((ON_GPU, ON_GPU),) * model.n_layers
        super().__init__(model, hardware, Placement(weights=weights, kv=(ON_HOST,)))
        self._attention = attention
        self._lm_head = lm_head
        dense = min(model.n_dense_layers, model.n_layers) if model.n_experts else model.n_layers
        classes = (LayerClass(0, dense), LayerClass(dense, model.n_layers - dense))
        self.layer_classes = tuple(c for c in classes if c.n)
        self._linear: dict[tuple[int, int], float] = {}

    def linear_seconds(self, layer: int, n_rows: int) -> float:
        """One layer of ``n_rows`` tokens without attention."""
        key = (layer, n_rows)
        value = self._linear.get(key)
        if value is None:
            value = total_s(self._gemms(layer, Scope.LAYER, n_rows))
            value += total_s(self._passes(layer, Scope.LAYER, n_rows))
            self._linear[key] = value
        return value

    def chunk_attention_seconds(self, n_new: int, n_ctx: int) -> float:
        """Attention of one layer: ``n_new`` tokens of one request after ``n_ctx`` others."""
        if not self._attention or n_new == 0:
            return 0.0
        op = Op(Kind.FORWARD, 0, 0, n_seqs=1, n_new=n_new, n_ctx=n_ctx)
        return total_s(self._fused_attention(op))

    def decode_attention_seconds(self, n_seqs: int, total_ctx: int) -> float:
        """Attention of one layer: one new token each after ``total_ctx`` cached ones in all.

        Priced at the mean context: what is read is exact, the kernel's rate is that of the mean.
        """
        if not self._attention or n_seqs == 0:
            return 0.0
        mean = total_ctx // n_seqs
        op = Op(Kind.FORWARD, 0, 0, n_seqs=n_seqs, n_new=1, n_ctx=mean)
        scale = (total_ctx + n_seqs) / (n_seqs * (mean + 1))
        return scale * total_s(self._fused_attention(op))

    def layer_seconds(self, layer: int, n_rows: int, attention_s: float) -> float:
        """One layer of an iteration: its kernels, at least the time to issue them."""
        busy = self.linear_seconds(layer, n_rows) + attention_s
        return max(busy, _LAYER_KERNELS * self.hardware.launch_s)

    def layers_seconds(self, n_rows: int, attention_s: float) -> float:
        """All layers of an iteration, without the LM head."""
        return sum(
            n * self.layer_seconds(layer, n_rows, attention_s) for layer, n in self.layer_classes
        )

    def head_seconds(self, n_seqs: int) -> float:
        """LM head and sampling for the sequences that get a token."""
        if not self._lm_head or n_seqs == 0:
            return 0.0
        layer = self.model.n_layers
        busy = total_s(self._gemms(layer, Scope.HEAD, n_seqs))
        busy += total_s(self._passes(layer, Scope.HEAD, n_seqs))
        return max(busy, _HEAD_KERNELS * self.hardware.launch_s)

    def layer_copy_seconds(self, link: Link, n_tokens: int, n_copies: int = 1) -> float:
        """One layer's KV of ``n_tokens`` over ``link`` in ``n_copies`` copies, each with latency.

        Pieces matter: serving stacks that copy block by block never reach the link's rate
        (papers.md 6.2).
        """
        if n_tokens == 0:
            return 0.0
        nbytes = n_tokens * self.model.kv_bytes_per_token_layer
        return max(1, n_copies) * link.latency_s + nbytes / link.bytes_per_s


def constant_rates(
    hardware: HardwareProfile, flops_per_s: float, bytes_per_s: float
) -> HardwareProfile:
    """The machine of the closed forms: one FLOP rate, one link rate, no latency, no HBM floor."""
    flat = Curve((1e-6,), (flops_per_s,))
    link = Link(0.0, bytes_per_s)
    return replace(
        hardware,
        name=f"{hardware.name}-constant",
        h2d=link,
        d2h=link,
        duplex=1.0,
        hbm_bytes_per_s=float("inf"),
        gemm=flat,
        attention_prefill=flat,
        attention_decode=Curve((1e-6,), (1e30,)),
        attention_window=Grid((1e-6,), (1e-6,), ((flops_per_s,),)),
        layer_norm=None,
        rms_norm=None,
        rotary=None,
        launch_s=0.0,
        sync_s=0.0,
        provenance={},
    )
