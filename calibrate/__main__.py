"""Command line: measure a machine, fit a profile, check it for drift, compare it with real runs.

    python -m calibrate measure --device cuda --out my-gpu.jsonl
    python -m calibrate fit my-gpu.jsonl --name my-gpu
    python -m calibrate drift my-gpu
    python -m calibrate compare traces/ --name my-gpu
    python -m calibrate import linkbench linkbench.json --out other.jsonl

``measure`` and ``drift`` need torch, numpy, scipy, PyYAML and rich; only ``fit`` and ``compare``
need matplotlib, and only ``compare`` needs the simulator. Exit code 1: a profile drifted or a
comparison failed; 2: wrong input; 130: interrupted.
"""

from __future__ import annotations

import argparse
import os
import re
import sys
from collections.abc import Sequence
from pathlib import Path

from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn
from rich.table import Table

from policies.errors import error_text

_NAME = "[A-Za-z0-9][A-Za-z0-9._-]*"


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command; its exit code."""
    args = _parser().parse_args(argv)
    console = Console(width=None if sys.stdout.isatty() else 160)
    try:
        code: int = args.run(args, console)
    except (ValueError, OSError) as error:
        complaint = f"calibrate {args.command}: {error_text(error)}"
        Console(stderr=True).print(complaint, style="red", markup=False, soft_wrap=True)
        return 2
    except KeyboardInterrupt:
        again = (
            ": the same command again takes what is missing" if args.command == "measure" else ""
        )
        Console(stderr=True).print(f"calibrate {args.command}: interrupted{again}", style="red")
        return 130
    return code


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m calibrate",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    commands = parser.add_subparsers(dest="command", required=True)
    one = commands.add_parser("measure", help="measure this machine into a file of records")
    _add_device(one)
    one.add_argument("--out", type=Path, required=True, help="file to append points to")
    one.add_argument("--only", default="", help="sections or groups, separated by commas")
    one.add_argument("--grid", choices=("auto", "full", "small", "tiny"), default="auto")
    one.set_defaults(run=_measure)

    one = commands.add_parser("fit", help="fit a hardware profile to a file of records")
    one.add_argument("points", type=Path)
    one.add_argument("--name", required=True, help="name of the profile and of its file")
    one.add_argument("--out", type=Path, default=Path("conf/hardware"), help="folder to write to")
    one.set_defaults(run=_fit)

    one = commands.add_parser("drift", help="whether a profile still fits this machine")
    one.add_argument("profile", help="name of a profile, or its YAML file")
    _add_device(one)
    one.add_argument("--grid", choices=("auto", "full", "small", "tiny"), default="auto")
    one.set_defaults(run=_drift)

    one = commands.add_parser("compare", help="hold real runs against their simulation")
    one.add_argument("traces", type=Path, help="folder with the run folders of `real`")
    one.add_argument("--name", required=True, help="name of a profile, or its YAML file")
    one.add_argument("--out", type=Path, help="folder of the report (default: TRACES/report-NAME)")
    one.add_argument("--tol-median", type=float, default=0.05)
    one.add_argument("--tol-worst", type=float, default=0.15)
    one.add_argument("--tol-median-pageable", type=float, default=0.10)
    one.add_argument("--tol-worst-pageable", type=float, default=0.30)
    one.set_defaults(run=_compare)

    one = commands.add_parser("import", help="turn another tool's measurement into records")
    one.add_argument("tool", choices=("linkbench",))
    one.add_argument("file", type=Path)
    one.add_argument("--out", type=Path, required=True)
    one.set_defaults(run=_import)
    return parser


def _add_device(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda")
    parser.add_argument("--budget-s", type=float, default=240.0, help="stop after this time")
    parser.add_argument("--disk-dir", type=Path, help="folder on the disk to measure")
    parser.add_argument("--seed", type=int, default=0)
    text = "CPU threads of torch (default: its own; all but one core if the CPU plays the device)"
    parser.add_argument("--threads", type=int, help=text)


def _bench(args: argparse.Namespace, disk_dir: Path | None):  # type: ignore[no-untyped-def]
    from calibrate.bench import Bench

    tiny = args.grid == "tiny"
    quick = args.device == "cpu"
    if args.threads is not None and args.threads < 1:
        raise ValueError(f"threads: {args.threads} must be >= 1")
    if disk_dir is not None and not disk_dir.is_dir():
        raise ValueError(f"disk-dir: {disk_dir} is not a folder")
    return Bench(
        device=args.device,
        disk_dir=disk_dir,
        seed=args.seed,
        min_s=0.5e-3 if tiny else 5e-3 if quick else 4e-3,
        n_repeats=3 if tiny else 5 if quick else 7,
        heat_s=0.0 if tiny else 0.15,
        threads=max(1, (os.cpu_count() or 1) - 1) if quick and not args.threads else args.threads,
    )


def _preset(args: argparse.Namespace):  # type: ignore[no-untyped-def]
    from calibrate.presets import PRESETS

    auto = "full" if args.device == "cuda" else "small"
    return PRESETS[auto if args.grid == "auto" else args.grid]


def _measure(args: argparse.Namespace, console: Console) -> int:
    from calibrate.grid import make_plan
    from calibrate.measure import measure

    plan = make_plan(_preset(args), [w for w in args.only.split(",") if w], args.seed)
    bench = _bench(args, args.disk_dir or args.out.resolve().parent)
    columns = (TextColumn("{task.description:<44.44}"), BarColumn(), TimeElapsedColumn())
    with Progress(*columns, console=console) as progress:
        task = progress.add_task("measure")
        summary = measure(
            bench,
            plan,
            args.out,
            args.budget_s,
            lambda i, n, name: progress.update(task, completed=i, total=n, description=name),
        )
    console.print(
        f"{summary.n_measured} points in {summary.seconds:.0f} s into {args.out}"
        f" ({summary.n_present} were there)"
    )
    for name, reason in summary.skipped.items():
        console.print(f"skipped {name}: {reason}", markup=False)
    if summary.out_of_time:
        console.print(
            f"{len(summary.out_of_time)} points did not fit into --budget-s {args.budget_s:g}; the "
            "same command again takes them"
        )
    return 0


def _fit(args: argparse.Namespace, console: Console) -> int:
    from calibrate.profile import fit_profile, write_profile
    from calibrate.quality import RULE, table
    from calibrate.record import read_points
    from policies.spec.hardware_file import SHIPPED

    if not re.fullmatch(_NAME, args.name):
        raise ValueError(f"name: {args.name!r} must match {_NAME}: it becomes a file's name")
    shipped = SHIPPED / "hardware"
    if (shipped / f"{args.name}.yaml").is_file() and args.out.resolve() != shipped:
        raise ValueError(f"name: {args.name!r} is that of a shipped profile, choose another")
    points = read_points(args.points)
    fitted = fit_profile(points, args.name)
    path = write_profile(fitted, args.out)
    _print_table(console, f"fit of {args.points}: errors of seconds", table(fitted.qualities))
    console.print(f"verdict: {RULE}", markup=False)
    console.print(f"wrote {path}")
    # Drawn last: a plot that fails costs no result.
    from calibrate.figure import draw_fit

    figure = args.points.with_suffix(".fit.png")
    draw_fit(points, fitted.hardware, figure)
    console.print(f"wrote {figure}")
    return 0


def _drift(args: argparse.Namespace, console: Console) -> int:
    from calibrate.drift import drift, rows
    from calibrate.profile import read_profile
    from policies.spec.hardware_file import find_profile

    profile = read_profile(find_profile(args.profile))
    report = drift(profile, _bench(args, args.disk_dir), _preset(args), args.seed, args.budget_s)
    if report.warning:
        console.print(f"warning: {report.warning}", style="yellow", markup=False)
    _print_table(console, f"{profile.name}: measured now against the profile", rows(report))
    console.print("drifted" if report.drifted else "fits")
    return 1 if report.drifted else 0


def _compare(args: argparse.Namespace, console: Console) -> int:
    from calibrate.profile import read_profile
    from calibrate.report import Tolerance, make_report, write_report
    from calibrate.report_text import markdown
    from policies.spec.hardware_file import find_profile

    profile = read_profile(find_profile(args.name))
    report = make_report(
        args.traces,
        profile,
        Tolerance(args.tol_median, args.tol_worst),
        Tolerance(args.tol_median_pageable, args.tol_worst_pageable),
    )
    folder = args.out or args.traces / f"report-{profile.name}"
    for path in write_report(report, folder):
        console.print(f"wrote {path}")
    console.print(markdown(report), markup=False, soft_wrap=True)
    return 0 if report.passed else 1


def _import(args: argparse.Namespace, console: Console) -> int:
    from calibrate.importers.linkbench import read_linkbench
    from calibrate.record import write_points

    points = read_linkbench(args.file)
    write_points(points, args.out)
    console.print(f"{len(points)} points into {args.out}")
    return 0


def _print_table(console: Console, title: str, rows: Sequence[Sequence[str]]) -> None:
    shown = Table(title=title)
    for i, name in enumerate(rows[0]):
        shown.add_column(name, justify="left" if i in (0, len(rows[0]) - 1) else "right")
    for row in rows[1:]:
        shown.add_row(*row)
    console.print(shown)


if __name__ == "__main__":
    sys.exit(main())
