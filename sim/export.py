"""Run requests: what ``python -m real`` executes and ``calibrate compare`` simulates again.

A request holds the resolved model, believed machine, policy and blocks of one run, so the engine
needs neither Hydra nor this package. What readers get wrong: the blocks are those of the job,
before the policy splits or merges batches; whoever runs the request does that again.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from policies.run_request import BYTES_OF_DTYPE, RunRequest
from sim.columns import write_atomically
from sim.job import make_job
from sim.run import RunSpec


@dataclass(frozen=True, slots=True)
class Export:
    """``dir`` None: nothing is exported. ``steps_run``: decode steps at most (None: all).

    ``dtype`` must be as wide as the model's elements; ``name`` None is made of what was run.
    """

    dir: str | None = None
    steps_run: int | None = None
    dtype: str = "float16"
    name: str | None = None

    def __post_init__(self) -> None:
        if self.dir == "":
            raise ValueError("export.dir: is empty, must name a folder or be null")
        if self.dtype not in BYTES_OF_DTYPE:
            raise ValueError(f"export.dtype: {self.dtype!r} is none of {', '.join(BYTES_OF_DTYPE)}")
        if self.steps_run is not None and self.steps_run < 0:
            raise ValueError(f"export.steps_run: {self.steps_run} must be >= 0 or null")


def read_export(config: Mapping[str, object]) -> Export:
    """``export`` of a configuration; ``ValueError`` for what it cannot hold."""
    settings = config.get("export") or {}
    if not isinstance(settings, Mapping):
        raise ValueError(f"export: {settings!r} must be a mapping")
    known = Export.__slots__
    for key, value in settings.items():
        if key not in known:
            raise ValueError(f"export.{key}: unknown key; the keys here are {', '.join(known)}")
        allowed = int if key == "steps_run" else str
        if value is not None and type(value) is not allowed:
            raise ValueError(f"export.{key}: {value!r} must be {allowed.__name__} or null")
    return Export(**{str(key): value for key, value in settings.items()})


def make_folder(export: Export) -> None:
    """Make ``export.dir`` before a run is spent on it; ``ValueError`` if it cannot be written."""
    if export.dir is None:
        return
    folder = Path(export.dir)
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except FileExistsError as error:
        raise ValueError(f"export.dir: {folder} is a file, must be a folder") from error
    except OSError as error:
        raise ValueError(f"export.dir: {folder} cannot be made ({error.strerror})") from error
    if not os.access(folder, os.W_OK | os.X_OK):
        raise ValueError(f"export.dir: {folder} cannot be written to")


def request_of(spec: RunSpec, export: Export) -> RunRequest:
    """The request of a run; ``ValueError`` where the engine could not run it."""
    job = make_job(spec.workload, spec.model, spec.hardware, spec.policy, spec.seed)
    first = job.blocks[0].batches[0]
    name = export.name or "-".join(
        (
            spec.policy.name,
            f"{spec.model.name}x{spec.model.n_layers}",
            spec.workload.name,
            f"p{first.prompt_len}",
            f"b{first.n_seqs}x{len(job.blocks[0].batches)}",
            f"g{job.blocks[0].max_new}",
        )
    )
    return RunRequest(
        name=name,
        model=spec.model,
        hardware=spec.belief or spec.hardware,
        policy=spec.policy,
        blocks=job.blocks,
        steps_run=export.steps_run,
        seed=spec.seed,
        dtype=export.dtype,
    )


def write_request(spec: RunSpec, export: Export) -> Path:
    """Write the request into ``export.dir``; a different one of the same name is an error."""
    request = request_of(spec, export)
    folder = Path(str(export.dir))
    folder.mkdir(parents=True, exist_ok=True)
    path, text = folder / f"{request.name}.json", request.to_json()
    if path.exists() and path.read_bytes() != text.encode():
        raise ValueError(f"{path}: holds another request; name this one with export.name")

    def write(part: Path) -> None:
        part.write_bytes(text.encode())

    write_atomically(path, write)
    return path
