"""The engine: takes a plan, makes it ready, runs it, returns its trace.

Everything that can be decided before the run is: memory is planned, checked and allocated, every op
is a closure over views, every event exists. What readers get wrong: the plan is read to its end
before the first op starts, so a policy's solver works before the clock does; ``solve_s`` in its
decisions says how long. Only a policy with feedback decides during the run
(``real.closed_loop``): its memory is planned from plans that bound all that it may decide.
"""

from __future__ import annotations

import gc
import random
import shutil
import time
import uuid
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import torch
from torch import Tensor

from policies.cost.protocol import Costs
from policies.plan.link import LinkedOp, link
from policies.plan.op import LANE_OF, Lane, Op, Tier
from policies.trace.span import Span, Trace
from real.buffers import Buffers
from real.closed_loop import ClosedLoop, Plan
from real.compute import Compute, warm_up_ops, warm_up_shape
from real.disk import DiskStore
from real.fed_lanes import FedRunner
from real.geometry import Geometry, padded
from real.lanes import Clock, HostClock, LaneRunner, Run
from real.layout import edge_shapes
from real.memory import Need, check_free, needs
from real.scan import Scan, envelope, scan
from real.setup import Arenas, Setup
from real.streams import CUDA_LANES, CudaClock
from real.transfers import Transfers
from real.weights import WeightHomes, edge_weights

_WARM_S = 0.2  # of work before the clock starts
_DELAY_S = 2e-3  # longest injected delay
_CYCLES_PER_S = 1.7e9  # of a GPU, about


