"""The runs of one Hydra job of a sweep: each ends as a row, whatever became of it.

What readers get wrong: in a sweep an exception must not leave the task, or Hydra skips the summary
of all runs; a run that fails becomes a row instead. A row is written whole or not at all, so a
sweep that was killed has lost the runs in flight and no other, and ``sweep.resume`` runs those.
"""

from __future__ import annotations

import json
import traceback
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path

from hydra.core.hydra_config import HydraConfig
from omegaconf import DictConfig, OmegaConf
from rich.console import Console

from policies.solver import SolverUnavailableError
from sim import files, modes
from sim.cells import Cell, Composer, expand
from sim.columns import write_atomically
from sim.export import read_export, write_request
from sim.mode_keys import OFFLINE, mode_of
from sim.program_cache import ProgramCache
from sim.report import sweep_line
from sim.result import RunRecord
from sim.run import simulate
from sim.settings import GROUPS, build, explain

CELLS = "cells.json"  # of a job: the overrides of its cells, in order
UNSET = "???"  # sweep.resume where it was not given
Compose = Callable[[Sequence[str]], dict[str, object]]
USER_ERRORS = (ValueError, SolverUnavailableError)


@dataclass(frozen=True, slots=True)
class Resume:
    """Whether rows that exist are kept, and whether those of failed runs are."""

    active: bool = False
    retry_failed: bool = False

    def keeps(self, folder: Path, cell_sha256: object) -> bool:
        """Whether ``folder`` holds the row of a run with these settings that need not run again."""
        if not self.active:
            return False
        try:
            row = json.loads((folder / files.RESULT).read_text(encoding="utf-8"))
            same = row["provenance"]["cell_sha256"] == cell_sha256
            return same and not (self.retry_failed and row["status"] == "failed")
        except (OSError, ValueError, KeyError, TypeError):
            return False  # no row, or none that can be trusted


def read_resume(config: Mapping[str, object]) -> Resume:
    """``sweep`` of a configuration; ``ValueError`` for what it cannot hold."""
    settings = config.get("sweep") or {}
    if not isinstance(settings, Mapping):
        raise ValueError(f"sweep: {settings!r} must be a mapping")
    for key in settings:
        if key not in ("resume", "retry_failed"):
            raise ValueError(f"sweep.{key}: unknown key; the keys here are resume, retry_failed")
    retry = settings.get("retry_failed", False)
    if not isinstance(retry, bool):
        raise ValueError(f"sweep.retry_failed: {retry!r} must be true or false")
    folder = settings.get("resume", UNSET)
    if not isinstance(folder, str) or not folder:
        raise ValueError(f"sweep.resume: {folder!r} must be the folder of a sweep")
    return Resume(folder != UNSET, retry)


def without_sweep(overrides: Sequence[str]) -> list[str]:
    """Overrides that say what is run; those of ``sweep`` and ``grid`` say how."""
    keys = (text.lstrip("+~").partition("=")[0].partition(".")[0] for text in overrides)
    return [t for t, key in zip(overrides, keys, strict=True) if key not in ("sweep", "grid")]


def run_job(composed: DictConfig, overrides: Sequence[str], folder: Path, number: int) -> None:
    """Run the cells of one Hydra job; without a grid the job is its only cell.

    Cell i of a grid gets the folder ``i`` below ``folder``; ``cells.json`` names them beforehand.
    """
    own = without_sweep(overrides)
    config = _plain(composed)
    versions = files.software()
    try:
        resume = read_resume(config)
        cells = expand(config.get("grid"), own)
    except Exception as error:
        _fail(folder, config, own, str(number), versions, error)
        return
    composer, known = Composer(composed, overrides), ProgramCache()
    width = len(str(len(cells) - 1))
    names = [f"{i:0{width}}" for i in range(len(cells))]
    if cells != [()]:
        write_cells(folder, dict(zip(names, cells, strict=True)))
    for name, cell in zip(names, cells, strict=True):
        where, label = (folder / name, f"{number}/{name}") if cell else (folder, str(number))
        try:
            of_cell = composer(cell) if cell else config
        except Exception as error:
            _fail(where, config, [*own, *cell], label, versions, error)
            continue
        more = partial(_with, composer, cell)
        run_in_sweep(of_cell, [*own, *cell], where, label, resume, versions, more, known)


def _with(composer: Composer, cell: Cell, overrides: Sequence[str]) -> dict[str, object]:
    return composer((*cell, *overrides))


def write_cells(folder: Path, cells: Mapping[str, Cell]) -> None:
    """Write the overrides of a job's cells by the name of their folder."""
    folder.mkdir(parents=True, exist_ok=True)
    text = json.dumps({name: list(cell) for name, cell in cells.items()}, indent=1) + "\n"
    write_atomically(folder / CELLS, lambda part: _write_text(part, text))


