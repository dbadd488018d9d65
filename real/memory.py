"""The memory check of a run: every buffer of the engine, tier by tier, before one is allocated.

The plan's own pools (``policies.plan.memory``) say what a policy needs on any engine; these are the
buffers of this engine, to the byte, and what is really free. What readers get wrong: the two totals
differ a little, and both are reported: this engine adds token ids, landing buffers and rotary
tables, and sizes its slots by what the plan really moves.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import NamedTuple

from policies.errors import OutOfMemory
from policies.plan.op import Attention, Kind, Op, Scope, Tier
from real.cpu_attention import wide_dtype
from real.geometry import Geometry, padded
from real.names import group
from real.scan import Scan

_SHRINK = {
    "weights": "fewer layers on it, or policy.placement",
    "weight slots": "policy.sep_layer",
    "KV": "a smaller batch_size or n_batches, or a shorter prompt",
    "KV slots": "a smaller batch_size, or a shorter prompt",
    "layer inputs": "a smaller batch_size or n_batches, or a shorter prompt",
    "layer input slots": "a smaller batch_size, or a shorter prompt",
    "hidden states": "a smaller batch_size or n_batches",
    "workspace": "a smaller batch_size, or policy.attention=fused",
    "staging": "a smaller batch_size",
    "embeddings and head": "a smaller model",
    "tokens": "a smaller batch_size",
}


class Need(NamedTuple):
    """Bytes of one kind of buffer in one tier."""

    name: str
    tier: Tier
    nbytes: int


def needs(found: Scan, weights: Mapping[str, int], ragged: bool) -> list[Need]:
    """Buffers of a run by group and tier, largest first.

    ``weights`` has the bytes of ``resident``, ``host``, ``disk`` and ``edge`` weights.
    """
    model = found.geometry.model
    sums: dict[tuple[str, Tier], int] = {}

    def add(name: str, tier: Tier, nbytes: int) -> None:
        if nbytes:
            sums[name, tier] = sums.get((name, tier), 0) + nbytes

    for slot, nbytes in found.slots.items():
        add(group(slot), slot.tier, padded(nbytes) if slot.tier is Tier.HOST else nbytes)
    for slot, nbytes in found.landing.items():
        add(group(slot), Tier.GPU, nbytes)
    add("hidden states", Tier.GPU, sum(found.projected.values()))
    add("weights", Tier.GPU, weights["resident"])
    add("weights", Tier.HOST, weights["host"])
    add("weights", Tier.DISK, weights["disk"])
    add("embeddings and head", Tier.GPU, weights["edge"])
    add("KV", Tier.DISK, sum(padded(n) for n in found.on_disk.values()))
    add("workspace", Tier.GPU, shared_bytes(found) + logits_bytes(found))
    add("workspace", Tier.GPU, max(transient_bytes(found, item.op, ragged) for item in found.linked
                                   if item.op.kind is Kind.FORWARD))  # fmt: skip
    add("workspace", Tier.HOST, found.widened * wide_dtype(found.geometry.dtype).itemsize)
    add("tokens", Tier.GPU, token_bytes(found.geometry))
    if ragged:
        add("workspace", Tier.GPU, padded_step_bytes(found))
    if not model.learned_positions:
        add(
            "tokens",
            Tier.GPU,
            max_positions(found.geometry) * model.head_dim * found.geometry.elem_bytes,
        )
    listed = [Need(name, tier, nbytes) for (name, tier), nbytes in sums.items()]
    return sorted(listed, key=lambda need: -need.nbytes)


def check_free(wanted: Iterable[Need], free: Mapping[Tier, int]) -> None:
    """``OutOfMemory`` for the first tier that overflows; it says what would shrink it."""
    held = list(wanted)
    for tier in Tier:
        mine = [need for need in held if need.tier is tier]
        total = sum(need.nbytes for need in mine)
        if total > free[tier]:
            largest = max(mine, key=lambda need: need.nbytes)
            hint = _SHRINK[largest.name]
            raise OutOfMemory(tier.value, total, free[tier], f"{largest.name}; smaller with {hint}")


def ffn_width(found: Scan) -> int:
    """Columns of the MLP's inner activations."""
    model = found.geometry.model
    return (2 if model.gated_ffn else 1) * model.d_ffn


def shared_bytes(found: Scan) -> int:
    """Workspace for queries or the MLP's inner activations: they are never needed at once."""
    model = found.geometry.model
    width = max(model.n_heads * model.head_dim, ffn_width(found))
    return found.max_rows() * width * found.geometry.elem_bytes


def logits_bytes(found: Scan) -> int:
    """Logits of the largest batch."""
    return found.max_seqs() * found.geometry.model.vocab * found.geometry.elem_bytes


def token_bytes(geometry: Geometry) -> int:
    """Token ids of all sequences, prompts and generated ones, 8 bytes each."""
    return sum(
        8 * b.n_seqs * (b.prompt_len + block.max_new)
        for block in geometry.blocks
        for b in block.batches
    )


def padded_step_bytes(found: Scan) -> int:
    """Masks and rotary tables that padded batches hold through a step, each at its largest."""
    geometry, most = found.geometry, dict[tuple[int, int], int]()
    for (g, step, b), rows in found.rows.items():
        made = rows.n_tokens + sum(t.n_tokens for t in found.inputs.get((g, step, b), ()))
        angles = 0 if geometry.model.learned_positions else made * geometry.model.head_dim
        seen = rows.n_front**2 + (rows.stop - rows.start) * rows.stop
        held = geometry.blocks[g].batches[b].n_seqs * (angles * geometry.elem_bytes + seen)
        most[g, b] = max(most.get((g, b), 0), held)
    return sum(most.values())


def max_positions(geometry: Geometry) -> int:
    """Longest sequence of any block."""
    return max(block.max_tokens for block in geometry.blocks)


def transient_bytes(found: Scan, op: Op, ragged: bool) -> int:
    """What torch allocates for a moment inside a forward: norms, attention's output, masks.

    The caching allocator serves these; after the warm-up no forward makes it ask the driver.
    """
    geometry = found.geometry
    model, elem = geometry.model, geometry.elem_bytes
    if op.scope is Scope.HEAD:
        return op.n_seqs * model.d_model * elem
    queries, keys = op.n_new + op.n_recompute + op.n_front, op.n_ctx + op.n_new
    rows, heads = op.n_seqs * queries, model.n_heads * model.head_dim
    held = rows * model.d_model * elem
    if op.scope in (Scope.LAYER, Scope.ATTENTION, Scope.QKV):
        held += 2 * rows * heads * elem
        if op.attention is Attention.UNFUSED:
            scores = rows * model.n_heads * keys
            copies = op.n_seqs * keys * geometry.kv_elems
            held += (2 * scores + copies + 2 * rows * heads) * elem
        if ragged:
            groups = model.n_heads // model.n_kv_heads
            held += rows * keys * (2 + groups * (1 + elem)) + 2 * rows * heads * elem
    # Loaded inputs are normed, and their keys rotated, before anything else is held.
    rotated = 0 if model.learned_positions else model.n_kv_heads * model.head_dim // 2
    return max(held, op.n_project * op.n_seqs * (model.d_model + rotated) * elem)
