"""``python -m sim``: one run, or with ``-m`` (and ``+experiment=NAME``) a sweep of runs.

This is the edge: Hydra composes, ``sim.settings`` turns the result into frozen dataclasses, and
nothing behind sees a configuration. What readers get wrong: with some launchers the jobs of a sweep
run in other processes, on copies of ``task``; what they have to say is in the files they write.
"""

from __future__ import annotations

import io
import logging
import os
import sys
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import cast

import hydra
from hydra.core.config_search_path import ConfigSearchPath
from hydra.core.hydra_config import HydraConfig
from hydra.core.plugins import Plugins
from hydra.plugins.search_path_plugin import SearchPathPlugin
from hydra.types import RunMode
from omegaconf import DictConfig, OmegaConf
from rich.console import Console

from policies.attended import attended_on_cpu
from policies.cost.breakeven import BreakEven, break_even
from policies.cost.model import CostModel
from policies.errors import Infeasible
from policies.spec.hardware_file import SHIPPED
from sim import files, modes
from sim.export import make_folder, read_export, write_request
from sim.guard import SweepFailed, SweepRefused
from sim.job import make_job
from sim.mode_keys import OFFLINE, mode_of
from sim.pack import Job
from sim.report import break_even_lines, run_table
from sim.run import RunSpec, simulate
from sim.settings import build, explain
from sim.sweep import USER_ERRORS, read_resume, run_job


class WorkingFolder(SearchPathPlugin):
    """Adds ``./conf`` of the working folder, where a calibration puts its profiles."""

    def manipulate_search_path(self, search_path: ConfigSearchPath) -> None:
        """Append ``./conf`` if it exists and is not the package's own."""
        own = Path.cwd() / "conf"
        if not own.is_dir() or own.samefile(SHIPPED):
            return
        for path in own.glob("*/*.yaml"):
            if path.is_dir():
                raise ValueError(f"{path}: is a folder, must be a YAML file")
            content, shipped = path.read_bytes(), SHIPPED / path.relative_to(own)
            if shipped.is_file() and shipped.read_bytes() != content:
                raise ValueError(f"{path}: has the name of a shipped file, give it another")
            _check_text(path, content)
        search_path.append(provider="working folder", path=f"file://{own}")


def _check_text(path: Path, content: bytes) -> None:
    """``ValueError`` naming the file; what a decoder raises later would not."""
    try:
        content.decode()
    except UnicodeDecodeError as error:
        raise ValueError(f"{path}, byte {error.start}: is not UTF-8 ({error.reason})") from error


class _Warnings(logging.Handler):
    """Prints each warning of the library once."""

    def __init__(self) -> None:
        super().__init__(logging.WARNING)
        self.seen: set[str] = set()

    def emit(self, record: logging.LogRecord) -> None:
        """Print to stderr what was not printed before."""
        message = record.getMessage()
        if message not in self.seen:
            self.seen.add(message)
            _complain("warning", message)


def _complain(kind: str, message: str) -> None:
    sys.stderr.write(f"{kind}: {message}\n")


def _print_anything() -> None:
    """Let stdout and stderr replace characters that the terminal's encoding lacks."""
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(errors="replace")


# ---- one run -------------------------------------------------------------------------------------


def run_alone(config: Mapping[str, object], overrides: list[str], folder: Path) -> None:
    """Break-even, run, files, table. Raises what is wrong with the settings."""
    for key in ("grid", "advise"):
        if config.get(key) is not None:
            raise ValueError(f"{key}: needs a sweep, add -m")
    if read_resume(config).active:
        raise ValueError("sweep.resume: needs a sweep, add -m")
    mode = mode_of(config)
    if mode != OFFLINE:
        modes.run_alone(mode, config, overrides, folder)
        _say_where(folder)
        return
    console = Console()
    spec, export = build(config, overrides), read_export(config)
    make_folder(export)
    job = _job(spec)
    if job is not None:
        console.print(break_even_lines(_break_even(spec, job)))
    result = modes.with_bar(
        "simulating", "blocks", lambda progress: simulate(spec, progress, job=job)
    )
    files.write_run(folder, result, config, files.provenance(config, overrides))
    if export.dir is not None and result.record.status == "ok":
        console.print(f"request: {write_request(spec, export)}", highlight=False, soft_wrap=True)
    console.print(run_table(spec, result.record, console, overrides))
    _say_where(folder)


def _job(spec: RunSpec) -> Job | None:
    """The job of a run; None where no request is left (the run says so)."""
    try:
        return make_job(spec.workload, spec.model, spec.hardware, spec.policy, spec.seed)
    except Infeasible:
        return None


def _break_even(spec: RunSpec, job: Job) -> BreakEven:
    """Of the block with most tokens."""
    blocks = spec.policy.blocks(job.blocks)
    most = max(blocks, key=lambda block: block.n_seqs * block.max_tokens)
    largest = replace(most, index=0)
    placement = spec.policy.place(spec.model, spec.hardware, (largest,))
    belief = CostModel(spec.model, spec.belief or spec.hardware, placement)
    on_cpu = attended_on_cpu(spec.policy, belief, largest)
    attention = spec.policy.buffers.attention
    return break_even(spec.model, spec.hardware, placement, largest, attention, on_cpu)


def _say_where(folder: Path) -> None:
    cwd = Path.cwd()
    shown = folder.relative_to(cwd) if folder.is_relative_to(cwd) else folder
    Console().print(f"files: {shown}", highlight=False, soft_wrap=True)


# ---- Hydra ---------------------------------------------------------------------------------------


def main() -> int:
    """Exit code: 0, 1 where a run of a sweep failed, 2 for a wrong command, 130 after Ctrl-C."""
    _print_anything()
    # Hydra prints its errors with advice about itself unless this is set; then it raises them.
    wants_trace = os.environ.setdefault("HYDRA_FULL_ERROR", "0") == "1"
    os.environ["HYDRA_FULL_ERROR"] = "1"
    Plugins.instance().register(WorkingFolder)
    logging.getLogger().addHandler(_Warnings())

    def task(composed: DictConfig) -> None:
        settings = HydraConfig.get()
        overrides, folder = list(settings.overrides.task), Path(settings.runtime.output_dir)
        if settings.mode is RunMode.MULTIRUN:
            try:
                run_job(composed, overrides, folder, int(settings.job.num))
            except KeyboardInterrupt:
                whole = settings.sweep.dir
                raise KeyboardInterrupt(
                    f"add sweep.resume={whole} to run what is missing"
                ) from None
            return
        config = cast(dict[str, object], OmegaConf.to_container(composed, resolve=True))
        try:
            run_alone(config, overrides, folder)
        except (*USER_ERRORS, OSError) as error:
            if wants_trace:
                raise
            _complain("error", explain(error) or str(error))
            raise SystemExit(2) from error

    try:
        hydra.main(version_base="1.3", config_path=str(SHIPPED), config_name="config")(task)()
    except SweepFailed:
        return 1
    except SweepRefused as error:
        if wants_trace:
            raise
        _complain("error", str(error))
        return 2
    except KeyboardInterrupt as error:
        if wants_trace:
            raise
        _complain("error", "; ".join(["interrupted", *map(str, error.args)]))
        return 130
    except Exception as error:
        message = explain(error)
        if message is None or wants_trace:
            raise
        _complain("error", message)
        return 2
    return 0


if __name__ == "__main__":
    sys.exit(main())