@dataclass(slots=True)
class RealBackend:
    """Runs plans on a device. ``prepare`` once, ``execute`` as often as wanted; ``run`` does both.

    ``prepare_steps`` and ``execute_steps`` are the same for a plan that is emitted while it runs.
    After ``prepare``: ``wanted`` (every buffer), ``build_s``, ``pin_s``. After ``execute``:
    ``tokens()``, ``linked`` and, if asked for, ``logits``.
    """

    setup: Setup
    costs: Costs
    arenas: Arenas
    wanted: list[Need] = field(default_factory=list)
    logits: dict[tuple[int, int, int], Tensor] = field(default_factory=dict)
    build_s: float = 0.0
    pin_s: float = 0.0
    loop: ClosedLoop | None = None  # of the last closed-loop run
    _scan: Scan | None = None
    _booked: Scan | None = None  # what a closed loop may use
    _compute: Compute | None = None
    _inline: bool = False  # of a closed loop: no lane is a host lane
    _buffers: Buffers | None = None
    _clock: CudaClock | HostClock | None = None
    _runs: list[Run] = field(default_factory=list)

    def run(self, ops: Iterable[Op]) -> Trace:
        """Prepare and execute a plan."""
        self.prepare(ops)
        return self.execute()

    # ---- before ---------------------------------------------------------------------------

    def prepare(self, ops: Iterable[Op]) -> None:
        """Plan memory, check it, allocate it, fill the weights, make every op a closure.

        ``OutOfMemory`` names the tier that overflows, before anything is allocated.
        """
        start_s = time.perf_counter()
        with torch.inference_mode():
            found = self._scan = scan(link(ops), self._geometry)
            buffers = self._allocate(found)
            self._compile(found, buffers)
        self._note_build(start_s)

    def prepare_steps(self, plans: Iterable[Iterable[Op]]) -> None:
        """Get ready for a plan of which only bounds are known.

        No step may need more of any buffer than one of ``plans``, whole plans of the same job.
        Forwards of all of them are run to warm up; other shapes meet libraries that choose their
        kernels at first sight.
        """
        start_s = time.perf_counter()
        with torch.inference_mode():
            scans = [scan(link(ops), self._geometry) for ops in plans]
            booked = self._booked = envelope(scans)
            buffers = self._allocate(booked)
            self._compute = self._make_compute(buffers)
            clock = self._clock = self._make_clock([])
            lanes = {LANE_OF[item.op.kind] for found in scans for item in found.linked}
            self._inline = all(map(clock.is_async, lanes))
            if isinstance(clock, CudaClock):
                buffers.load_prompts(self.setup.dealt)
                self._warm_up(clock, _forwards(scans, buffers, self._compute))
        self._note_build(start_s)

    @property
    def _geometry(self) -> Geometry:
        setup = self.setup
        return Geometry(setup.model, setup.placement, setup.blocks, setup.dtype)

    def _allocate(self, found: Scan) -> Buffers:
        """Plan memory, check it, allocate it, fill the weights."""
        setup, geometry = self.setup, found.geometry
        weights = WeightHomes(geometry, found.streamed)
        self.wanted = needs(found, _weight_bytes(weights), setup.ragged)
        check_free(self.wanted, self._free())
        disk = self._open_disk(found, weights)
        edge, _ = edge_weights(geometry, setup.source, setup.device)
        buffers = self._buffers = Buffers(
            found, weights, edge, setup.numerics, setup.device,
            self.arenas.pinned, self.arenas.pageable, disk,
        )  # fmt: skip
        buffers.allocate_host()
        weights.allocate_resident(setup.device)
        buffers.allocate_gpu(setup.dealt)
        weights.fill(setup.source, disk)
        if disk is not None:
            disk.settle()
        return buffers

    def _note_build(self, start_s: float) -> None:
        self.pin_s = self.arenas.pinned.pin_s + self.arenas.pageable.pin_s
        self.build_s = time.perf_counter() - start_s - self.pin_s

    def _make_compute(self, buffers: Buffers) -> Compute:
        record = self._keep if self.setup.keep_logits else None
        return Compute(buffers, poison=self.setup.poison, record=record)

    def _make_clock(self, linked: Sequence[LinkedOp]) -> CudaClock | HostClock:
        device = self.setup.device
        return CudaClock(linked, device) if device.type == "cuda" else HostClock(len(linked))

    def _compile(self, found: Scan, buffers: Buffers) -> None:
        make = _maker(buffers, self._make_compute(buffers), poison=self.setup.poison)
        self._runs = [make(item.op) for item in found.linked]
        clock = self._clock = self._make_clock(found.linked)
        if isinstance(clock, CudaClock):
            buffers.load_prompts(self.setup.dealt)
            chosen = warm_up_ops([item.op for item in found.linked])
            self._warm_up(clock, (self._runs[index] for index in chosen))
        self.logits.clear()

    def _warm_up(self, clock: CudaClock, forwards: Iterable[Run]) -> None:
        """Run one forward of each shape on the compute stream; what they write is not read.

        On the thread that will compute: cuBLAS and cuDNN keep handles and plans per thread.
        """
        torch.cuda.synchronize(self.setup.device)  # weights and prompts came on another stream
        with torch.inference_mode():
            clock.bind(Lane.COMPUTE)
            for run in forwards:
                run()
        torch.cuda.synchronize(self.setup.device)
        clock.release()

    def _keep(self, block: int, step: int, batch: int, logits: Tensor) -> None:
        self.logits[block, step, batch] = logits.clone()

    def _free(self) -> dict[Tier, int]:
        """Bytes that a run may still take of each tier."""
        setup = self.setup
        gpu = setup.gpu_bytes
        if setup.device.type == "cuda":
            free, _ = torch.cuda.mem_get_info(setup.device)
            free += torch.cuda.memory_reserved(setup.device)
            gpu = free if gpu is None else min(gpu, free)
        disk = shutil.disk_usage(setup.disk_dir).free if setup.disk_dir else 0
        host = available_bytes() + self.arenas.held_bytes
        return {Tier.GPU: host if gpu is None else gpu, Tier.HOST: host, Tier.DISK: disk}

    def _open_disk(self, found: Scan, weights: WeightHomes) -> DiskStore | None:
        sizes = weights.disk_sizes()
        sizes |= found.on_disk
        if not sizes or self.setup.disk_dir is None:
            return None
        disk = DiskStore(self.setup.disk_dir, f"offload-{uuid.uuid4().hex}.bin")
        disk.create(sizes)
        return disk

    # ---- the run --------------------------------------------------------------------------

    def execute(self) -> Trace:
        """Run the prepared plan from an idle device to an idle device."""
        found, buffers, clock = self._scan, self._buffers, self._clock
        if found is None or buffers is None or clock is None:
            raise RuntimeError("engine: execute needs a prepared plan")
        self._reset(buffers)
        runner = LaneRunner(found.linked, self._runs, clock, self._delay(clock))
        self._begin(clock)
        runner.run()
        return self._trace(found, clock)

    def execute_steps(self, plan: Plan) -> Trace:
        """The same for a plan that is emitted while it runs; its first steps are before."""
        booked, buffers, clock, compute = self._booked, self._buffers, self._clock, self._compute
        if booked is None or buffers is None or clock is None or compute is None:
            raise RuntimeError("engine: execute_steps needs plans that bound the one to run")
        self.logits.clear()
        found = self._scan = buffers.found = Scan(booked.geometry, [])
        clock.forget()
        runner = FedRunner(clock, self._delay(clock), inline=self._inline)
        make = _maker(buffers, compute, poison=self.setup.poison)
        loop = self.loop = ClosedLoop(found, booked, clock, runner, make, self.costs)
        with torch.inference_mode():
            loop.start(plan)
        self._reset(buffers)
        self._begin(clock)
        loop.run()
        return self._trace(found, clock)

    def _reset(self, buffers: Buffers) -> None:
        with torch.inference_mode():
            if self.setup.poison:
                buffers.poison()
            # Poison also marks tokens that are not sampled yet: no embedding has row -1.
            buffers.load_prompts(self.setup.dealt, -1 if self.setup.poison else 0)

    def _begin(self, clock: CudaClock | HostClock) -> None:
        if self.setup.device.type == "cuda":
            _raise_clocks(self.setup.device)
        clock.begin()

    def _trace(self, found: Scan, clock: CudaClock | HostClock) -> Trace:
        spans = [
            Span(op.key, op.kind, op.lane, start_s, end_s, self.costs.nbytes(op),
                 self.costs.flops(op))
            for (_, op, _), (start_s, end_s) in zip(found.linked, clock.times(), strict=True)
        ]  # fmt: skip
        return Trace(tuple(spans))

    @property
    def linked(self) -> list[LinkedOp]:
        """Ops of the last run and what they waited for."""
        if self._scan is None:
            raise RuntimeError("engine: no plan has run")
        return self._scan.linked

    def tokens(self) -> list[list[int]]:
        """Generated tokens of every sequence, in order of the prompts."""
        out: list[list[int]] = []
        if self._buffers is None or self._scan is None:
            raise RuntimeError("engine: no plan has run")
        for (g, b), state in self._buffers.states.items():
            first = self.setup.blocks[g].batches[b].prompt_len
            steps = 1 + max(s for g_, s, b_ in self._scan.rows if (g_, b_) == (g, b))
            out.extend(state.tokens[first : first + steps].t().cpu().tolist())
        return out

    @property
    def direct_io(self) -> bool | None:
        """Whether the disk was read past the page cache; None without a disk."""
        disk = None if self._buffers is None else self._buffers.disk
        return None if disk is None else disk.direct

    def close(self) -> None:
        """Remove the disk file and let go of all buffers; the arenas stay."""
        if self._buffers is not None and self._buffers.disk is not None:
            self._buffers.disk.close()
        self._buffers = self._scan = self._clock = None
        self._booked = self._compute = self.loop = None
        self._runs = []
        self.logits = {}
        if self.setup.device.type == "cuda":
            gc.collect()  # memory goes when its last view does
            torch.cuda.empty_cache()

    def _delay(self, clock: Clock) -> Callable[[Lane], None] | None:
        if self.setup.delay_seed is None:
            return None
        draws = {lane: random.Random(f"{self.setup.delay_seed}/{lane}") for lane in Lane}  # noqa: S311

        def delay(lane: Lane) -> None:
            seconds = draws[lane].uniform(-2.0, 1.0) * _DELAY_S  # two of three ops have none
            if seconds <= 0:
                return
            if lane in CUDA_LANES and clock.is_async(lane):
                torch.cuda._sleep(int(seconds * _CYCLES_PER_S))
            else:
                time.sleep(seconds)

        return delay


