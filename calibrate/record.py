"""Measurement records: one line of JSON a point, raw repeats kept.

A point says what was done in amounts (bytes, rows, contexts) and how long each repeat took; no rate
is ever stored, since which rate matters is the fit's question. What readers get wrong: ``fit`` is
decided before measuring. A point with ``fit`` false is held out: no fit may use it, and the error
on it is the one to quote.
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass, field, fields
from pathlib import Path
from statistics import median, quantiles
from typing import Any, cast

SCHEMA = 1


@dataclass(frozen=True, slots=True)
class Machine:
    """What was measured on: a device, its driver and the software in between."""

    device: str
    driver: str = ""
    torch: str = ""
    host: str = ""

    def __post_init__(self) -> None:
        if not self.device:
            raise ValueError("machine.device: is empty, must name the device that was measured")


@dataclass(frozen=True, slots=True)
class Point:
    """One measured point of a group.

    ``x``: amounts. ``seconds``: raw repeats, in the order in which they were taken; empty for a
    point that was read off (``readings``) or not taken at all (``skipped`` says why).
    ``how``: what another tool timed, in words; empty for what this package times.
    ``state``: clocks in MHz, power in W and temperature in C around the measurement, where the
    device says.
    """

    group: str
    name: str
    x: Mapping[str, float]
    seconds: tuple[float, ...]
    fit: bool
    machine: Machine
    time: str
    readings: Mapping[str, float] = field(default_factory=dict)
    state: Mapping[str, float] = field(default_factory=dict)
    skipped: str = ""
    how: str = ""

    def __post_init__(self) -> None:
        if not self.group or not self.name:
            raise ValueError(
                f"point: group {self.group!r} and name {self.name!r} must not be empty"
            )
        for s in self.seconds:
            if not (math.isfinite(s) and s > 0):
                raise ValueError(f"point {self.name}: seconds has {s}, all must be finite and > 0")
        for what in ("x", "readings", "state"):
            for key, value in getattr(self, what).items():
                if not math.isfinite(value):
                    raise ValueError(f"point {self.name}: {what}.{key} is {value}, must be finite")
        if not (self.seconds or self.readings or self.skipped):
            raise ValueError(f"point {self.name}: has no seconds, readings or reason to be skipped")

    @property
    def median_s(self) -> float:
        """Median of the repeats; ``ValueError`` if there are none."""
        if not self.seconds:
            raise ValueError(f"point {self.name}: was not timed ({self.skipped or 'a reading'})")
        return median(self.seconds)

    @property
    def spread(self) -> float:
        """Interquartile range of the repeats over their median; 0 for a single one."""
        if len(self.seconds) < 2:
            return 0.0
        low, _, high = quantiles(self.seconds, n=4, method="inclusive")
        return (high - low) / self.median_s


_FIELDS = frozenset(f.name for f in fields(Point)) | {"schema"}


def dump_point(point: Point) -> str:
    """A point as one line of JSON without its end."""
    record = {"schema": SCHEMA, **asdict(point)}
    return json.dumps(record, allow_nan=False, separators=(",", ":"))


def parse_point(line: str) -> Point:
    """A point from a line; ``ValueError`` naming the field that is wrong."""
    record = json.loads(line)
    if not isinstance(record, dict):
        raise ValueError(f"point: {line[:40]!r} is not a JSON object")
    if record.get("schema") != SCHEMA:
        raise ValueError(f"point.schema: {record.get('schema')!r} is not {SCHEMA}")
    if set(record) != _FIELDS:
        wrong = ", ".join(sorted(set(record) ^ _FIELDS))
        raise ValueError(f"point: fields missing or unknown: {wrong}")
    machine = record["machine"]
    if not isinstance(machine, dict) or set(machine) != {f.name for f in fields(Machine)}:
        raise ValueError(f"point.machine: {machine!r} must have device, driver, torch and host")
    return Point(
        group=str(record["group"]),
        name=str(record["name"]),
        x=_numbers("x", record["x"]),
        seconds=tuple(_number("seconds", s) for s in record["seconds"]),
        fit=bool(record["fit"]),
        machine=Machine(**{key: str(value) for key, value in machine.items()}),
        time=str(record["time"]),
        readings=_numbers("readings", record["readings"]),
        state=_numbers("state", record["state"]),
        skipped=str(record["skipped"]),
        how=str(record["how"]),
    )


def read_points(path: Path) -> tuple[Point, ...]:
    """Points of a file, the last of each name; ``ValueError`` naming file and line.

    A last line without its end is what a killed measurement leaves behind: it is not a point.
    """
    points: dict[str, Point] = {}
    for number, line in enumerate(whole_lines(path), start=1):
        try:
            point = parse_point(line)
        except ValueError as error:
            raise ValueError(f"{path}:{number}: {error}") from error
        earlier = points.get(point.name, point).machine
        if (earlier.device, earlier.host) != (point.machine.device, point.machine.host):
            raise ValueError(
                f"{path}:{number}: {point.name} is of {point.machine.device}, an earlier line of "
                f"{earlier.device}: a file holds one machine"
            )
        points[point.name] = point
    return tuple(points.values())


def whole_lines(path: Path) -> list[str]:
    """Lines of a file that have an end."""
    try:
        text = path.read_text(encoding="utf-8")
    except UnicodeDecodeError as error:
        raise ValueError(f"{path}: is not UTF-8 text ({error})") from error
    return text[: text.rfind("\n") + 1].splitlines()


def write_points(points: Iterable[Point], path: Path) -> None:
    """Write points to a new file."""
    lines = "".join(dump_point(point) + "\n" for point in points)
    path.write_text(lines, encoding="utf-8", newline="\n")


def one_machine(points: Iterable[Point]) -> Machine:
    """The machine of all points; ``ValueError`` if they come from several devices or none."""
    machines = {(p.machine.device, p.machine.host): p.machine for p in points}
    if len(machines) != 1:
        found = "; ".join(f"{device} in {host}" for device, host in machines) or "none"
        raise ValueError(f"measurement: must come from one machine, comes from {found}")
    return next(iter(machines.values()))


def _number(name: str, value: object) -> float:
    if isinstance(value, bool) or not isinstance(value, int | float):
        raise ValueError(f"point.{name}: {value!r} is not a number")
    return float(value)


def _numbers(name: str, value: object) -> dict[str, float]:
    if not isinstance(value, dict):
        raise ValueError(f"point.{name}: {value!r} must be an object of numbers")
    items = cast(dict[str, Any], value)
    return {key: _number(f"{name}.{key}", v) for key, v in items.items()}
