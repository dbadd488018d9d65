"""One run of ``mode=serve``: settings in, record and files out; the command line calls it.

What readers get wrong: a machine that cannot hold the model's weights is a result, a row with
status ``oom``, as in the offline mode. Only settings and traces that are wrong are errors.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path

from policies.errors import OutOfMemory
from sim import files
from sim.columns import write_atomically
from sim.fleet import ServeRun, serve
from sim.serve_log import Log
from sim.serve_result import ServeRecord, base_record, summarise
from sim.serve_settings import ServeJob

ITERATIONS, REQUESTS = "iterations.csv", "requests.csv"
AUTO_LOG_ITERATIONS = 200_000


@dataclass(frozen=True, slots=True)
class ServeOutcome:
    """The row of a run and, where it took place, its logs."""

    record: ServeRecord
    run: ServeRun | None = None


def serve_job(
    job: ServeJob, progress: Callable[[int, int], None] = lambda _done, _total: None
) -> ServeOutcome:
    """Run a job; a machine that is too small becomes a record.

    ``progress(turns ended, turns)`` is called now and then.
    """
    base = base_record(job.spec, job.workload)
    sessions = job.sessions()
    try:
        run = serve(job.spec, sessions, progress)
    except OutOfMemory as error:
        record = replace(
            base,
            status="oom",
            reason=str(error),
            oom_tier=error.tier,
            need_bytes=error.need_bytes,
            have_bytes=error.have_bytes,
        )
        return ServeOutcome(record)
    return ServeOutcome(summarise(job.spec, sessions, run, base, job.targets, job.power), run)


def write_serve(
    folder: Path,
    job: ServeJob,
    outcome: ServeOutcome,
    config: Mapping[str, object],
    provenance: Mapping[str, object],
) -> None:
    """Write ``result.json`` and, as ``serve.log`` asks, ``iterations.csv`` and ``requests.csv``."""
    files.write_row(folder, outcome.record.as_row(), config, provenance)
    for name in (ITERATIONS, REQUESTS):
        (folder / name).unlink(missing_ok=True)
    run = outcome.run
    if run is None or job.log == "none":
        return
    write_atomically(folder / REQUESTS, lambda part: _write(part, run.requests))
    if job.log == "full" or run.iterations.n_rows <= AUTO_LOG_ITERATIONS:
        write_atomically(folder / ITERATIONS, lambda part: _write(part, run.iterations))


def _write(path: Path, log: Log) -> None:
    with path.open("w", encoding="utf-8", newline="") as file:
        file.writelines(log.lines())
