"""From a workload setting to a job: which requests run, and in which blocks.

``batch_size`` None means as large as memory allows *without the disk*, for the policy that runs: a
policy that keeps KV on the GPU gets smaller batches than one that keeps it on the host, and one
that may keep smaller things than KV gets larger ones.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

from policies.cost.mixed_bound import possible_placements
from policies.drive import Policy
from policies.errors import Infeasible, OutOfMemory
from policies.placement import Placement
from policies.plan.memory import check_run
from policies.spec.hardware import HardwareProfile
from policies.spec.model import ModelSpec
from policies.spec.workload import Block
from sim.lengths import LengthTrace, read_trace, stratified
from sim.pack import Job, fixed, pack, warn_too_long
from sim.workloads import GENERATED, SHIPPED, generate, shipped

_MAX_AUTO_BATCH = 2**14


@dataclass(frozen=True, slots=True)
class WorkloadSpec:
    """A workload as configured.

    ``source`` is ``fixed`` (``prompt_len``, ``gen_len``), ``path`` (a trace file) or the name of a
    shipped or generated length trace. ``limit`` requests are drawn, length-stratified; responses
    are capped at ``max_new`` tokens; None means all and uncapped. ``n_generated`` is how many
    requests a generator draws (None: as many as its data set has).
    """

    name: str
    source: str
    n_batches: int
    batch_size: int | None
    prompt_len: int = 0
    gen_len: int = 0
    path: str | None = None
    task: str | None = None
    n_generated: int | None = None
    limit: int | None = None
    max_new: int | None = None
    reject_long: bool = False

    def __post_init__(self) -> None:
        known = ("fixed", "path", *SHIPPED, *GENERATED)
        if self.source not in known:
            raise ValueError(f"workload.source: {self.source!r} must be one of {', '.join(known)}")
        required = ["n_batches"] + (["prompt_len", "gen_len"] if self.source == "fixed" else [])
        for name in required:
            if getattr(self, name) < 1:
                raise ValueError(f"workload.{name}: {getattr(self, name)} must be >= 1")
        for name in ("batch_size", "limit", "max_new", "n_generated"):
            value = getattr(self, name)
            if value is not None and value < 1:
                auto = "auto" if name == "batch_size" else "null"
                raise ValueError(f"workload.{name}: {value} must be >= 1 or {auto}")
        if self.source == "fixed":
            for name in ("limit", "max_new", "n_generated"):
                if getattr(self, name) is not None:
                    raise ValueError(
                        f"workload.{name}: {getattr(self, name)} has no meaning with a fixed "
                        "workload, which has n_batches, batch_size, prompt_len and gen_len"
                    )
        if self.source == "path" and not self.path:
            raise ValueError("workload.path: is empty, must name a .csv or .parquet trace")


def make_job(
    spec: WorkloadSpec, model: ModelSpec, hardware: HardwareProfile, policy: Policy, seed: int
) -> Job:
    """The job of a run. ``Infeasible`` if no request is left; ``ValueError`` for a bad trace."""
    fits = fits_without_disk(model, hardware, policy)
    if spec.source == "fixed":
        size = spec.batch_size or _auto_batch(spec, fits)
        job = fixed(spec.n_batches, size, spec.prompt_len, spec.gen_len)
        return _within_positions(job, model.max_positions, spec.reject_long)
    requests = stratified(_trace(spec, seed).offline(), spec.limit, seed)
    return pack(
        requests,
        spec.n_batches,
        spec.batch_size,
        spec.max_new,
        fits,
        model.max_positions,
        spec.reject_long,
    )


def fits_without_disk(
    model: ModelSpec, hardware: HardwareProfile, policy: Policy
) -> Callable[[Block], bool]:
    """Whether a block runs with its GPU slots and no byte on disk, in one placement at least."""

    def fits(block: Block) -> bool:
        blocks = policy.blocks([replace(block, index=0)])
        return any(holds(p, blocks) for p in possible_placements(policy, model, hardware, blocks))

    def holds(placement: Placement, blocks: Sequence[Block]) -> bool:
        on_disk = any(shares.disk > 0 for shares in placement.kv)
        if on_disk or placement.total_weight_bytes(model, "disk"):
            return False
        try:
            check_run(model, hardware, placement, policy.buffers, blocks)
        except OutOfMemory:
            return False
        return True

    return fits


def _auto_batch(spec: WorkloadSpec, fits: Callable[[Block], bool]) -> int:
    """Largest power of two whose block fits; 1 if none does."""
    size = 1
    while size < _MAX_AUTO_BATCH:
        job = fixed(spec.n_batches, 2 * size, spec.prompt_len, spec.gen_len)
        if not fits(job.blocks[0]):
            break
        size *= 2
    return size


def _within_positions(job: Job, max_positions: int, reject_long: bool) -> Job:
    """The job with its count of requests beyond the model's positions: none, or all alike."""
    longest = job.blocks[0].max_tokens
    if longest <= max_positions:
        return job
    if reject_long:
        raise Infeasible(
            f"all {job.n_requests} requests exceed the model's {max_positions} positions (each "
            f"needs {longest}) and reject_long is set"
        )
    warn_too_long(job.n_requests, job.n_requests, max_positions, rejected=False)
    return replace(job, n_too_long=job.n_requests)


def _trace(spec: WorkloadSpec, seed: int) -> LengthTrace:
    if spec.source == "path":
        return read_trace(str(spec.path), spec.task)
    if spec.source in SHIPPED:
        return shipped(spec.source)
    return generate(spec.source, spec.n_generated, seed)
