"""Memory plan: named pools per tier that a run books before anything runs.

Pools are booked whole: the KV home of a block holds its longest sequences from the start, as a
preallocated arena does. A plan that does not fit raises ``OutOfMemory`` naming tier, need, have and
the largest pool.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import accumulate
from typing import NamedTuple

from policies.errors import OutOfMemory
from policies.placement import (
    ACT_BYTES_PER_ELEM,
    Placement,
    host_placement,
)
from policies.plan.op import Attention, Scope, Tier
from policies.spec.hardware import HardwareProfile
from policies.spec.model import ModelSpec
from policies.spec.workload import Batch, Block

# Copies of the score matrix that unfused attention holds at once: input and output of softmax.
_SCORE_COPIES = 2


@dataclass(frozen=True, slots=True)
class Buffers:
    """Buffers that a schedule needs besides the homes of weights and KV.

    ``sep_layer`` sizes a weight slot for attention or MLP alone. ``relay_bytes`` is pinned host
    memory through which pageable KV travels. ``input_slots`` hold one batch's layer inputs, in each
    direction, where a block's placement books homes for them.
    """

    weight_slots: int = 2
    kv_in_slots: int = 2
    kv_out_slots: int = 2
    sep_layer: bool = False
    attention: Attention = Attention.FUSED
    relay_bytes: int = 0
    input_slots: int = 0

    def __post_init__(self) -> None:
        for name in ("weight_slots", "kv_in_slots", "kv_out_slots", "relay_bytes", "input_slots"):
            if getattr(self, name) < 0:
                raise ValueError(f"buffers.{name}: {getattr(self, name)} must be >= 0")


class Pool(NamedTuple):
    """``nbytes`` booked in ``tier`` under a name."""

    name: str
    tier: Tier
    nbytes: int


def run_pools(model: ModelSpec, placement: Placement, buffers: Buffers) -> list[Pool]:
    """Pools held for the whole run: weights, weight slots, relays."""
    scopes = (Scope.ATTENTION, Scope.MLP) if buffers.sep_layer else (Scope.LAYER,)
    layers = placement.layer_kinds(model)
    slot = max(placement.streamed_bytes(model, i, s) for i in layers for s in scopes)
    staged = max(placement.weight_bytes(model, i, s, "disk") for i in layers for s in scopes)
    pools = [
        Pool("embeddings and head", Tier.GPU, model.edge_bytes),
        Pool("resident weights", Tier.GPU, placement.total_weight_bytes(model, "gpu")),
        Pool("weight slots", Tier.GPU, buffers.weight_slots * slot),
        Pool("weights", Tier.HOST, placement.total_weight_bytes(model, "host")),
        Pool("weight staging", Tier.HOST, buffers.weight_slots * staged),
        Pool("relay buffers", Tier.HOST, buffers.relay_bytes),
        Pool("weights on disk", Tier.DISK, placement.total_weight_bytes(model, "disk")),
    ]
    return [pool for pool in pools if pool.nbytes]


def block_pools(
    model: ModelSpec, placement: Placement, buffers: Buffers, block: Block
) -> list[Pool]:
    """Pools held while a block runs: KV homes and slots, hidden states, workspace."""
    kv = placement.kv[block.index]
    per_layer = model.kv_bytes_per_token_layer
    kv_bytes, input_bytes = placement.home_bytes(model, block)
    heads = placement.heads(block)
    most_inputs = max(b.n_seqs * n for b, n in zip(block.batches, heads, strict=True))
    one_batch = buffers.input_slots * most_inputs * model.d_model * ACT_BYTES_PER_ELEM
    full = max(b.n_seqs * (b.prompt_len + block.max_new - 1) for b in block.batches) * per_layer
    hidden = sum(b.n_seqs * b.prompt_len for b in block.batches) * model.d_model
    g = f"block {block.index}"
    on_gpu = round(kv_bytes * kv.gpu)
    pools = [
        Pool(f"{g}: resident KV", Tier.GPU, on_gpu),
        Pool(f"{g}: layer input slots", Tier.GPU, round(2 * one_batch * kv.streamed)),
        Pool(f"{g}: KV load slots", Tier.GPU, round(buffers.kv_in_slots * full * kv.streamed)),
        Pool(
            f"{g}: KV store slots",
            Tier.GPU,
            round(buffers.kv_out_slots * full * kv.streamed),
        ),
        Pool(
            f"{g}: hidden states",
            Tier.GPU,
            round(hidden * ACT_BYTES_PER_ELEM * placement.act.gpu),
        ),
        Pool(
            f"{g}: workspace",
            Tier.GPU,
            max(workspace_bytes(model, buffers, batch) for batch in block.batches),
        ),
        Pool(f"{g}: KV", Tier.HOST, round(kv_bytes * kv.host)),
        Pool(f"{g}: layer inputs", Tier.HOST, round(input_bytes * kv.host)),
        Pool(
            f"{g}: hidden states on host",
            Tier.HOST,
            round(hidden * ACT_BYTES_PER_ELEM * placement.act.host),
        ),
        Pool(
            f"{g}: KV staging",
            Tier.HOST,
            round((buffers.kv_in_slots + buffers.kv_out_slots) * full * kv.disk),
        ),
        Pool(f"{g}: layer input staging", Tier.HOST, round(2 * one_batch * kv.disk)),
        Pool(f"{g}: KV on disk", Tier.DISK, round(kv_bytes * kv.disk)),
        Pool(f"{g}: layer inputs on disk", Tier.DISK, round(input_bytes * kv.disk)),
    ]
    return [pool for pool in pools if pool.nbytes]


def workspace_bytes(model: ModelSpec, buffers: Buffers, batch: Batch) -> int:
    """Largest intermediate state of one layer's prefill of a batch, plus its logits."""
    rows = batch.n_seqs * batch.prompt_len
    d, heads = model.d_model, model.n_heads
    attention = rows * (heads * (model.qk_dim + model.v_dim) + 2 * d)
    if model.kv_latent_dim:
        attention += rows * heads * (model.qk_dim + model.v_dim)  # expanded keys and values
    scores = 0
    if buffers.attention is not Attention.FUSED:
        scores = _SCORE_COPIES * batch.n_seqs * heads * batch.prompt_len**2
    width = max(
        (3 if model.gated_ffn else 2) * model.d_ffn,
        3 * (model.top_k + model.n_shared_experts) * model.d_expert + model.top_k * d,
    )
    mlp = rows * (width + 2 * d)
    logits = 2 * batch.n_seqs * model.vocab  # float32
    return ACT_BYTES_PER_ELEM * (max(attention + scores, mlp) + logits)


