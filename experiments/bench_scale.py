"""``python -m experiments.bench_scale [KEY=VALUE ...]``: a job against ten times its requests.

The keys are those of ``python -m sim``; the requests are drawn anew, with replacement and a seed,
from the job's own length trace. Time should grow at most tenfold and peak memory hardly: steps are
linked while they run and templates are shared. What readers get wrong: peak memory is that of a
process, so each job gets a process of its own, and what is left of growth are the requests.
"""

from __future__ import annotations

import multiprocessing
import resource
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
from rich.box import SIMPLE
from rich.console import Console
from rich.table import Table

from experiments.bench_engine import settings
from sim.columns import write_columns
from sim.lengths import LengthTrace, read_trace
from sim.run import RunSpec, simulate
from sim.workloads import SHIPPED, shipped

TIMES = 10


@dataclass(frozen=True, slots=True)
class Measured:
    """One job in a process of its own."""

    n_requests: int
    n_blocks: int
    n_ops: int
    cpu_s: float
    solve_s: float
    peak_bytes: int


def bootstrapped(spec: RunSpec, times: int, folder: Path) -> RunSpec:
    """The same run over ``times`` as many requests, drawn from those of its trace."""
    trace = _trace(spec)
    picks = np.random.default_rng(spec.seed).integers(0, len(trace), times * len(trace))
    path = folder / "bootstrapped.parquet"
    columns = ("prompt_tokens", "cached_prefix_tokens", "response_tokens")
    write_columns(path, {name: getattr(trace, name)[picks].tolist() for name in columns})
    return replace(spec, workload=replace(spec.workload, source="path", path=str(path), task=None))


def _trace(spec: RunSpec) -> LengthTrace:
    job = spec.workload
    if job.source in SHIPPED:
        return shipped(job.source)
    if job.source != "path" or job.path is None:
        names = ", ".join(("path", *SHIPPED))
        raise ValueError(f"workload.source: {job.source!r} must be one of {names}")
    return read_trace(job.path, job.task)


def measure(spec: RunSpec) -> Measured:
    """Run a job here; ``ValueError`` if it cannot run."""
    start_s = time.process_time()
    record = simulate(replace(spec, trace="none")).record
    if record.status != "ok":
        raise ValueError(f"job: {record.status}, {record.reason}")
    return Measured(
        record.n_requests or 0,
        record.n_blocks or 0,
        record.n_ops or 0,
        time.process_time() - start_s,
        record.solve_s or 0.0,
        resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024,
    )


def _alone(spec: RunSpec) -> Measured:
    with multiprocessing.get_context("spawn").Pool(1) as pool:
        return pool.apply(measure, (spec,))


def table_of(rows: Sequence[Measured]) -> Table:
    """Jobs side by side."""
    table = Table(box=SIMPLE)
    for name in ("requests", "blocks", "M ops", "CPU s", "of it solving", "M ops/s", "peak MiB"):
        table.add_column(name, justify="right")
    for row in rows:
        table.add_row(
            f"{row.n_requests:,}", f"{row.n_blocks:,}", f"{row.n_ops / 1e6:.1f}",
            f"{row.cpu_s:.1f}", f"{row.solve_s:.1f}", f"{row.n_ops / row.cpu_s / 1e6:.1f}",
            f"{row.peak_bytes / 2**20:.0f}",
        )  # fmt: skip
    return table


def main(overrides: Sequence[str]) -> None:
    """Measure and print."""
    spec = settings(overrides)
    with tempfile.TemporaryDirectory() as folder:
        rows = [_alone(spec), _alone(bootstrapped(spec, TIMES, Path(folder)))]
    console = Console()
    console.print(f"{spec.policy.name}, {spec.model.name}, {spec.hardware.name}")
    console.print(table_of(rows))


if __name__ == "__main__":
    main(sys.argv[1:])
