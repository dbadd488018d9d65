"""What a command runs: ``mode=offline`` (a policy over a job), ``serve``, ``kappa`` or ``phase``.

The offline mode is ``sim.run``; this is the edge of the others, alone and in a sweep. What
readers get wrong: all modes share one configuration; a group of another mode is no error where it
stands at its default, or no configuration could be complete (``mode_keys``).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import TypeVar

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

from policies.spec.hardware import HardwareProfile
from policies.spec.hardware_build import hardware_from_mapping
from policies.spec.model import ModelSpec
from sim import files
from sim.kappa_report import kappa_line, print_kappa
from sim.kappa_search import kappa_record
from sim.mode_keys import KAPPA, PHASE
from sim.phase import phase_case, phase_line, phase_record, print_phase
from sim.serve_entry import serve_job, write_serve
from sim.serve_report import serve_line, serve_table
from sim.serve_settings import build_serve
from sim.settings import check_keys, group_of, model_of

T = TypeVar("T")


def run_alone(
    mode: str, config: Mapping[str, object], overrides: Sequence[str], folder: Path
) -> None:
    """Run, files, table. Raises what is wrong with the settings."""
    console = Console()
    if mode == KAPPA:
        model, hardware = _machine(config, overrides)
        row = kappa_record(model, hardware).as_row()
        files.write_row(folder, row, config, files.provenance(config, overrides))
        print_kappa(model, hardware, console)
        return
    if mode == PHASE:
        found = phase_record(phase_case(config, overrides))
        files.write_row(folder, found.as_row(), config, files.provenance(config, overrides))
        print_phase(found, console)
        return
    job = build_serve(config, overrides)
    outcome = with_bar("serving", "turns", lambda progress: serve_job(job, progress))
    write_serve(folder, job, outcome, config, files.provenance(config, overrides))
    console.print(serve_table(job, outcome.record, console))


def run_in_sweep(
    mode: str,
    config: Mapping[str, object],
    overrides: Sequence[str],
    folder: Path,
    label: str,
    provenance: Mapping[str, object],
) -> tuple[str, str]:
    """Run and files; returns the row's status and the line to print."""
    if mode == KAPPA:
        record = kappa_record(*_machine(config, overrides))
        files.write_row(folder, record.as_row(), config, provenance)
        return record.status, kappa_line(label, overrides, record)
    if mode == PHASE:
        found = phase_record(phase_case(config, overrides))
        files.write_row(folder, found.as_row(), config, provenance)
        return found.status, phase_line(label, overrides, found)
    job = build_serve(config, overrides)
    outcome = serve_job(job)
    write_serve(folder, job, outcome, config, provenance)
    return outcome.record.status, serve_line(label, overrides, outcome.record)


def _machine(
    config: Mapping[str, object], overrides: Sequence[str]
) -> tuple[ModelSpec, HardwareProfile]:
    check_keys(KAPPA, config, overrides)
    model = model_of(group_of(config, "model"), overrides)
    return model, hardware_from_mapping(group_of(config, "hardware"))


def with_bar(doing: str, unit: str, run: Callable[[Callable[[int, int], None]], T]) -> T:
    """``run`` behind a progress bar on stderr, which a pipe or a file does not get."""
    console = Console(stderr=True)
    columns = (TextColumn(doing), BarColumn(), MofNCompleteColumn(), TextColumn(unit))
    with Progress(
        *columns, TimeElapsedColumn(), console=console, transient=True,
        disable=not console.is_terminal,
    ) as bar:  # fmt: skip
        task = bar.add_task(doing, total=None)
        return run(lambda done, total: bar.update(task, completed=done, total=total))