def check_fits(pools: Iterable[Pool], hardware: HardwareProfile) -> None:
    """Raise ``OutOfMemory`` for the first tier, GPU before host before disk, that overflows."""
    held = list(pools)
    for tier in Tier:
        mine = [pool for pool in held if pool.tier is tier]
        need, have = sum(pool.nbytes for pool in mine), hardware.usable_bytes(tier.value)
        if need > have:
            largest = max(mine, key=lambda pool: pool.nbytes)
            raise OutOfMemory(tier.value, need, int(have), largest.name)


def place(
    model: ModelSpec,
    hardware: HardwareProfile,
    blocks: Sequence[Block],
    buffers: Buffers,
    *,
    mode: str = "host",
    kv_on_gpu: bool = False,
    inputs: tuple[tuple[int, ...], ...] = (),
) -> Placement:
    """Placement by name: ``host``; ``auto`` fills spare GPU memory with whole layers; ``gpu`` holds
    all layers there, whether they fit or not.

    ``inputs`` as in ``Placement``.
    """
    if mode not in ("host", "auto", "gpu"):
        raise ValueError(f"policy.placement: {mode!r} is none of 'host', 'auto', 'gpu'")

    def with_resident(n: int) -> Placement:
        # What goes to disk needs staging in host memory, which pushes more to disk: repeat until
        # the room set aside is enough. Staging is whole bytes, grows and is bounded, so this ends.
        aside = 0
        while True:
            placement = host_placement(
                model,
                hardware,
                blocks,
                kv_on_gpu=kv_on_gpu,
                resident_layers=n,
                host_buffer_bytes=aside,
                inputs=inputs,
            )
            need = _host_buffer_bytes(model, placement, buffers, blocks)
            if need <= aside:
                return placement
            aside = need

    if mode != "auto":
        return with_resident(model.n_layers if mode == "gpu" else 0)
    usable = hardware.usable_bytes("gpu")
    room = usable - _gpu_bytes(model, with_resident(0), buffers, blocks)
    takes = _resident_bytes(model, buffers)
    n = model.n_layers  # memory is not monotone in n (the last resident layer frees the slots)
    while n > 0:
        # Sums of layers rule out most n without a placement; a byte a layer is for rounding.
        if takes[n] <= room + n:
            placement = with_resident(n)
            if _gpu_bytes(model, placement, buffers, blocks) <= usable:
                return placement
        n -= 1
    return with_resident(0)


def _resident_bytes(model: ModelSpec, buffers: Buffers) -> list[int]:
    """GPU bytes that n = 0, 1, ... leading layers take beyond what their weight slots free."""
    scopes = (Scope.ATTENTION, Scope.MLP) if buffers.sep_layer else (Scope.LAYER,)
    layers = range(model.n_layers)
    whole = [model.layer_bytes(i) for i in layers]
    widest = [0]  # of the layers from n on, backwards
    for i in reversed(layers):
        widest.append(max(widest[-1], *(model.layer_bytes(i, s) for s in scopes)))
    widest.reverse()
    slots = [buffers.weight_slots * size for size in widest]
    held = accumulate(whole, initial=0)
    return [total - (slots[0] - slots[n]) for n, total in enumerate(held)]


def _host_buffer_bytes(
    model: ModelSpec, placement: Placement, buffers: Buffers, blocks: Sequence[Block]
) -> int:
    """Host memory besides the homes of weights and KV: relays, staging, and rounding of shares."""
    held_by = [
        f"block {block.index}: {what}" for block in blocks for what in ("KV", "layer inputs")
    ]
    homes = {"weights", *held_by}
    held = run_pools(model, placement, buffers)
    staged = sum(p.nbytes for p in held if p.tier is Tier.HOST and p.name not in homes)
    most = max(
        sum(
            p.nbytes
            for p in block_pools(model, placement, buffers, block)
            if p.tier is Tier.HOST and p.name not in homes
        )
        for block in blocks
    )
    return staged + most + model.n_layers + 2  # homes are rounded up by less than a byte each


def _gpu_bytes(
    model: ModelSpec, placement: Placement, buffers: Buffers, blocks: Sequence[Block]
) -> int:
    """GPU memory that the run holds with its largest block."""
    held = sum(p.nbytes for p in run_pools(model, placement, buffers) if p.tier is Tier.GPU)
    most = max(
        sum(p.nbytes for p in block_pools(model, placement, buffers, b) if p.tier is Tier.GPU)
        for b in blocks
    )
    return held + most


def check_run(
    model: ModelSpec,
    hardware: HardwareProfile,
    placement: Placement,
    buffers: Buffers,
    blocks: Iterable[Block],
) -> None:
    """Raise ``OutOfMemory`` if any block does not fit beside what the run holds."""
    held = run_pools(model, placement, buffers)
    check_fits(held, hardware)
    for block in blocks:
        check_fits([*held, *block_pools(model, placement, buffers, block)], hardware)
