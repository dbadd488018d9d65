"""The folder of a sweep: who may write into it, which sweep it holds, how far that sweep is.

What readers get wrong: the lock is not the file but the hold on it. The operating system lets go
when the process ends, however it ends, so the file that a killed sweep leaves behind locks nobody
out, and its number may be that of another process by now.
"""

from __future__ import annotations

import fcntl
import json
import os
import socket
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import IO

from sim import files
from sim.columns import write_atomically

LOCK, MANIFEST = "sweep.lock", "sweep.json"


class FolderLock:
    """Holds ``sweep.lock`` of a folder; ``ValueError`` naming the process that has it already."""

    def __init__(self, folder: Path) -> None:
        folder.mkdir(parents=True, exist_ok=True)
        self._path = folder / LOCK
        self._file = self._open()
        self._file.truncate(0)
        self._file.write(f"process {os.getpid()} on {socket.gethostname()}\n")
        self._file.flush()

    def _open(self) -> IO[str]:
        while True:
            file = self._path.open("a+", encoding="utf-8")
            try:
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
                if os.path.samestat(os.fstat(file.fileno()), self._path.stat()):
                    return file
            except FileNotFoundError:
                pass  # released between opening and locking
            except OSError as error:
                file.seek(0)
                holder = file.read().strip() or "another process"
                file.close()
                raise ValueError(
                    f"{self._path.parent}: {holder} is writing a sweep into it"
                ) from error
            file.close()

    def release(self) -> None:
        """Let others in; the file goes with the hold."""
        self._path.unlink(missing_ok=True)
        self._file.close()


def open_sweep(folder: Path, manifest: Mapping[str, object], resume: bool) -> None:
    """Write ``sweep.json``, or with ``resume`` check that it says what ``manifest`` says.

    ``manifest`` says what is run. ``ValueError`` if the folder holds a sweep and ``resume`` is not
    set, if it holds none and it is, or if it holds another one.
    """
    path = folder / MANIFEST
    if not resume:
        if path.exists() or next(rows(folder), None) is not None:
            raise ValueError(
                f"{folder}: holds a sweep already; sweep.resume={folder} finishes it, "
                "another hydra.sweep.dir starts one of its own"
            )
        write_manifest(path, manifest)
        return
    held = read_manifest(folder)
    if held is None:
        raise ValueError(f"sweep.resume: {folder} holds no sweep (no {MANIFEST})")
    for key, value in manifest.items():
        if held.get(key) != value:
            raise ValueError(
                f"sweep.resume: {folder} holds another sweep, {key} {_shown(held.get(key))} "
                f"and not {_shown(value)}"
            )


def _shown(value: object) -> str:
    return " ".join(value) or "none" if isinstance(value, list) else json.dumps(value)


def write_manifest(path: Path, manifest: Mapping[str, object]) -> None:
    """Write what a sweep runs."""
    text = json.dumps(manifest, indent=1) + "\n"

    def write(part: Path) -> None:
        part.write_text(text, encoding="utf-8", newline="\n")

    write_atomically(path, write)


def read_manifest(folder: Path) -> dict[str, object] | None:
    """What the sweep in ``folder`` runs; None where there is no sweep."""
    try:
        found = json.loads((folder / MANIFEST).read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return None
    return found if isinstance(found, dict) else None


# ---- rows ----------------------------------------------------------------------------------------


def rows(folder: Path) -> Iterator[Path]:
    """``result.json`` of all runs: those of jobs, and those of the cells of a job."""
    for job in folder.iterdir() if folder.is_dir() else ():
        if not job.is_dir() or job.name.startswith("."):
            continue
        if (job / files.RESULT).is_file():
            yield job / files.RESULT
        else:
            yield from job.glob(f"*/{files.RESULT}")


class RowCount:
    """Counts rows, reading each file once."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self._failed: dict[Path, tuple[int, bool]] = {}

    def __call__(self) -> tuple[int, int]:
        """Rows, and how many of them are of failed runs."""
        for path in rows(self.folder):
            try:
                written = path.stat().st_mtime_ns
                if self._failed.get(path, (0, False))[0] != written:
                    row = json.loads(path.read_text(encoding="utf-8"))
                    self._failed[path] = (written, row.get("status") == "failed")
            except (OSError, ValueError, AttributeError):
                continue  # being replaced, or no row
        return len(self._failed), sum(failed for _, failed in self._failed.values())
