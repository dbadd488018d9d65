"""Timers: the forms in which seconds are taken, on CUDA and on a CPU that plays the device.

A rate is measured in the form in which the simulator uses it. A *kernel* is device time with its
issue hidden (launch cost is a number of its own); a *copy* is the span between two events on a
copy stream, as the engine records it; a *blocking* call is host time until its effect is there; an
*issue* is host time alone. What readers get wrong: without something in front of them, short
kernels run at the pace at which Python issues them, and one measures Python.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from calibrate.nvml import Nvml

if TYPE_CHECKING:
    from torch import Tensor

    from real.arena import HostArena

Call = Callable[[int], object]

_MAX_QUEUED = 1000  # what a CUDA queue holds
_MAX_CALLS = 100  # of one repeat: all are queued at once
_COVER_S = 40e-6  # longest issue of one call that a kernel in front has to cover
_GEMMS_S, _GEMMS_SHARE = 1e-3, 3.0  # GEMMs before a call: least seconds, least share of its own
_MAX_AMID = 10  # calls of a repeat amid GEMMs
_BESIDE_BYTES = 64 * 2**20  # of each H2D copy beside another call
_COVER_HZ = 2e9  # clock of that kernel; a lower one only covers longer


class Bench:
    """A device, its timers and buffers.

    ``threads``: of torch on the CPU; None leaves them as they are. On a machine that others use
    too, fewer threads than cores keep a copy from waiting for a thread that is not scheduled.
    ``min_s`` is the least time of one repeat, ``n_repeats`` how many raw repeats are kept, and
    ``heat_s`` how long work runs before large points, so that clocks are those of sustained work.
    """

    def __init__(
        self,
        device: str,
        disk_dir: Path | None,
        seed: int,
        min_s: float,
        n_repeats: int,
        heat_s: float,
        threads: int | None = None,
    ) -> None:
        import torch

        if device not in ("cuda", "cpu"):
            raise ValueError(f"device: {device!r} is neither 'cuda' nor 'cpu'")
        if device == "cuda" and not torch.cuda.is_available():
            raise ValueError("device: 'cuda' was asked for, torch sees no CUDA device")
        if n_repeats < 2:
            raise ValueError(f"n_repeats: {n_repeats} must be >= 2, a spread needs two")
        if threads is not None:
            torch.set_num_threads(threads)
        self.device, self.is_cuda, self.disk_dir = device, device == "cuda", disk_dir
        self.min_s, self.n_repeats, self.heat_s = min_s, n_repeats, heat_s
        self.dtype = torch.float16 if self.is_cuda else torch.float32
        self.rng = np.random.default_rng(seed)
        self._generator = torch.Generator(device=device).manual_seed(seed)
        self._arenas: dict[str, Tensor] = {}
        self._mapped: dict[str, HostArena] = {}
        self.nvml: Nvml | None = None
        if self.is_cuda:
            uuid = getattr(torch.cuda.get_device_properties(0), "uuid", "")
            self.nvml = Nvml(str(uuid))

    # ---- memory ---------------------------------------------------------------------------

    def random(self, *shape: int) -> Tensor:
        """Normally distributed values on the device: zeros draw less power and run faster."""
        import torch

        values: Tensor = torch.randn(
            *shape, generator=self._generator, device=self.device, dtype=self.dtype
        )
        return values.mul_(0.05)

    def arena(self, name: str, nbytes: int) -> Tensor:
        """At least ``nbytes`` of bytes, kept between points.

        Its name says where: ``device*``, ``pinned*`` or ``pageable*``. Host memory is mapped,
        touched and pinned as the engine does it: how it was come by decides how fast it is copied.
        """
        import torch

        from real.arena import HostArena

        held = self._arenas.get(name)
        if held is None or held.numel() < nbytes:
            self._arenas.pop(name, None)
            if name.startswith("device"):
                held = torch.empty(nbytes, dtype=torch.uint8, device=self.device)
            else:
                pin = self.is_cuda and name.startswith("pinned")
                mapped = self._mapped.setdefault(name, HostArena(pinned=pin))
                held = mapped.allocate({name: nbytes})[name]
            held = self._arenas[name] = _fill(held)
        return held

    def held_bytes(self, *kinds: str) -> float:
        """Bytes that arenas whose names start with one of ``kinds`` hold: a case may reuse them."""
        held = (a.numel() for name, a in self._arenas.items() if name.startswith(kinds))
        return float(sum(held))

    def close(self) -> None:
        """Give back all arenas."""
        self._arenas.clear()
        for mapped in self._mapped.values():
            mapped.close()

    def release(self) -> None:
        """Give back what no arena holds."""
        if self.is_cuda:
            import torch

            torch.cuda.empty_cache()

    def free_device_bytes(self) -> float:
        """Free bytes of device memory; on a CPU those of the host."""
        import torch

        if self.is_cuda:
            return float(torch.cuda.mem_get_info()[0])
        return free_host_bytes()

    def sync(self) -> None:
        """Wait until the device is idle."""
        if self.is_cuda:
            import torch

            torch.cuda.synchronize()

    def state(self) -> dict[str, float]:
        """Clocks, power and temperature now; empty where nobody tells."""
        return self.nvml.state() if self.nvml is not None else {}

    # ---- timers ---------------------------------------------------------------------------

    def kernel(self, call: Call, heat: bool = False) -> list[float]:
        """Device seconds of one call, mean over a back-to-back queue; one number a repeat."""
        for i in range(2):
            call(i)
        once = self._wall(call)
        if self.is_cuda:  # from idle clocks to those of work; heavy work down to its power limit
            for i in range(math.ceil(self.heat_s * (1.0 if heat else 0.2) / once)):
                call(i)
        n = max(1, min(_MAX_CALLS, math.ceil(self.min_s / once)))
        return [self._queue(call, n, once) for _ in range(self.n_repeats)]

    def amid_gemms(self, call: Call) -> list[float]:
        """Device seconds of one call between GEMMs, mean over a few; one number a repeat.

        GEMMs take most of a layer's time and hold the device at its power limit. What runs between
        them runs at the clocks that they leave, up to a fifth below those that it would have alone.
        What two events take with nothing between them is taken off.
        """
        if not self.is_cuda:
            return self.kernel(call)
        import torch
        from torch.nn.functional import linear

        for i in range(2):
            call(i)
        weight, tokens = self.random(4096, 4096), self.random(4096, 4096)

        def gemm(_: int) -> object:
            return linear(tokens, weight)

        gemm(0)
        once, gemm_s = self._wall(call), self._wall(gemm)
        n_gemms = math.ceil(max(_GEMMS_S, _GEMMS_SHARE * once) / gemm_s)
        n = max(1, min(_MAX_AMID, math.ceil(self.min_s / once)))
        for i in range(math.ceil(self.heat_s / gemm_s)):
            gemm(i)

        def timed(between: Call) -> float:
            marks = [[torch.cuda.Event(enable_timing=True) for _ in range(2)] for _ in range(n)]
            for i, (before, after) in enumerate(marks):
                for j in range(n_gemms):
                    gemm(j)
                before.record()
                between(i)
                after.record()
            torch.cuda.synchronize()
            return float(sum(a.elapsed_time(b) for a, b in marks)) * 1e-3 / n

        nothing_s = min(timed(lambda _: None) for _ in range(self.n_repeats))
        return [max(timed(call) - nothing_s, 1e-7) for _ in range(self.n_repeats)]

    def copy(self, call: Call) -> list[float]:
        """Seconds between an event before and one after each of some queued copies."""
        call(0)
        once = self._wall(call)
        n = max(self.n_repeats, min(20, math.ceil(self.min_s / once)))
        if not self.is_cuda:
            return [_timed(call, i) for i in range(n)]
        import torch

        stream = torch.cuda.Stream()
        events = [
            (torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True))
            for _ in range(n + 1)
        ]
        with torch.cuda.stream(stream):
            for i, (before, after) in enumerate(events):
                before.record(stream)
                call(i)
                after.record(stream)
        torch.cuda.synchronize()
        return [before.elapsed_time(after) * 1e-3 for before, after in events[1:]]

    def blocking(self, call: Call, least_s: float = 0.0) -> list[float]:
        """Host seconds until a call's effect is there; one number a call, over ``least_s``."""
        call(0)
        n = self._n_blocking(self._wall(call), least_s)
        return [self._wall(call, i) for i in range(n)]

    def beside_h2d(self, call: Call, least_s: float = 0.0) -> list[float]:
        """The same of a call of the CPU alone, while H2D copies read host memory at full rate."""
        if not self.is_cuda:
            return self.blocking(call, least_s)
        import torch

        source, target = (
            self.arena(f"{kind} beside", _BESIDE_BYTES) for kind in ("pinned", "device")
        )
        stream = torch.cuda.Stream()

        def copies(n: int) -> None:
            with torch.cuda.stream(stream):
                for _ in range(n):
                    target.copy_(source, non_blocking=True)

        copies(1)
        one_s = self._wall(lambda _: copies(1))
        call(0)
        once = self._wall(call)
        n_copies, n = math.ceil(2 * once / one_s) + 1, self._n_blocking(once, least_s)
        taken: list[float] = []
        while len(taken) < n:
            if n_copies > _MAX_QUEUED:
                raise RuntimeError(f"a call of {once:.2g} s outlasts the copies that can be queued")
            copies(n_copies)
            call_s = _timed(call, len(taken))
            if stream.query():  # the copies ended first: the call was not beside them
                n_copies *= 2
            else:
                taken.append(call_s)
            self.sync()
        return taken

    def _n_blocking(self, once_s: float, least_s: float) -> int:
        most = 20 if least_s <= self.min_s else 60
        return max(self.n_repeats, min(most, math.ceil(max(self.min_s, least_s) / once_s)))

    def issue(self, call: Call, n: int = 200) -> list[float]:
        """Host seconds to issue one call, mean of ``n``, the device drained before."""
        for i in range(20):
            call(i)
        repeats = []
        for _ in range(self.n_repeats):
            self.sync()
            start = time.perf_counter()
            for i in range(n):
                call(i)
            repeats.append((time.perf_counter() - start) / n)
        self.sync()
        return repeats

    def round_trip(self, call: Call, n: int = 100) -> list[float]:
        """Host seconds of a call and the synchronisation after it, mean of ``n``."""
        repeats = []
        for _ in range(self.n_repeats):
            self.sync()
            start = time.perf_counter()
            for i in range(n):
                call(i)
                self.sync()
            repeats.append((time.perf_counter() - start) / n)
        return repeats

    def _queue(self, call: Call, n: int, once_s: float) -> float:
        if not self.is_cuda:
            start = time.perf_counter()
            for i in range(n):
                call(i)
            return (time.perf_counter() - start) / n
        import torch

        first, last = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        torch.cuda.synchronize()
        if once_s < 5 * _COVER_S:
            torch.cuda._sleep(int(n * max(_COVER_S, once_s) * _COVER_HZ))
        first.record()
        for i in range(n):
            call(i)
        last.record()
        last.synchronize()
        return float(first.elapsed_time(last)) * 1e-3 / n

    def _wall(self, call: Call, i: int = 1) -> float:
        self.sync()
        start = time.perf_counter()
        call(i)
        self.sync()
        return max(time.perf_counter() - start, 1e-7)


def rotation(nbytes: float, rotate_bytes: float) -> int:
    """How many copies of an operand make a cache forget the first."""
    return max(1, math.ceil(rotate_bytes / nbytes))


def free_host_bytes() -> float:
    """Memory that can be had without swapping, as Linux estimates it."""
    return meminfo("MemAvailable")


def meminfo(key: str) -> float:
    """A line of /proc/meminfo in bytes; ``ValueError`` where there is none."""
    path = Path("/proc/meminfo")
    if path.exists():
        for line in path.read_text(encoding="ascii").splitlines():
            if line.startswith(f"{key}:"):
                return float(line.split()[1]) * 1024
    raise ValueError(f"meminfo: {path} has no {key}; host memory is only known on Linux")


def _timed(call: Call, i: int) -> float:
    start = time.perf_counter()
    call(i)
    return max(time.perf_counter() - start, 1e-9)


def _fill(tensor: Any) -> Any:
    """Fill with a random pattern, faster than drawing every byte."""
    head = tensor[: 2**22].random_(0, 256)
    for start in range(2**22, tensor.numel(), 2**22):
        piece = tensor[start : start + 2**22]
        piece.copy_(head[: piece.numel()])
    return tensor
