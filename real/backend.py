"""The engine: takes a plan, makes it ready, runs it, returns its trace.

Everything that can be decided before the run is: memory is planned, checked and allocated, every op
is a closure over views, every event exists. What readers get wrong: the plan is read to its end
before the first op starts, so a policy's solver works before the clock does; ``solve_s`` in its
decisions says how long.
"""

from __future__ import annotations

import gc
import random
import shutil
import time
import uuid
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import torch
from torch import Tensor

from policies.cost.protocol import Costs
from policies.placement import Placement
from policies.plan.link import link
from policies.plan.op import Lane, Op, Tier
from policies.spec.model import ModelSpec
from policies.spec.workload import Block
from policies.trace.span import Span, Trace
from real.architecture import Numerics, check_supported
from real.arena import HostArena
from real.buffers import Buffers
from real.compute import Compute, warm_up_ops
from real.disk import DiskStore
from real.geometry import Geometry, padded
from real.lanes import Clock, HostClock, LaneRunner
from real.layout import edge_shapes
from real.memory import Need, check_free, needs
from real.scan import Scan, scan
from real.streams import CUDA_LANES, CudaClock
from real.transfers import Transfers
from real.weights import Source, WeightHomes, edge_weights

Prompts = Sequence[Sequence[int]]
_WARM_S = 0.2  # of work before the clock starts
_DELAY_S = 2e-3  # longest injected delay
_CYCLES_PER_S = 1.7e9  # of a GPU, about


@dataclass(slots=True)
class Arenas:
    """Host memory that outlives a run, because pinning takes longer than most runs."""

    pinned: HostArena
    pageable: HostArena

    @classmethod
    def of(cls, device: torch.device) -> Arenas:
        """Arenas for a device; on the CPU twin nothing is registered."""
        return cls(HostArena(pinned=device.type == "cuda"), HostArena(pinned=False))

    @property
    def held_bytes(self) -> int:
        """Bytes mapped now."""
        return self.pinned.locked_bytes + self.pageable.locked_bytes

    def close(self) -> None:
        """Let go of all memory."""
        self.pinned.close()
        self.pageable.close()


@dataclass(frozen=True, slots=True)
class Setup:
    """What a run needs besides its plan. ``blocks`` and ``placement`` are the policy's.

    ``poison`` fills what must not be read with NaN; ``delay_seed`` delays ops of every lane at
    random. Neither may change a token.
    """

    model: ModelSpec
    placement: Placement
    blocks: tuple[Block, ...]
    dtype: torch.dtype
    device: torch.device
    source: Source
    prompts: Prompts
    numerics: Numerics = field(default_factory=Numerics)
    gpu_bytes: int | None = None  # None: all that is free
    disk_dir: Path | None = None
    poison: bool = False
    delay_seed: int | None = None
    keep_logits: bool = False

    def __post_init__(self) -> None:
        check_supported(self.model)
        longest = max(block.max_tokens for block in self.blocks)
        if longest > self.model.max_positions:
            raise ValueError(
                f"blocks: a sequence of {longest} tokens exceeds model.max_positions "
                f"{self.model.max_positions}"
            )
        dealt = [batch.n_seqs for block in self.blocks for batch in block.batches]
        if sum(dealt) != len(self.prompts):
            raise ValueError(f"prompts: {len(self.prompts)} for {sum(dealt)} sequences")

    @property
    def dealt(self) -> list[Prompts]:
        """Prompts of each batch, in order of the blocks."""
        out, at = [], 0
        for block in self.blocks:
            for batch in block.batches:
                held = self.prompts[at : at + batch.n_seqs]
                at += batch.n_seqs
                for prompt in held:
                    if not 1 <= len(prompt) <= batch.prompt_len:
                        raise ValueError(
                            f"prompts: one has {len(prompt)} tokens, its batch takes 1 to "
                            f"{batch.prompt_len}"
                        )
                    if min(prompt) < 0 or max(prompt) >= self.model.vocab:
                        raise ValueError(
                            f"prompts: token ids must be in 0..{self.model.vocab - 1}, one has "
                            f"{min(prompt)}..{max(prompt)}"
                        )
                out.append(held)
        return out

    @property
    def ragged(self) -> bool:
        """Whether any prompt is padded."""
        batches = [batch for block in self.blocks for batch in block.batches]
        return any(
            len(prompt) < batch.prompt_len
            for batch, held in zip(batches, self.dealt, strict=True)
            for prompt in held
        )


