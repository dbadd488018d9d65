"""What a profile says of a measured point, by the formulas that the cost model charges.

Attention is priced by the cost model itself: a forward of one attention part with the profile's
attention rates, less the same forward on a machine where attention is free. What readers get wrong
is what a check is: the elementwise group has no number of its own, its points test whether those of
norms and of memory bandwidth price it.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

from calibrate.grid import ATTENTION, PASSES, UNFUSED, kv_bytes, pass_elems
from policies.cost.flops import causal_pairs
from policies.cost.model import CostModel
from policies.placement import ON_GPU, ON_HOST, Placement
from policies.plan.op import Attention, Kind, Op, Scope
from policies.spec.curve import Curve, Grid
from policies.spec.hardware import HardwareProfile, Link
from policies.spec.model import ModelSpec

_FREE = 1e40  # a rate at which attention costs nothing
_DUPLEX_LINK = {"duplex_h2d": "h2d", "duplex_d2h": "d2h"}
_READINGS = ("memory", "power")


def work(group: str, x: Mapping[str, float]) -> float:
    """What a point amounts to: bytes, or FLOPs for GEMM, prefill and window; 1 if it has no size.

    Attention FLOPs count each causal pair once, both products: ``4 * batch * heads * head_dim *
    pairs``. Unfused prefill amounts to scores: ``batch * heads * queries * keys``.
    """
    if group == "gemm":
        return 2.0 * x["rows"] * x["k"] * x["n"]
    if group in ("attention_prefill", "attention_window"):
        pairs = causal_pairs(int(x["queries"]), int(x["keys"]))
        return 4.0 * x["batch"] * x["n_heads"] * x["head_dim"] * pairs
    if group == "attention_unfused_prefill":
        return x["batch"] * x["n_heads"] * x["queries"] * x["keys"]
    if group in ("attention_decode", "attention_unfused_decode", "cpu_attention"):
        return kv_bytes(x)
    if group == "hbm":
        return 2.0 * x["nbytes"]  # read and written
    if group in PASSES:
        return x["rows"] * pass_elems(group, x) * x["elem_bytes"]
    if group == "elementwise":
        return x["rows"] * (10 * x["d_model"] + 5 * x["d_ffn"]) * x["elem_bytes"]
    return x.get("nbytes", 1.0)


def predicted_s(hardware: HardwareProfile, group: str, x: Mapping[str, float]) -> float:
    """Seconds of a point on ``hardware``; ``ValueError`` for a group that is not timed."""
    if group in _DUPLEX_LINK:
        link: Link = getattr(hardware, _DUPLEX_LINK[group])
        return link.seconds(x["nbytes"]) / hardware.duplex
    if group == "gemm":
        weight_s = x["k"] * x["n"] * x["elem_bytes"] / hardware.hbm_bytes_per_s
        return max(work(group, x) / hardware.gemm(x["rows"]), weight_s)
    if group in ATTENTION:
        return _attention_s(hardware, group, x)
    if group in ("launch", "sync"):
        return float(getattr(hardware, f"{group}_s"))
    if group in PASSES:
        return _pass_s(hardware, getattr(hardware, group), work(group, x))
    if group == "elementwise":
        normed = x["rows"] * pass_elems("layer_norm", x) * x["elem_bytes"]
        rest_s = (work(group, x) - 2 * normed) / hardware.hbm_bytes_per_s
        return 2 * _pass_s(hardware, hardware.layer_norm, normed) + rest_s
    rates = {
        "hbm": hardware.hbm_bytes_per_s,
        "cpu_attention": hardware.cpu_attention_bytes_per_s,
        "cpu_read": hardware.cpu_bytes_per_s,
    }
    if group in rates:
        return work(group, x) / rates[group]
    if group in _READINGS or not isinstance(getattr(hardware, group, None), Link):
        raise ValueError(f"group: {group!r} is not timed, no seconds can be predicted")
    copied: Link = getattr(hardware, group)
    return copied.seconds(x["nbytes"])


def _pass_s(hardware: HardwareProfile, measured: Curve | None, moved: float) -> float:
    return moved / (hardware.hbm_bytes_per_s if measured is None else measured(moved))


def _attention_s(hardware: HardwareProfile, group: str, x: Mapping[str, float]) -> float:
    model = _attention_model(x)
    placement = Placement(weights=((ON_GPU, ON_GPU),), kv=(ON_HOST,))
    queries, keys = int(x["queries"]), int(x["keys"])
    prefill = queries == keys
    op = Op(
        Kind.FORWARD,
        block=0,
        step=0 if prefill else 1,
        scope=Scope.ATTENTION,
        n_seqs=int(x["batch"]),
        n_new=queries if prefill else 1,
        n_recompute=0 if prefill else queries - 1,
        n_ctx=0 if prefill else keys - 1,
    )
    asked = replace(op, attention=Attention.UNFUSED) if group in UNFUSED else op
    quick = replace(hardware, launch_s=0.0)  # what the launches floor is not attention's
    free = replace(
        quick,
        attention_decode=Curve((1.0,), (_FREE,)),
        attention_prefill=Curve((1.0,), (_FREE,)),
        attention_window=Grid((1.0,), (1.0,), ((_FREE,),)),
    )
    whole_s = CostModel(model, quick, placement).forward_seconds(asked)
    return whole_s - CostModel(model, free, placement).forward_seconds(op)


def _attention_model(x: Mapping[str, float]) -> ModelSpec:
    """A one-layer model with the heads of a point; the rest of it cancels out."""
    n_heads, head_dim = int(x["n_heads"]), int(x["head_dim"])
    return ModelSpec(
        name="attention",
        n_layers=1,
        d_model=n_heads * head_dim,
        n_heads=n_heads,
        n_kv_heads=int(x["n_kv_heads"]),
        head_dim=head_dim,
        d_ffn=n_heads * head_dim,
        vocab=1,
        max_positions=int(x["keys"]),
        gated_ffn=False,
        tied_embeddings=True,
        weight_bytes_per_elem=x["elem_bytes"],
        kv_bytes_per_elem=x["elem_bytes"],
    )
