"""What a decode step of one layer moves and computes, and where its best mix of sources changes.

The closed form of ``policies.cost.three_sources`` for a model. What readers get wrong: without an
HBM floor only the *ratio* of link rate and compute rate decides the mix and what it gains, so every
machine is one number, bytes per FLOP, and a phase diagram needs one axis for all of them.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

from policies.cost.flops import attention_pair_flops, gemm_flops, projection_elems
from policies.cost.three_sources import Mix, TokenSeconds, three_sources
from policies.placement import ACT_BYTES_PER_ELEM
from policies.plan.op import Scope
from policies.spec.model import ModelSpec


@dataclass(frozen=True, slots=True)
class Boundaries:
    """Link bytes per FLOP (``BW / C``) at which the best mix changes its sources.

    From ``load_all`` on the GPU is the limit and all KV is loaded. At ``input`` every token comes
    from its layer input, with KV above it and recompute below; None where inputs never pay. Up to
    ``recompute`` the weights alone take longer than recomputing all (0 where they are resident).
    """

    load_all: float
    input: float | None
    recompute: float


@dataclass(frozen=True, slots=True)
class LayerWork:
    """What one decode step of one layer moves and computes, for any machine.

    Per cached token and sequence: ``kv_bytes``, ``input_bytes`` and ``project_flops``. Per token
    computed: ``linear_flops``, and ``pair_flops`` for each key it attends to (0: attention is left
    out). ``weight_bytes`` cross the link once for ``n_seqs`` sequences, 0 if resident.
    """

    kv_bytes: float
    input_bytes: float
    project_flops: float
    linear_flops: float
    pair_flops: float
    weight_bytes: float
    n_ctx: int
    n_seqs: int

    def __post_init__(self) -> None:
        for name in self.__slots__:
            least = 1 if name.startswith("n_") else 0
            if not getattr(self, name) >= least:
                raise ValueError(f"{name}: {getattr(self, name)} must be >= {least}")

    @property
    def recompute_flops(self) -> float:
        """FLOPs of one recomputed token, with ``n_ctx`` keys.

        The causal count, which is not linear in the tokens, is lower: in its attention part by half
        if everything is recomputed.
        """
        return self.linear_flops + self.n_ctx * self.pair_flops

    @property
    def base_flops(self) -> float:
        """FLOPs of the new tokens, one a sequence."""
        return self.n_seqs * (self.linear_flops + (self.n_ctx + 1) * self.pair_flops)

    def token_s(self, bytes_per_s: float, flops_per_s: float) -> TokenSeconds:
        """Seconds of a token at a link rate and a compute rate."""
        for name, rate in (("bytes_per_s", bytes_per_s), ("flops_per_s", flops_per_s)):
            if not rate > 0:
                raise ValueError(f"{name}: {rate} must be > 0")
        return TokenSeconds(
            load_kv_s=self.kv_bytes / bytes_per_s,
            load_input_s=self.input_bytes / bytes_per_s,
            project_s=self.project_flops / flops_per_s,
            recompute_s=self.recompute_flops / flops_per_s,
        )

    def mix(self, bytes_per_s: float, flops_per_s: float, base_s: float | None = None) -> Mix:
        """Best mix at these rates; ``base_s`` replaces ``base_flops / flops_per_s``.

        With the latter only the ratio of the rates matters to the mix and to its gains: what is
        computed and what is moved each scale with one of them.
        """
        token = self.token_s(bytes_per_s, flops_per_s)
        base = self.base_flops / flops_per_s if base_s is None else base_s
        return three_sources(token, self.n_ctx, self.n_seqs, self.weight_bytes / bytes_per_s, base)

    def boundaries(self) -> Boundaries:
        """Ratios of the rates between the regions, each the machine that balances one corner."""
        tokens = self.n_seqs * self.n_ctx

        def ratio(nbytes: float, flops: float) -> float:
            moved, computed = self.weight_bytes + tokens * nbytes, self.base_flops + tokens * flops
            return moved / computed if computed else math.inf

        pays = self.token_s(1.0, 1.0).input_pays
        return Boundaries(
            load_all=ratio(self.kv_bytes, 0.0),
            input=ratio(self.input_bytes, self.project_flops) if pays else None,
            recompute=ratio(0.0, self.recompute_flops),
        )


def layer_work(
    model: ModelSpec,
    n_ctx: int,
    n_batches: int,
    batch_size: int,
    *,
    resident: bool = False,
    attention: bool = True,
    layer: int | None = None,
) -> LayerWork:
    """Work of a decode step over ``n_ctx`` cached tokens in one layer (None: the last).

    Projection: ``2 d_model`` FLOPs per cached element, for MLA per element of the latent. A token
    computed: all linear layers (of the experts only its own), and with ``attention`` both products.
    All experts move with their layer.
    """
    for name, value in (("n_batches", n_batches), ("batch_size", batch_size)):
        if value < 1:
            raise ValueError(f"{name}: {value} must be >= 1")
    i = model.n_layers - 1 if layer is None else layer
    if not 0 <= i < model.n_layers:
        raise ValueError(f"layer: {i} must be in 0..{model.n_layers - 1}")
    return LayerWork(
        kv_bytes=model.kv_bytes_per_token_layer,
        input_bytes=model.d_model * ACT_BYTES_PER_ELEM,
        project_flops=2.0 * projection_elems(model),
        linear_flops=float(gemm_flops(model, i, Scope.LAYER, 1)),
        pair_flops=float(attention_pair_flops(model, n_ctx)) if attention else 0.0,
        weight_bytes=0.0 if resident else float(model.layer_bytes(i)),
        n_ctx=n_ctx,
        n_seqs=n_batches * batch_size,
    )
