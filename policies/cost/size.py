"""Bytes of one op: the only place where sizes are computed from a plan.

Bytes are those that the op's link moves. A FORWARD moves nothing over a link, so it has 0 bytes
although it reads gigabytes of GPU memory; that traffic is in its duration.
"""

from __future__ import annotations

from policies.placement import ACT_BYTES_PER_ELEM, Placement
from policies.plan.op import Kind, Op, Scope
from policies.spec.model import ModelSpec

_DISK = (Kind.READ_KV, Kind.WRITE_KV, Kind.READ_ACT, Kind.WRITE_ACT)
_ACTS = (Kind.LOAD_ACT, Kind.STORE_ACT, Kind.READ_ACT, Kind.WRITE_ACT)


def piece(total: int, part: int, n_parts: int) -> int:
    """Bytes of piece ``part % n_parts`` when ``total`` is cut evenly; pieces sum to ``total``."""
    i = part % n_parts
    return total * (i + 1) // n_parts - total * i // n_parts


def act_elems(model: ModelSpec, scope: Scope) -> int:
    """Elements per token of a layer's input, the projected Q, K and V, or attention's output."""
    if scope is Scope.QKV:
        return model.n_heads * model.qk_dim + model.kv_elems_per_token_layer
    if scope is Scope.OUTPUT:
        return model.n_heads * model.v_dim
    return model.d_model


def nbytes(op: Op, model: ModelSpec, placement: Placement) -> int:
    """Bytes that ``op`` moves over its link (or, on the CPU lane, through host memory)."""
    kind = op.kind
    if kind is Kind.FORWARD or kind is Kind.FENCE:
        return 0
    if kind is Kind.LOAD_WEIGHT:
        total = placement.streamed_bytes(model, op.layer, op.scope)
        return piece(total, op.part, op.n_parts)
    if kind is Kind.READ_WEIGHT:
        total = placement.weight_bytes(model, op.layer, op.scope, "disk")
        return piece(total, op.part, op.n_parts)
    tokens = op.n_seqs * (op.stop - op.start)
    kv = placement.kv[op.block]
    at_home = kv.disk if kind in _DISK else kv.streamed
    if kind in _ACTS:
        share = placement.act.streamed if op.scope is Scope.LAYER else 1.0
        share = at_home if op.scope is Scope.INPUT else share
        total = round(tokens * act_elems(model, op.scope) * ACT_BYTES_PER_ELEM * share)
        return piece(total, op.part, op.n_parts)
    total = round(tokens * model.kv_bytes_per_token_layer * at_home)
    return piece(total, op.part, op.n_parts)