def run_in_sweep(
    config: Mapping[str, object],
    overrides: Sequence[str],
    folder: Path,
    label: str,
    resume: Resume | None = None,
    versions: Mapping[str, object] | None = None,
    composer: Compose | None = None,
    known: ProgramCache | None = None,
) -> str:
    """Run, files, one line. Whatever goes wrong becomes a row; the row's status is returned.

    ``kept`` is returned where ``resume`` finds the row of the same run. An advice needs
    ``composer``, which composes this run with more overrides. ``known`` is what earlier runs learnt
    and these may use.
    """
    provenance = files.provenance(config, overrides, versions)
    for part in folder.glob(".*.part"):  # of a run that was killed while it wrote
        part.unlink(missing_ok=True)
    if resume is not None and resume.keeps(folder, provenance["cell_sha256"]):
        return "kept"
    try:
        mode = mode_of(config)
        if mode == OFFLINE and config.get("advise") is not None and composer is not None:
            return _advise(config, overrides, folder, label, provenance, composer)
        if mode == OFFLINE:
            spec, export = build(config, overrides), read_export(config)
            result = simulate(spec, known=known)
            files.write_run(folder, result, config, provenance)
            if export.dir is not None and result.record.status == "ok":
                write_request(spec, export)
            status, line = result.record.status, sweep_line(label, overrides, result.record)
        else:
            status, line = modes.run_in_sweep(mode, config, overrides, folder, label, provenance)
    except Exception as error:
        _fail(folder, config, overrides, label, versions, error)
        return "failed"
    _say(line)
    return status


def _advise(
    config: Mapping[str, object],
    overrides: Sequence[str],
    folder: Path,
    label: str,
    provenance: Mapping[str, object],
    composer: Compose,
) -> str:
    """An advice, its files and its tables; the status of its row."""
    # Here, not above: most sweeps ask for none.
    from sim.advise_entry import advise_job, settings_of
    from sim.advise_report import advice_lines

    settings, _ = settings_of(config["advise"])
    choices = {str(k): str(v) for k, v in HydraConfig.get().runtime.choices.items()}
    record, advice, line = advise_job(
        config,
        overrides,
        folder,
        composer,
        choices,
        provenance,
        lambda text: _say(f"#{label} {text}"),
    )
    console = Console(highlight=False)
    console.print(advice_lines(advice, settings, record, line), soft_wrap=False)
    return record.status


def _say(line: str) -> None:
    """One line on stdout."""
    console = Console(soft_wrap=True, highlight=False, markup=False)
    if console.is_terminal:
        console.file.write("\x1b[K")  # a progress bar may stand here
    console.print(line)


def _plain(composed: DictConfig) -> dict[str, object]:
    found = OmegaConf.to_container(composed, resolve=True)
    return {str(key): value for key, value in found.items()} if isinstance(found, dict) else {}


def _write_text(path: Path, text: str) -> None:
    path.write_text(text, encoding="utf-8", newline="\n")


# ---- failed runs ---------------------------------------------------------------------------------


def _reason(error: Exception) -> str:
    if isinstance(error, USER_ERRORS):
        return str(error)
    return explain(error) or f"{type(error).__name__}: {error}"


def _fail(
    folder: Path,
    config: Mapping[str, object],
    overrides: Sequence[str],
    label: str,
    versions: Mapping[str, object] | None,
    error: Exception,
) -> None:
    """Row, traceback and line of a run whose settings may not even have been readable."""
    names: dict[str, str] = {}
    layers: object = None
    for group in GROUPS:
        part = config.get(group)
        names[group] = str(part.get("name", "")) if isinstance(part, Mapping) else ""
        if group == "model" and isinstance(part, Mapping) and part.get("from_hf") is None:
            layers = part.get("n_layers")
    for override in overrides:  # the settings may be those before a cell's own
        group, _, choice = override.lstrip("+").partition("=")
        if group in names and choice:
            names[group] = choice
    record = RunRecord(
        policy=names["policy"],
        model=names["model"],
        n_layers=0,
        hardware=names["hardware"],
        workload=names["workload"],
        status="failed",
        reason=_reason(error),
    )
    known = layers if isinstance(layers, int) else None
    row = record.as_row() | {"n_layers": known, "seed": config.get("seed")}
    files.write_row(folder, row, config, files.provenance(config, overrides, versions))
    files.write_error(folder, "".join(traceback.format_exception(error)))
    _say(sweep_line(label, overrides, record))