@dataclass(slots=True)
class RealBackend:
    """Runs plans on a device. ``prepare`` once, ``execute`` as often as wanted; ``run`` does both.

    After ``prepare``: ``wanted`` (every buffer), ``build_s``, ``pin_s``. After ``execute``:
    ``tokens()`` and, if asked for, ``logits``.
    """

    setup: Setup
    costs: Costs
    arenas: Arenas
    wanted: list[Need] = field(default_factory=list)
    logits: dict[tuple[int, int, int], Tensor] = field(default_factory=dict)
    build_s: float = 0.0
    pin_s: float = 0.0
    _scan: Scan | None = None
    _buffers: Buffers | None = None
    _clock: CudaClock | HostClock | None = None
    _runs: list[Callable[[], object]] = field(default_factory=list)

    def run(self, ops: Iterable[Op]) -> Trace:
        """Prepare and execute a plan."""
        self.prepare(ops)
        return self.execute()

    # ---- before ---------------------------------------------------------------------------

    def prepare(self, ops: Iterable[Op]) -> None:
        """Plan memory, check it, allocate it, fill the weights, make every op a closure.

        ``OutOfMemory`` names the tier that overflows, before anything is allocated.
        """
        with torch.inference_mode():
            self._prepare(ops)

    def _prepare(self, ops: Iterable[Op]) -> None:
        start_s = time.perf_counter()
        setup = self.setup
        geometry = Geometry(setup.model, setup.placement, setup.blocks, setup.dtype)
        found = self._scan = scan(link(ops), geometry)
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
        self._compile(found, buffers)
        self.pin_s = self.arenas.pinned.pin_s + self.arenas.pageable.pin_s
        self.build_s = time.perf_counter() - start_s - self.pin_s

    def _compile(self, found: Scan, buffers: Buffers) -> None:
        setup = self.setup
        record = self._keep if setup.keep_logits else None
        transfers = Transfers(buffers, poison=setup.poison)
        compute = Compute(buffers, poison=setup.poison, record=record)
        moved = transfers.kinds
        self._runs = [
            (transfers if item.op.kind in moved else compute).make(item.op) for item in found.linked
        ]
        if setup.device.type == "cuda":
            self._clock = CudaClock(found.linked, setup.device)
            buffers.load_prompts(setup.dealt)
            self._warm_up(found, self._clock)
        else:
            self._clock = HostClock(len(found.linked))
        self.logits.clear()

    def _warm_up(self, found: Scan, clock: CudaClock) -> None:
        """Run one forward of each shape on the compute stream; what they write is not read.

        On the thread that will compute: cuBLAS and cuDNN keep handles and plans per thread.
        """
        torch.cuda.synchronize(self.setup.device)  # weights and prompts came on another stream
        with torch.inference_mode():
            clock.bind(Lane.COMPUTE)
            for index in warm_up_ops([item.op for item in found.linked]):
                self._runs[index]()
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
        with torch.inference_mode():
            if self.setup.poison:
                buffers.poison()
            # Poison also marks tokens that are not sampled yet: no embedding has row -1.
            buffers.load_prompts(self.setup.dealt, -1 if self.setup.poison else 0)
        delay = self._delay(clock)
        runner = LaneRunner(found.linked, self._runs, clock, delay)
        if self.setup.device.type == "cuda":
            _raise_clocks(self.setup.device)
        clock.begin()
        runner.run()
        spans = [
            Span(op.key, op.kind, op.lane, start_s, end_s, self.costs.nbytes(op),
                 self.costs.flops(op))
            for (_, op, _), (start_s, end_s) in zip(found.linked, clock.times(), strict=True)
        ]  # fmt: skip
        return Trace(tuple(spans))

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
