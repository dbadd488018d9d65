"""Transfers: H2D and D2H, both at once, host copies, device memory.

Sources and targets move through an arena from copy to copy; in pageable memory they jump, since
there the rate depends on where a page lies, by a third within 16 GB of one machine. What readers
get wrong is duplex: both directions must really be busy together, so only copies that lie wholly
inside the other direction's activity count.
"""

from __future__ import annotations

import math
import threading
import time
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING

from calibrate.bench import Bench, Call

if TYPE_CHECKING:
    from torch import Tensor

_DUPLEX_COPIES, _DUPLEX_S = 8, 0.05  # least number of copies and least time of each direction
_PAGEABLE_S = 0.5  # least time of the copies of one size
_GOLDEN = (math.sqrt(5) - 1) / 2  # steps of this share of a range fill it evenly
Interval = tuple[float, float]


def link(
    bench: Bench, group: str, x: Mapping[str, float], rotate_bytes: int, pageable_bytes: int
) -> list[float]:
    """Seconds of one copy of ``nbytes`` in the direction and from the memory of ``group``."""
    nbytes = int(x["nbytes"])
    size = max(nbytes, rotate_bytes)
    spread = max(size, pageable_bytes)
    source, target = {
        "h2d": ("pinned", "device"),
        "d2h": ("device", "pinned"),
        "h2d_pageable": ("pageable", "device"),
        "d2h_pageable": ("device", "pageable"),
        "host_copy": ("pageable", "pinned"),
    }[group]
    asynchronous = group in ("h2d", "d2h")
    origin, goal = (
        bench.arena(name, spread if name == "pageable" else size) for name in (source, target)
    )
    call = _copier(origin, goal, nbytes, asynchronous)
    if asynchronous:
        return bench.copy(call)
    if group == "host_copy":  # whoever copies within the host does it to feed the link
        return bench.beside_h2d(call, _PAGEABLE_S)
    return bench.blocking(call, _PAGEABLE_S)


def hbm(bench: Bench, x: Mapping[str, float], rotate_bytes: int) -> list[float]:
    """Seconds of one device-to-device copy: ``nbytes`` are read and as many written."""
    nbytes = int(x["nbytes"])
    size = max(nbytes, rotate_bytes)
    call = _copier(bench.arena("device", size), bench.arena("device2", size), nbytes, True)
    return bench.kernel(call)


def cpu_read(bench: Bench, x: Mapping[str, float]) -> list[float]:
    """Seconds in which all threads read ``nbytes`` of host memory and do little else."""
    import torch

    n = int(x["nbytes"]) // 4
    data = torch.randn(min(n, 2**20)).repeat(-(-n // 2**20))[:n]  # float32: its sum is vectorised
    return bench.blocking(lambda _: data.sum())


def duplex(bench: Bench, group: str, x: Mapping[str, float], rotate_bytes: int) -> list[float]:
    """Seconds of one copy in the direction of ``group`` while the other direction is busy."""
    nbytes = int(x["nbytes"])
    size = max(nbytes, rotate_bytes)
    h2d = _copier(bench.arena("pinned", size), bench.arena("device", size), nbytes, True)
    d2h = _copier(bench.arena("device2", size), bench.arena("pinned2", size), nbytes, True)
    once = min(min(bench.blocking(h2d)), min(bench.blocking(d2h)))
    n = max(_DUPLEX_COPIES, min(400, math.ceil(_DUPLEX_S / once)))
    run = _on_streams if bench.is_cuda else _on_threads
    intervals = run(h2d, d2h, n)
    mine, other = intervals if group == "duplex_h2d" else intervals[::-1]
    kept = [end - start for start, end in mine if other[0][0] <= start and end <= other[-1][1]]
    if not kept:
        raise RuntimeError(f"{group}: no copy of {nbytes} bytes overlapped the other direction")
    return kept


def _copier(source: Tensor, target: Tensor, nbytes: int, asynchronous: bool) -> Call:
    """Copy of ``nbytes`` from one arena to another, from and to another place with every call."""
    piece_of = [_pieces(arena, nbytes) for arena in (source, target)]

    def call(i: int) -> object:
        return piece_of[1](i).copy_(piece_of[0](i), non_blocking=asynchronous)

    return call


def _pieces(arena: Tensor, nbytes: int) -> Callable[[int], Tensor]:
    """Pieces of an arena, each once before any comes again; a few are spread all over it."""
    places = max(1, arena.numel() // nbytes)
    step = max(1, round(places * _GOLDEN))
    while math.gcd(step, places) > 1:
        step += 1

    def piece(i: int) -> Tensor:
        at = i * step % places * nbytes
        return arena[at : at + nbytes]

    return piece


def _on_streams(h2d: Call, d2h: Call, n: int) -> tuple[list[Interval], list[Interval]]:
    """Both directions on a stream each, issued in turns; intervals since a common event."""
    import torch

    base = torch.cuda.Event(enable_timing=True)
    streams = (torch.cuda.Stream(), torch.cuda.Stream())
    marks = [
        [
            (torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True))
            for _ in "x" * n
        ]
        for _ in streams
    ]
    torch.cuda.synchronize()
    base.record()
    for stream in streams:
        stream.wait_event(base)
    for i in range(n):
        for stream, direction, call in zip(streams, marks, (h2d, d2h), strict=True):
            with torch.cuda.stream(stream):
                direction[i][0].record(stream)
                call(i)
                direction[i][1].record(stream)
    torch.cuda.synchronize()
    spans = [
        [(base.elapsed_time(a) * 1e-3, base.elapsed_time(b) * 1e-3) for a, b in direction]
        for direction in marks
    ]
    return spans[0], spans[1]


def _on_threads(h2d: Call, d2h: Call, n: int) -> tuple[list[Interval], list[Interval]]:
    """Both directions on a thread each, as the engine's CPU twin runs its lanes."""
    spans: tuple[list[Interval], list[Interval]] = ([], [])
    ready = threading.Barrier(2)

    def loop(call: Call, into: list[Interval]) -> None:
        ready.wait()
        for i in range(n):
            start = time.perf_counter()
            call(i)
            into.append((start, time.perf_counter()))

    run: Callable[[Call, list[Interval]], None] = loop
    thread = threading.Thread(target=run, args=(d2h, spans[1]))
    thread.start()
    run(h2d, spans[0])
    thread.join()
    return spans
