"""Which of an op's slots is which: slots are told apart by the names that ``policies.slots`` gives.

Names come from its constructors, so a renamed slot cannot be missed. What readers get wrong: the
thread that issues work is a host slot too, but holds nothing.
"""

from __future__ import annotations

from collections.abc import Iterable

from policies import slots
from policies.plan.op import Op, Slot, Tier

_WEIGHT_SLOT = slots.weight_slot(0).name.removesuffix("0")
_KV_IN = slots.kv_in(0).name.removesuffix("0")
_KV_OUT = slots.kv_out(0).name.removesuffix("0")
_STAGING = slots.staging(Slot("", Tier.GPU)).name
_RELAY = slots.relay("", Slot("", Tier.GPU), 0).name.split()[0]
_INPUTS_IN = slots.inputs_in(0).name.removesuffix("0")
_INPUTS_OUT = slots.inputs_out(0).name.removesuffix("0")
_HOST_INPUTS = slots.host_inputs(0, 0).name.removesuffix("l0/b0")
_HOST_KV = slots.host_kv(0, 0).name.removesuffix("l0/b0")
_GPU_KV = slots.resident_kv(0, 0).name.removesuffix("l0/b0")


def host_slots(touched: Iterable[Slot]) -> list[Slot]:
    """Host slots that hold data."""
    return [slot for slot in touched if slot.tier is Tier.HOST and slot != slots.THREAD]


def is_home(slot: Slot) -> bool:
    """Whether a host slot is a home of KV or of layer inputs, not a buffer on the way."""
    return slot.name.startswith((_HOST_KV, _HOST_INPUTS))


def is_relay(slot: Slot) -> bool:
    """Whether a host slot lies between pageable memory and the GPU."""
    return slot.name.startswith(_RELAY)


def is_staging(slot: Slot) -> bool:
    """Whether a host slot lies between the disk and something else."""
    return slot.name.startswith(_STAGING)


def weight_slot(op: Op) -> Slot | None:
    """The slot from which a forward takes streamed weights."""
    return next((s for s in op.reads if s.name.startswith(_WEIGHT_SLOT)), None)


def loaded_kv(op: Op) -> Slot | None:
    """The slot in which a forward finds loaded KV."""
    return next((s for s in op.reads if s.name.startswith(_KV_IN)), None)


def stored_kv(op: Op) -> Slot | None:
    """The slot in which a forward leaves KV that is to be stored."""
    return next((s for s in op.writes if s.name.startswith(_KV_OUT)), None)


def loaded_inputs(op: Op) -> Slot | None:
    """The slot in which a forward finds loaded layer inputs."""
    return next((s for s in op.reads if s.name.startswith(_INPUTS_IN)), None)


def stored_inputs(op: Op) -> Slot | None:
    """The slot in which a forward leaves layer inputs that are to be stored."""
    return next((s for s in op.writes if s.name.startswith(_INPUTS_OUT)), None)


def resident_kv(op: Op) -> Slot | None:
    """The home on the GPU that a forward extends."""
    return next((s for s in op.writes if s == slots.resident_kv(op.layer, op.batch)), None)


def group(slot: Slot) -> str:
    """What a slot is for, as reports call it."""
    if slot.name.startswith(_WEIGHT_SLOT):
        return "weight slots"
    if slot.name.startswith((_KV_IN, _KV_OUT)):
        return "KV slots"
    if slot.name.startswith((_INPUTS_IN, _INPUTS_OUT)):
        return "layer input slots"
    if slot.name.startswith((_HOST_KV, _GPU_KV)):
        return "KV"
    if slot.name.startswith(_HOST_INPUTS):
        return "layer inputs"
    return "staging" if slot.tier is Tier.HOST else "hidden states"