def _maker(buffers: Buffers, compute: Compute, *, poison: bool) -> Callable[[Op], Run]:
    """Makes the closures of a plan's ops, in program order."""
    transfers = Transfers(buffers, poison=poison)
    moved = transfers.kinds
    return lambda op: (transfers if op.kind in moved else compute).make(op)


def _forwards(scans: Sequence[Scan], buffers: Buffers, compute: Compute) -> Iterator[Run]:
    """Forwards of several plans that between them run every kernel, each shape once."""
    seen: set[object] = set()
    for found in scans:
        buffers.found = found
        for index in warm_up_ops([item.op for item in found.linked]):
            op = found.linked[index].op
            shape = warm_up_shape(op)
            if shape not in seen:
                seen.add(shape)
                yield compute.make(op)


def _raise_clocks(device: torch.device) -> None:
    """Keep the device busy for a moment: an idle one takes tens of milliseconds to speed up."""
    a = torch.ones(2048, 2048, dtype=torch.float16, device=device)
    deadline_s = time.perf_counter() + _WARM_S
    while time.perf_counter() < deadline_s:
        for _ in range(16):
            torch.mm(a, a)
        torch.cuda.synchronize(device)


def _weight_bytes(weights: WeightHomes) -> dict[str, int]:
    geometry = weights.geometry
    edge = sum(torch.Size(shape).numel() for shape in edge_shapes(geometry.model).values())
    return {
        "resident": weights.resident_bytes(),
        "host": sum(padded(n) for n in weights.host_sizes().values()),
        "disk": sum(padded(n) for n in weights.disk_sizes().values()),
        "edge": edge * geometry.elem_bytes,
    }


def available_bytes() -> int:
    """Host memory that can be taken without swapping (``MemAvailable``)."""
    for line in Path("/proc/meminfo").read_text(encoding="ascii").splitlines():
        name, value = line.split(":")
        if name == "MemAvailable":
            return int(value.split()[0]) * 1024
    raise RuntimeError("/proc/meminfo: has no MemAvailable")
