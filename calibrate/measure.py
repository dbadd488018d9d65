"""Measure: take the planned points one by one and append each to a file as soon as it is there.

A run can be stopped and started again: points that the file has are not taken twice. What readers
get wrong: a file belongs to one machine. Points of another device in it are refused, because a
profile fitted over both would describe neither.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path

from calibrate import bench_compute, bench_links
from calibrate.bench import Bench, free_host_bytes
from calibrate.bench_disk import ScratchFile
from calibrate.grid import ATTENTION, DISK, DUPLEX, LINKS, Case, Needs, Plan, needs
from calibrate.machine import capacities, machine
from calibrate.presets import Preset
from calibrate.record import Machine, Point, dump_point, read_points, whole_lines

_FREE_SHARE = 0.9  # of what is free that a case may take
_PAGEABLE_SHARE = 0.25  # of what is free that copies of pageable memory are spread over
_IDLE_S = 0.5
_LOAD_S = 1.0

Notify = Callable[[int, int, str], None]


@dataclass(frozen=True, slots=True)
class Summary:
    """What became of the planned cases."""

    n_measured: int
    n_present: int
    skipped: Mapping[str, str]
    out_of_time: tuple[str, ...]
    seconds: float


def measure(
    bench: Bench,
    plan: Plan,
    out: Path,
    budget_s: float,
    notify: Notify = lambda _i, _n, _name: None,
) -> Summary:
    """Take the points of ``plan`` that ``out`` lacks, until ``budget_s`` is spent.

    ``notify(done, planned, name)`` is called before each point. What does not fit into memory, or
    what the device refuses, is written as skipped with the reason and tried again next time.
    ``ValueError`` if ``out`` holds points of another device.
    """
    if budget_s <= 0:
        raise ValueError(f"budget_s: {budget_s} must be positive")
    start = time.monotonic()
    here = machine(bench)
    present = _present(out, here)
    runner = Runner(bench, plan.preset)
    todo = [case for case in plan.cases if case.name not in present]
    n_measured, skipped, late = 0, {}, []
    try:
        with out.open("a", encoding="utf-8", newline="\n") as file:
            for i, case in enumerate(todo):
                if time.monotonic() - start > budget_s:
                    late.append(case.name)
                    continue
                notify(i, len(todo), case.name)
                point = runner.point(case, here)
                file.write(dump_point(point) + "\n")
                file.flush()
                if point.skipped:
                    skipped[case.name] = point.skipped
                else:
                    n_measured += 1
        notify(len(todo), len(todo), "done")
    finally:
        runner.close()
    return Summary(
        n_measured,
        len(plan.cases) - len(todo),
        skipped,
        tuple(late),
        time.monotonic() - start,
    )


def _present(out: Path, here: Machine) -> set[str]:
    """Names of the points that a file holds; its unfinished last line is cut off."""
    if not out.exists():
        return set()
    points = read_points(out)
    for point in points:
        if (point.machine.device, point.machine.host) != (here.device, here.host):
            raise ValueError(
                f"out: {out} holds points of {point.machine.device} in {point.machine.host}, this "
                f"is {here.device} in {here.host}: name another file"
            )
    whole = "".join(line + "\n" for line in whole_lines(out))
    if whole != out.read_text(encoding="utf-8"):
        out.write_text(whole, encoding="utf-8", newline="\n")
    return {point.name for point in points if not point.skipped}


class Runner:
    """Takes single points; keeps what is expensive to set up."""

    def __init__(self, bench: Bench, preset: Preset) -> None:
        self._bench, self._preset = bench, preset
        self._file: ScratchFile | None = None
        self._seed = int(bench.rng.integers(2**31))
        self._pageable_bytes = min(preset.pageable_bytes, int(_PAGEABLE_SHARE * free_host_bytes()))

    def close(self) -> None:
        """Remove the scratch file, give back arenas."""
        if self._file is not None:
            self._file.close()
        self._bench.close()

    def point(self, case: Case, here: Machine) -> Point:
        """One point: measured, read off, or skipped with the reason."""
        seconds: list[float] = []
        readings: dict[str, float] = {}
        state: dict[str, float] = {}
        skipped = "no folder on a disk was given"
        if case.group not in DISK or self._bench.disk_dir is not None:
            skipped = needs(case, self._preset).missing(self._have())
        if not skipped:
            try:
                if case.group in ("memory", "power"):
                    readings = self._readings(case)
                    skipped = "" if readings else "nothing on this machine reports it"
                else:
                    seconds, readings = self._seconds(case)
                state = self._bench.state()
            # Whatever a device refuses (out of memory, no kernel for a shape) is one point less.
            except (RuntimeError, OSError, NotImplementedError) as error:
                skipped = f"{type(error).__name__}: {str(error).splitlines()[0][:200]}"
            self._bench.release()
        now = datetime.now(UTC).isoformat(timespec="seconds")
        return Point(
            case.group, case.name, case.x, tuple(seconds), case.fit, here, now, readings, state,
            skipped,
        )  # fmt: skip

    def _have(self) -> Needs:
        bench = self._bench
        disk = capacities(bench).get("disk_bytes", 0.0)
        if self._file is not None:
            disk += self._file.nbytes
        return Needs(
            _FREE_SHARE * bench.free_device_bytes() + bench.held_bytes("device"),
            _FREE_SHARE * free_host_bytes() + bench.held_bytes("pinned", "pageable"),
            _FREE_SHARE * disk,
        )

    def _seconds(self, case: Case) -> tuple[list[float], dict[str, float]]:
        bench, x, group, rotate = self._bench, case.x, case.group, self._preset.rotate_bytes
        if group in DISK:
            return self._disk(case)
        if group in LINKS:
            return bench_links.link(bench, group, x, rotate, self._pageable_bytes), {}
        if group in DUPLEX:
            return bench_links.duplex(bench, group, x, rotate), {}
        if group in ATTENTION:
            return bench_compute.attention(bench, group, x, rotate), {}
        takers: dict[str, Callable[[], list[float]]] = {
            "hbm": lambda: bench_links.hbm(bench, x, rotate),
            "gemm": lambda: bench_compute.gemm(bench, x, rotate),
            "layer_norm": lambda: bench_compute.norm(bench, group, x),
            "rms_norm": lambda: bench_compute.norm(bench, group, x),
            "rotary": lambda: bench_compute.rotary(bench, x),
            "elementwise": lambda: bench_compute.elementwise(bench, x),
            "cpu_attention": lambda: bench_compute.cpu_attention(bench, x, rotate),
            "cpu_read": lambda: bench_links.cpu_read(bench, x),
            "launch": lambda: bench_compute.launch(bench),
            "sync": lambda: bench_compute.sync(bench),
        }
        return takers[group](), {}

    def _disk(self, case: Case) -> tuple[list[float], dict[str, float]]:
        folder = self._bench.disk_dir
        if self._file is None and folder is not None:
            self._file = ScratchFile(folder, self._preset.disk_file_bytes, self._seed)
        if self._file is None:
            raise OSError("no folder on a disk was given")
        reads = case.group == "disk_read"
        seconds = self._file.seconds(reads, int(case.x["nbytes"]), self._bench.n_repeats)
        return seconds, {"o_direct": float(self._file.direct)}

    def _readings(self, case: Case) -> dict[str, float]:
        bench = self._bench
        if case.group == "memory":
            return capacities(bench)
        if bench.nvml is None or not bench.nvml.available:
            return {}
        watts = self._loaded_watts() if case.x["load"] else self._idle_watts()
        limit = bench.nvml.power_limit_w()
        return watts | ({} if limit is None else {"limit_watts": limit})

    def _idle_watts(self) -> dict[str, float]:
        time.sleep(_IDLE_S)
        power = self._bench.state().get("power_w")
        return {} if power is None else {"watts": power}

    def _loaded_watts(self) -> dict[str, float]:
        """Mean power while large GEMMs run."""
        from torch.nn.functional import linear

        weight, tokens = self._bench.random(8192, 8192), self._bench.random(8192, 8192)
        samples, start = [], time.monotonic()
        while time.monotonic() - start < _LOAD_S:
            for _ in range(20):
                linear(tokens, weight)
            self._bench.sync()
            samples.append(self._bench.state().get("power_w"))
        known = [w for w in samples[len(samples) // 2 :] if w is not None]  # the second half
        return {"watts": sum(known) / len(known)} if known else {}
