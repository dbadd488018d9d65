"""What any policy must keep, checked without an executor: call it first on a policy of your own.

``check_policy(policy)`` plans a few small jobs and raises at the first law that a plan breaks;
``policy_checks`` yields the same checks one by one, so that a test names each. What readers get
wrong: passing says that a plan is *right* (it computes what it should from data that is where it
should be), not that it is fast.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from functools import cache, partial

from policies.cost.model import CostModel
from policies.drive import Policy, drive
from policies.errors import OutOfMemory, PlanError
from policies.placement import Placement
from policies.plan.check import PlanChecker
from policies.plan.memory import check_run
from policies.plan.op import Op, Slot
from policies.spec.curve import Curve, Grid
from policies.spec.hardware import HardwareProfile, Link
from policies.spec.model import ModelSpec
from policies.spec.workload import Batch, Block

Check = Callable[[], None]

DETERMINISM = "the same input gives the same ops"
BLOCKS = "blocks keep every sequence and its length"
BUFFERS = "a plan uses no more slots than its memory plan books"
MEMORY = "a plan fits its memory or OutOfMemory names the tier"
LINEAR = "op count grows linearly in layers, batches and steps"

# Laws that the plan checker knows, by how its rules begin.
_PLAN_LAWS = {
    "keys are unique": "L3",
    "KV coverage": "L4",
    "weight coverage": "L5",
    "slots are written before they are read": "slots",
    "no op works past the last step": "L15",
}
# Eight times the size may have eight times the ops, and twice that where weights get cut finer.
_SIZES, _FINER = (2, 16), 2


@dataclass(frozen=True, slots=True)
class _Job:
    """A small job on a small machine."""

    model: ModelSpec
    hardware: HardwareProfile
    blocks: tuple[Block, ...]


def check_policy(policy: Policy) -> None:
    """Run all checks; ``PlanError``, or whatever the policy raises, for the first that fails."""
    for _, check in policy_checks(policy):
        check()


def policy_checks(policy: Policy) -> Iterator[tuple[str, Check]]:
    """Pairs of a name (law, job) and a check that raises ``PlanError`` if the law is broken."""
    for name, job in _jobs().items():
        yield f"{BLOCKS} [{name}]", partial(_check_blocks, policy, job)
        planned = cache(partial(_plan, policy, job))
        yield f"{DETERMINISM} [{name}]", partial(_check_determinism, policy, job)
        for law, rule in _PLAN_LAWS.items():
            yield f"{law} [{name}]", partial(_check_law, planned, rule)
        yield f"{BUFFERS} [{name}]", partial(_check_buffers, policy, planned)
        yield f"{MEMORY} [{name}]", partial(_check_memory, policy, job)
    tight = _jobs()["batches"]
    tight = replace(tight, hardware=replace(tight.hardware, gpu_bytes=1e6, gpu_reserve_bytes=0))
    yield f"{MEMORY} [no GPU memory]", partial(_check_refused, policy, tight)
    for axis in ("layers", "batches", "steps"):
        yield f"{LINEAR} [{axis}]", partial(_check_linear, policy, axis)


# ---- checks -----------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class _Plan:
    """Ops of a job and what they were planned for."""

    ops: list[Op]
    model: ModelSpec
    placement: Placement
    blocks: tuple[Block, ...]


def _plan(policy: Policy, job: _Job) -> _Plan:
    blocks = policy.blocks(job.blocks)
    placement = policy.place(job.model, job.hardware, blocks)
    belief = CostModel(job.model, job.hardware, placement)
    return _Plan(list(drive(policy, blocks, belief)), job.model, placement, blocks)


def _check_blocks(policy: Policy, job: _Job) -> None:
    blocks = policy.blocks(job.blocks)
    before = sum(b.n_seqs * b.max_new for b in job.blocks)
    after = sum(b.n_seqs * b.max_new for b in blocks)
    if before != after or [b.index for b in blocks] != list(range(len(blocks))):
        raise PlanError(
            policy.name,
            f"{BLOCKS}: {before} tokens to generate became {after} in blocks "
            f"{[b.index for b in blocks]}",
        )


def _check_determinism(policy: Policy, job: _Job) -> None:
    first, second = _plan(policy, job).ops, _plan(policy, job).ops
    for one, two in zip(first, second, strict=False):
        if one != two:
            raise PlanError(one.key, DETERMINISM)
    if len(first) != len(second):
        raise PlanError(policy.name, f"{DETERMINISM}: {len(first)} ops, then {len(second)}")


def _check_law(planned: Callable[[], _Plan], law: str) -> None:
    plan = planned()
    checker = PlanChecker(plan.model, plan.placement, plan.blocks)
    for op in plan.ops:
        try:
            checker.check(op)
        except PlanError as error:
            if error.rule.startswith(law):
                raise
            # Another law is broken here: its own check says so.


def _check_buffers(policy: Policy, planned: Callable[[], _Plan]) -> None:
    booked = {
        "gpu/weight slot/": policy.buffers.weight_slots,
        "gpu/kv in/": policy.buffers.kv_in_slots,
        "gpu/kv out/": policy.buffers.kv_out_slots,
        "gpu/inputs in/": policy.buffers.input_slots,
        "gpu/inputs out/": policy.buffers.input_slots,
    }
    used: dict[str, set[Slot]] = {name: set() for name in booked}
    for op in planned().ops:
        for slot in (*op.reads, *op.writes):
            for name, slots in used.items():
                if slot.name.startswith(name):
                    slots.add(slot)
                    if len(slots) > booked[name]:
                        raise PlanError(op.key, f"{BUFFERS}: {slot.name}, booked {booked[name]}")


def _memory_error(policy: Policy, job: _Job) -> OutOfMemory | None:
    blocks = policy.blocks(job.blocks)
    try:
        placement = policy.place(job.model, job.hardware, blocks)
        check_run(job.model, job.hardware, placement, policy.buffers, blocks)
    except OutOfMemory as error:
        return error
    return None


def _check_memory(policy: Policy, job: _Job) -> None:
    error = _memory_error(policy, job)
    if error is not None and not (error.need_bytes > error.have_bytes and error.key):
        raise PlanError(policy.name, f"{MEMORY}: {error}")


def _check_refused(policy: Policy, job: _Job) -> None:
    error = _memory_error(policy, job)
    if error is None or error.tier != "gpu":
        raise PlanError(policy.name, f"{MEMORY}: no weights fit the GPU, got {error}")


def _check_linear(policy: Policy, axis: str) -> None:
    counts = []
    for n in _SIZES:
        size = {"layers": 2, "batches": 2, "steps": 3} | {axis: n}
        block = Block(0, (Batch(4, 128),) * size["batches"], size["steps"])
        job = _Job(replace(_model(), n_layers=size["layers"]), _hardware(), (block,))
        counts.append(len(_plan(policy, job).ops))
    if counts[1] * _SIZES[0] > _FINER * counts[0] * _SIZES[1]:
        raise PlanError(
            policy.name,
            f"{LINEAR}: {counts[0]} ops for {_SIZES[0]} {axis}, {counts[1]} for {_SIZES[1]}",
        )


# ---- jobs -------------------------------------------------------------------------------------


def _jobs() -> dict[str, _Job]:
    """Jobs that hold every degenerate size between them."""
    model, hardware = _model(), _hardware()
    batches = tuple(Batch(n, p) for n, p in ((8, 200), (8, 64), (3, 1)))

    def job(blocks: tuple[Block, ...], **changes: float) -> _Job:
        return _Job(replace(model, n_layers=int(changes.get("n_layers", 2))), hardware, blocks)

    return {
        "batches": job((Block(0, batches, 4),)),
        "one batch": job((Block(0, batches[:1], 3),)),
        "one layer": job((Block(0, batches, 3),), n_layers=1),
        "one token": job((Block(0, batches, 1),)),
        "two tokens": job((Block(0, batches, 2),)),
        "blocks": job((Block(0, batches, 2), Block(1, batches[1:], 3))),
        "ones": job((Block(0, (Batch(1, 1),), 2),), n_layers=1),
    }


def _model() -> ModelSpec:
    """A dense model with layers large enough to be cut into slices."""
    return ModelSpec(
        name="conformance",
        n_layers=2,
        d_model=2048,
        n_heads=16,
        n_kv_heads=16,
        head_dim=128,
        d_ffn=8192,
        vocab=1024,
        max_positions=1024,
        gated_ffn=False,
        tied_embeddings=True,
    )


def _hardware() -> HardwareProfile:
    """Round numbers of a small machine; host memory for any buffer that a policy may want."""
    copy = Link(1e-5, 1e10)
    return HardwareProfile(
        name="conformance",
        gpu_bytes=16e9,
        host_bytes=64e9,
        disk_bytes=1e12,
        gpu_reserve_bytes=0.0,
        host_reserve_bytes=0.0,
        disk_reserve_bytes=0.0,
        h2d=copy,
        d2h=copy,
        h2d_pageable=Link(2e-5, 5e9),
        d2h_pageable=Link(2e-5, 5e9),
        duplex=1.0,
        disk_read=Link(1e-4, 2e9),
        disk_write=Link(1e-4, 1e9),
        host_copy=Link(5e-6, 1e10),
        hbm_bytes_per_s=1e12,
        gemm=Curve((1, 1024), (1e12, 1e14)),
        attention_decode=Curve((1024,), (1e12,)),
        attention_prefill=Curve((1024,), (5e13,)),
        attention_window=Grid((64,), (1024,), ((2e13,),)),
        cpu_attention_bytes_per_s=1e10,
        cpu_bytes_per_s=4e10,
        launch_s=1e-5,
        sync_s=2e-5,
        idle_watts=30.0,
        tdp_watts=300.0,
    )
