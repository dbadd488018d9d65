"""Names of the buffers that schedules use: checker and backends tell buffers apart by name.

A *home* holds something for a block's or a run's life (``host/kv/...``, ``gpu/weights/...``); every
other slot is a transfer buffer that op after op reuses. ``turn`` is the number of such a buffer
among its like.
"""

from __future__ import annotations

from policies.plan.op import Slot, Tier

Slots = tuple[Slot, ...]

THREAD = Slot("issuing thread", Tier.HOST)  # a pageable copy occupies the thread that issues work
DISK_WEIGHTS = Slot("disk/weights", Tier.DISK)


def host_weights(pinned: bool = True) -> Slot:
    """Home of all weights in host memory."""
    return Slot("host/weights", Tier.HOST, pinned)


def resident_weights(layer: int) -> Slot:
    """Home of what a layer keeps on the GPU."""
    return Slot(f"gpu/weights/l{layer}", Tier.GPU)


def weight_slot(turn: int) -> Slot:
    """Buffer of one streamed layer, or of its attention or MLP."""
    return Slot(f"gpu/weight slot/{turn}", Tier.GPU)


def resident_kv(layer: int, batch: int) -> Slot:
    """Home of a batch's KV on the GPU."""
    return Slot(f"gpu/kv/l{layer}/b{batch}", Tier.GPU)


def host_kv(layer: int, batch: int, pinned: bool = True) -> Slot:
    """Home of a batch's KV in host memory."""
    return Slot(f"host/kv/l{layer}/b{batch}", Tier.HOST, pinned)


def disk_kv(layer: int, batch: int) -> Slot:
    """Home of a batch's KV on disk."""
    return Slot(f"disk/kv/l{layer}/b{batch}", Tier.DISK)


def kv_in(turn: int) -> Slot:
    """Buffer of one batch's loaded KV."""
    return Slot(f"gpu/kv in/{turn}", Tier.GPU)


def kv_out(turn: int) -> Slot:
    """Buffer of the KV that one batch computed and still has to store."""
    return Slot(f"gpu/kv out/{turn}", Tier.GPU)


def host_inputs(layer: int, batch: int) -> Slot:
    """Home of a batch's layer inputs in host memory."""
    return Slot(f"host/inputs/l{layer}/b{batch}", Tier.HOST)


def disk_inputs(layer: int, batch: int) -> Slot:
    """Home of a batch's layer inputs on disk."""
    return Slot(f"disk/inputs/l{layer}/b{batch}", Tier.DISK)


def inputs_in(turn: int) -> Slot:
    """Buffer of one batch's loaded layer inputs."""
    return Slot(f"gpu/inputs in/{turn}", Tier.GPU)


def inputs_out(turn: int) -> Slot:
    """Buffer of the layer inputs that one batch still has to store."""
    return Slot(f"gpu/inputs out/{turn}", Tier.GPU)


def staging(slot: Slot, part: int | None = None) -> Slot:
    """Pinned host buffer between the disk and ``slot``."""
    suffix = "" if part is None else f"/{part}"
    return Slot(f"host/staging/{slot.name}{suffix}", Tier.HOST)


def relay(direction: str, slot: Slot, half: int) -> Slot:
    """Pinned host buffer between pageable memory and ``slot``; ``direction`` is in or out."""
    return Slot(f"host/relay {direction}/{slot.name}/{half}", Tier.HOST)


def hidden(batch: int) -> Slot:
    """A batch's hidden states on the GPU."""
    return Slot(f"gpu/hidden/b{batch}", Tier.GPU)


def host_hidden(batch: int) -> Slot:
    """A batch's hidden states in host memory."""
    return Slot(f"host/hidden/b{batch}", Tier.HOST)


def queries(batch: int) -> Slot:
    """A batch's projected queries, keys and values on their way to CPU attention."""
    return Slot(f"host/queries/b{batch}", Tier.HOST)


def attention_output(batch: int) -> Slot:
    """What CPU attention computed for a batch, in host memory."""
    return Slot(f"host/out/b{batch}", Tier.HOST)


def attended(batch: int) -> Slot:
    """The same on the GPU."""
    return Slot(f"gpu/attended/b{batch}", Tier.GPU)
