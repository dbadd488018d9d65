"""The files of a run: what happened, what was decided, and what it was computed from.

What readers get wrong: a folder may hold the remains of a run that was cut off. Every file is
written under another name and renamed, so a file that exists is whole; ``result.json`` comes first,
and files that a run does not write are removed from its folder.
"""

from __future__ import annotations

import hashlib
import json
import math
import platform
import subprocess
from collections.abc import Callable, Collection, Mapping
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

from policies.trace.chrome import write_chrome
from policies.trace.decisions import write_decisions
from policies.trace.jsonl import write_jsonl
from sim.columns import write_atomically
from sim.run import RunResult

RESULT, DECISIONS, SPANS, CHROME = (
    "result.json",
    "decisions.csv",
    "trace.jsonl",
    "trace.chrome.json",
)
ERROR = "error.txt"
AROUND = ("experiment", "sweep", "grid", "advise", "export")  # settings of a sweep, not of its runs
_DISTRIBUTIONS = ("numpy", "scipy", "simpy", "gurobipy", "hydra-core")
_PACKAGE = "offload-sim"


def write_run(
    folder: Path,
    result: RunResult,
    config: Mapping[str, object],
    provenance: Mapping[str, object],
) -> None:
    """Write ``result.json`` and, where the run has them, decisions and traces."""
    write_row(folder, result.record.as_row(), config, provenance)
    if result.decisions:
        write_atomically(folder / DECISIONS, lambda part: write_decisions(result.decisions, part))
    if result.spans:
        spans = result.spans
        process = f"{result.record.policy} {result.record.model} {result.record.hardware}"
        write_atomically(folder / SPANS, lambda part: write_jsonl(spans, part))
        write_atomically(folder / CHROME, lambda part: write_chrome(spans, part, process=process))


def write_row(
    folder: Path,
    row: Mapping[str, object],
    config: Mapping[str, object],
    provenance: Mapping[str, object],
) -> None:
    """Write ``result.json`` alone; ``ValueError`` if a number is not finite."""
    content = {**row, "config": config, "provenance": provenance}
    infinite = [
        f"{name} ({value})"
        for name, value in row.items()
        if isinstance(value, float) and not math.isfinite(value)
    ]
    if infinite:
        raise ValueError(
            f"result: not finite: {', '.join(infinite)}; some rate, latency or size of the "
            "settings is out of all proportion"
        )
    text = json.dumps(content, indent=1, allow_nan=False) + "\n"
    folder.mkdir(parents=True, exist_ok=True)
    write_atomically(folder / RESULT, _writer(text))
    for name in (DECISIONS, SPANS, CHROME, ERROR):
        (folder / name).unlink(missing_ok=True)


def write_error(folder: Path, text: str) -> None:
    """Write the traceback of a failed run."""
    write_atomically(folder / ERROR, _writer(text))


def _writer(text: str) -> Callable[[Path], None]:
    def write(part: Path) -> None:
        part.write_text(text, encoding="utf-8", newline="\n")

    return write


# ---- provenance ----------------------------------------------------------------------------------


def software() -> dict[str, object]:
    """Versions and commit: what is the same for all rows that a process writes."""
    commit, dirty = _commit(Path(__file__).resolve().parents[1])
    return {
        "python": platform.python_version(),
        **{name.replace("-", "_"): _version(name) for name in _DISTRIBUTIONS},
        "package": _version(_PACKAGE),
        "git_commit": commit,
        "git_dirty": dirty,
    }


def provenance(
    config: Mapping[str, object],
    overrides: Collection[str],
    versions: Mapping[str, object] | None = None,
) -> dict[str, object]:
    """Versions, commit, hashes, seed and overrides that a row was computed from.

    ``profile_sha256`` is the hash of the hardware mapping as JSON with sorted keys;
    ``trace_sha256`` that of the file ``workload.path``; ``cell_sha256`` that of everything that the
    row depends on. What is not known is null. ``versions`` are those of ``software``, which takes
    a process of its own to find out.
    """
    trace = trace_hash(config)
    return {
        **(software() if versions is None else versions),
        "profile_sha256": profile_hash(config.get("hardware")),
        "trace_sha256": trace,
        "cell_sha256": cell_hash(config, trace),
        "seed": config.get("seed"),
        "overrides": list(overrides),
    }


def cell_hash(config: Mapping[str, object], trace: str | None) -> str:
    """SHA-256 of the settings that decide a row and of the trace that it reads.

    Settings of the sweep around it are left out: a cell is the same however it came to be run.
    """
    decisive = {key: value for key, value in config.items() if key not in AROUND}
    if config.get("advise") is not None:
        decisive["advise"] = config["advise"]  # then the row is an answer to that question
    return profile_hash({"config": decisive, "trace": trace})


def trace_hash(config: Mapping[str, object]) -> str | None:
    """SHA-256 of the file ``workload.path``; None where there is none."""
    workload = config.get("workload")
    path = workload.get("path") if isinstance(workload, Mapping) else None
    return _file_hash(Path(str(path))) if path else None


def profile_hash(hardware: object) -> str:
    """SHA-256 of a hardware mapping; key order does not matter."""
    text = json.dumps(hardware, sort_keys=True, separators=(",", ":"))
    return hashlib.sha256(text.encode()).hexdigest()


def _version(distribution: str) -> str | None:
    try:
        return version(distribution)
    except PackageNotFoundError:
        return None


def _file_hash(path: Path) -> str | None:
    try:
        with path.open("rb") as file:
            return hashlib.file_digest(file, "sha256").hexdigest()
    except OSError:
        return None  # the run itself says what is wrong with the file


def _commit(folder: Path) -> tuple[str | None, bool | None]:
    """Commit of a checkout whose root is ``folder``, and whether it has changes since."""
    if not (folder / ".git").exists():
        return None, None
    command = ("git", "-C", str(folder), "describe", "--always", "--dirty", "--abbrev=40")
    try:
        done = subprocess.run(  # noqa: S603 - a fixed command
            (*command, "--exclude=*"), capture_output=True, text=True, timeout=10, check=True
        )
    except (OSError, subprocess.SubprocessError):
        return None, None
    text = done.stdout.strip()
    return text.removesuffix("-dirty"), text.endswith("-dirty")
