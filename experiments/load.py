"""Results of a sweep as one table: a row a run, whatever became of the run.

Every run folder has a row. A run whose ``result.json`` is missing or half-written died before it
could say why: its row has status ``failed`` and what its Hydra files say was asked for, so a table
never looks complete when it is not.
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import pandas as pd
import yaml

RESULT = "result.json"
CELLS = "cells.json"  # of a job that runs many cells: their folders and overrides
CHOICES = ("policy", "model", "hardware", "workload")  # config groups that are also columns
SIZES = ("prompt_len", "gen_len", "n_layers", "n_batches", "batch_size", "seed")
OVERRIDE = "override."
_NESTED = ("config", "provenance")  # parts of result.json that are not columns


def load_sweep(folder: Path) -> pd.DataFrame:
    """Rows of the runs in ``folder``, in run order, with the columns of ``RunRecord``.

    Added are ``run``, the name of the run's folder (``3``, or ``3/07`` for a cell of a job), and
    ``override.NAME`` for what the sweep set (``override.workload.prompt_len``). ``ValueError`` if
    there is no run folder.
    """
    jobs = sorted((path for path in folder.iterdir() if _is_run(path)), key=_order)
    if not jobs:
        raise ValueError(f"{folder}: has no run folders (no .hydra and no {RESULT} below it)")
    return pd.DataFrame([row for job in jobs for row in _rows(job)])


def write_results(results: pd.DataFrame, path: Path) -> None:
    """Write a CSV so that a reader finds the old file or the whole new one."""
    part = path.with_name(f".{path.name}.{os.getpid()}.part")
    try:
        results.to_csv(part, index=False)
        part.replace(path)
    finally:
        part.unlink(missing_ok=True)


def run_config(folder: Path, run: object) -> dict[str, Any]:
    """Resolved configuration of one run; ``ValueError`` if its result does not hold one."""
    path = folder / str(run) / RESULT
    config = _read_result(path).get("config")
    if not isinstance(config, dict):
        raise ValueError(f"{path}: has no config")
    return config


def _is_run(path: Path) -> bool:
    return path.is_dir() and ((path / ".hydra").is_dir() or (path / RESULT).exists())


def _order(path: Path) -> tuple[int, str]:
    return (int(path.name) if path.name.isdigit() else 2**31, path.name)


def _rows(job: Path) -> Iterator[dict[str, object]]:
    """Row of a job, or of each cell that it was to run."""
    try:
        cells = json.loads((job / CELLS).read_text(encoding="utf-8"))
    except FileNotFoundError:
        yield _row(job, job.name, *_asked(job))
        return
    choices, overrides = _asked(job)
    for name, texts in cells.items():
        own = _split(texts)
        chosen = {key: str(value) for key, value in own.items() if key in CHOICES}
        yield _row(job / name, f"{job.name}/{name}", choices | chosen, overrides | own)


def _row(
    path: Path, run: str, choices: dict[str, str], overrides: dict[str, object]
) -> dict[str, object]:
    try:
        result = _read_result(path / RESULT)
    except ValueError as error:
        result = {**choices, "status": "failed", "reason": str(error)}
    row: dict[str, object] = {"run": run}
    row |= {name: value for name, value in result.items() if name not in _NESTED}
    for name, value in overrides.items():
        column = name.rpartition(".")[2]
        if column in SIZES and row.get(column) is None:  # a run that did not get that far
            row[column] = value
        if name not in CHOICES:
            row[OVERRIDE + name] = value
    return row


def _read_result(path: Path) -> dict[str, Any]:
    """A record; ``ValueError`` saying why there is none."""
    try:
        result = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise ValueError(f"{path.name} is missing, the run did not end") from None
    except OSError as error:
        raise ValueError(f"{path.name} cannot be read: {error.strerror}") from error
    except ValueError as error:
        raise ValueError(f"{path.name} cannot be read: {error}") from error
    if not isinstance(result, dict) or "status" not in result:
        raise ValueError(f"{path.name} is not a record (no status)")
    return result


def _asked(path: Path) -> tuple[dict[str, str], dict[str, object]]:
    """Config groups chosen and overrides given, as far as Hydra wrote them down."""
    settings = _read_yaml(path / ".hydra" / "hydra.yaml")
    chosen: Any = settings
    for key in ("hydra", "runtime", "choices"):
        chosen = chosen.get(key, {}) if isinstance(chosen, Mapping) else {}
    choices = {name: str(chosen[name]) for name in CHOICES if name in chosen}
    given = _read_yaml(path / ".hydra" / "overrides.yaml")
    return choices, _split(given if isinstance(given, list) else [])


def _split(overrides: Sequence[object]) -> dict[str, object]:
    """What overrides set, except how the sweep is run (``sweep``, ``grid``)."""
    found: dict[str, object] = {}
    for text in overrides:
        name, _, value = str(text).lstrip("+~").partition("=")
        if name.partition(".")[0] not in ("sweep", "grid"):
            read = yaml.safe_load(value) if value else ""
            # A mapping or a list stays text: a table can only tell texts apart.
            found[name] = value if isinstance(read, dict | list) else read
    return found


def _read_yaml(path: Path) -> Any:
    try:
        return yaml.safe_load(path.read_text(encoding="utf-8"))
    except (OSError, yaml.YAMLError):
        return None  # the run's own files are the source; these only describe it
