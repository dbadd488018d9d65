"""From points to a hardware profile with its provenance, and to the YAML file that holds it.

Every number says where it comes from: measured (with date, device, driver and residual), derived
by a stated rule, or a guess with the reason why it could not be measured. What readers get wrong:
a poor fit is still written. Its source text says so, since the alternative would be a profile with
a hole.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from statistics import median
from typing import Any

import yaml

from calibrate import fit
from calibrate.grid import PASSES
from calibrate.quality import (
    GROUPS_OF,
    LINK_FROM_BYTES,
    RULE,
    Quality,
    assess,
    fit_points,
    quickest_s,
    table,
)
from calibrate.record import Point, one_machine
from policies.run_request import hardware_to_mapping
from policies.spec.curve import Curve, Grid
from policies.spec.hardware import (
    OPTIONAL,
    HardwareProfile,
    Link,
    Provenance,
    ProvenanceKind,
)
from policies.spec.hardware_build import hardware_from_mapping

_DIGITS, _LEAST_S = 5, 1e-9
_GPU_SLACK_BYTES = 0.5e9
_HOST_SLACK_BYTES = 2.0e9
_DISK_RESERVE_BYTES = 2.0e9
_DISK_GUESS = {"disk_read": Link(100e-6, 2.0e9), "disk_write": Link(100e-6, 1.0e9)}
_WATTS_GUESS = {"idle_watts": 50.0, "tdp_watts": 300.0}

_HOW = {
    "h2d": "one pinned torch copy at a time between two events",
    "d2h": "one pinned torch copy at a time between two events",
    "h2d_pageable": "blocking torch copies out of pageable memory",
    "d2h_pageable": "blocking torch copies into pageable memory",
    "host_copy": "torch copies from pageable to pinned memory, all threads, beside H2D copies",
    "disk_read": "reads in pieces of 16 MiB, one thread",
    "disk_write": "writes in pieces of 16 MiB, one thread",
    "duplex": "rate of a copy while the other direction is busy over its rate alone",
    "hbm_bytes_per_s": "device-to-device copy, bytes read plus bytes written",
    "gemm": "torch linear, weights rotated: total FLOPs over total time of all shapes",
    "layer_norm": "the engine's LayerNorm amid GEMMs, bytes read plus written",
    "rms_norm": "the engine's RMSNorm amid GEMMs, bytes read plus written",
    "rotary": "the engine's rotation of keys amid GEMMs, bytes read plus written by its kernels",
    "attention_decode": "the engine's fused attention, one query: median weighted by bytes",
    "attention_prefill": "the engine's fused attention, causal: median weighted by FLOPs",
    "attention_window": "the engine's fused attention, last queries: median weighted by FLOPs",
    "attention_unfused_decode": "the engine's separate kernels, one query: median by bytes",
    "attention_unfused_scores": "separate kernels, a prefill less its cache: median by scores",
    "cpu_attention_bytes_per_s": "torch SDPA in float32 over KV in host memory, all threads",
    "cpu_bytes_per_s": "torch sum over host memory, all threads",
    "launch_s": "host time to issue one small torch linear",
    "sync_s": "one small torch kernel and a device synchronisation",
}


@dataclass(frozen=True, slots=True)
class Fitted:
    """A profile and how good its fits are."""

    hardware: HardwareProfile
    qualities: tuple[Quality, ...]


def fit_profile(points: Sequence[Point], name: str) -> Fitted:
    """Fit all numbers of a profile; ``ValueError`` naming the groups that lack points."""
    machine = one_machine(points)
    may_lack = {*_DISK_GUESS, *OPTIONAL}
    lacking = [f for f in GROUPS_OF if f not in may_lack and not fit_points(points, f)]
    if lacking or not _readings(points, "memory"):
        what = ", ".join([*lacking, *([] if _readings(points, "memory") else ["memory"])])
        raise ValueError(
            f"measurement: no points for {what}; run measure again with the same --out, without "
            "--only and with a larger --budget-s"
        )
    values, notes = _fitted_values(points)
    provenance = {field: _measured(points, field) for field in values}
    stated, sources = _stated_values(points, machine.device)
    for field, source in sources.items():
        # A measured disk is not guessed.
        if field not in values:
            values[field], provenance[field] = stated[field], source
    values = {f: _rounded(v) if f in GROUPS_OF else v for f, v in values.items()}
    hardware = HardwareProfile(name=name, provenance=provenance, **values)
    qualities = assess(hardware, points, notes)
    provenance |= {
        q.field: _judged(provenance[q.field], q) for q in qualities if q.field in provenance
    }
    return Fitted(replace(hardware, provenance=provenance), qualities)


def _fitted_values(points: Sequence[Point]) -> tuple[dict[str, Any], dict[str, str]]:
    """Values of the fitted fields, and notes on those that the profile cannot hold as they are."""
    notes: dict[str, str] = {}
    used = {field: fit_points(points, field) for field in GROUPS_OF}
    values: dict[str, Any] = {}
    for field in LINK_FROM_BYTES:
        if used[field]:
            values[field] = fit.fit_link(used[field], quickest_s(points, field)).link
    values |= {
        "hbm_bytes_per_s": fit.fit_rate(used["hbm_bytes_per_s"]),
        "gemm": fit.fit_gemm(used["gemm"]),
        "attention_decode": fit.fit_decode(used["attention_decode"]),
        "attention_prefill": fit.fit_prefill(used["attention_prefill"]),
        "attention_window": fit.fit_window(used["attention_window"]),
        **_unfused(used),
        **{name: fit.fit_passes(used[name]) for name in PASSES if used[name]},
        "cpu_attention_bytes_per_s": fit.fit_rate(used["cpu_attention_bytes_per_s"]),
        "cpu_bytes_per_s": fit.fit_rate(used["cpu_bytes_per_s"]),
        "launch_s": fit.fit_scalar(used["launch_s"]),
        "sync_s": fit.fit_scalar(used["sync_s"]),
    }
    duplex = fit.fit_duplex(used["duplex"], values["h2d"], values["d2h"])
    values["duplex"] = min(1.0, max(0.5, duplex))
    if not 0.5 <= duplex <= 1.05:
        notes["duplex"] = f"measured {duplex:.2f}, a profile holds 0.5 to 1"
    return values, notes


def _unfused(used: Mapping[str, Sequence[Point]]) -> dict[str, Curve]:
    """Both curves of attention by separate kernels, or none: the cost model counts passes then."""
    decode, prefill = used["attention_unfused_decode"], used["attention_unfused_scores"]
    if not decode or not prefill:
        return {}
    first = fit.fit_decode(decode)
    return {
        "attention_unfused_decode": first,
        "attention_unfused_scores": fit.fit_unfused_scores(prefill, first),
    }


def _stated_values(
    points: Sequence[Point], device: str
) -> tuple[dict[str, Any], dict[str, Provenance]]:
    """Capacities, reserves, power, and what stands in for a disk that was not measured."""
    memory = _readings(points, "memory")
    values: dict[str, Any] = {}
    sources: dict[str, Provenance] = {}

    def put(field: str, value: object, kind: ProvenanceKind, source: str) -> None:
        values[field] = value
        stamp = _stamp(points, "memory") if kind != "guess" else {}
        sources[field] = _sourced(kind, source, stamp)

    if "gpu_bytes" in memory:
        put("gpu_bytes", memory["gpu_bytes"], "measured", "memory that the driver reports")
        put("host_bytes", memory["host_bytes"], "measured", "MemTotal of /proc/meminfo")
        reserve = memory["gpu_used_bytes"] + _GPU_SLACK_BYTES
        text = "memory in use once CUDA had started, and 0.5 GB for libraries and the allocator"
    else:
        half, rule = memory["host_bytes"] / 2, "half of MemTotal: the CPU plays the GPU"
        put("gpu_bytes", half, "derived", rule)
        put("host_bytes", half, "derived", rule)
        reserve, text = _GPU_SLACK_BYTES, "0.5 GB for libraries and the allocator"
    put("gpu_reserve_bytes", min(reserve, values["gpu_bytes"]), "derived", text)
    reserve = min(memory["host_used_bytes"] + _HOST_SLACK_BYTES, values["host_bytes"])
    text = "memory in use before the measurement, and 2 GB for Python and torch"
    put("host_reserve_bytes", reserve, "derived", text)
    disk = memory.get("disk_bytes")
    if disk is None:
        put("disk_bytes", 0.0, "guess", "no folder was given: the machine has no disk to use")
        put("disk_reserve_bytes", 0.0, "guess", "no disk")
    else:
        put("disk_bytes", disk, "measured", "free space of the file system")
        text = "free space that a drive needs to keep its write rate"
        put("disk_reserve_bytes", min(_DISK_RESERVE_BYTES, disk), "guess", text)
    for field, link in _DISK_GUESS.items():
        put(field, link, "guess", _why_not(points, field, "a plain NVMe drive"))
    put("n_gpus", 1, "measured", f"one device: {device}")
    _put_power(points, put)
    return values, sources


def _put_power(points: Sequence[Point], put: Any) -> None:
    idle = _readings(points, "power/load=0")
    limit = idle.get("limit_watts", _readings(points, "power/load=1").get("limit_watts"))
    found = {"idle_watts": idle.get("watts"), "tdp_watts": limit}
    text = {"idle_watts": "power that NVML reports, idle",
            "tdp_watts": "power limit that NVML reports"}  # fmt: skip
    for field, watts in found.items():
        if watts:
            put(field, watts, "measured", text[field])
        else:
            put(field, _WATTS_GUESS[field], "guess", _why_not(points, "power", "a placeholder"))


def _why_not(points: Sequence[Point], group: str, instead: str) -> str:
    reasons = [p.skipped for p in points if p.group == group and p.skipped]
    return f"{instead}; {group} was not measured: {reasons[0] if reasons else 'not asked for'}"


def _readings(points: Sequence[Point], name: str) -> Mapping[str, float]:
    found = [p for p in points if p.name == name and p.readings]
    return found[-1].readings if found else {}


# ---- provenance -------------------------------------------------------------------------------


def _stamp(points: Sequence[Point], *groups: str) -> dict[str, str]:
    dates = [p.time[:10] for p in points if p.group in groups and (p.seconds or p.readings)]
    machine = one_machine(points)
    stamp = {"date": max(dates, default=""), "device": machine.device, "driver": machine.driver}
    return {key: value for key, value in stamp.items() if value}


def _sourced(kind: ProvenanceKind, source: str, stamp: Mapping[str, str]) -> Provenance:
    date, device, driver = (stamp.get(key, "") for key in ("date", "device", "driver"))
    return Provenance(kind, source, date, device, driver)


def _measured(points: Sequence[Point], field: str) -> Provenance:
    used = fit_points(points, field)
    others = sorted({p.how for p in used if p.how})
    source = f"{'; '.join(others) or f'calibrate: {_HOW[field]}'}; {len(used)} points"
    sizes = [p.x["nbytes"] for p in used if "nbytes" in p.x]
    if field in LINK_FROM_BYTES:
        source += f" from {min(sizes) / 2**20:g} to {max(sizes) / 2**20:g} MiB"
        source += "; least squares on relative errors"
    if any(p.readings.get("o_direct") == 0.0 for p in used):
        source += "; without O_DIRECT, which the file system refuses"
    source += f"; torch {one_machine(points).torch}" if one_machine(points).torch else ""
    clocks = [p.state["sm_mhz"] for p in used if "sm_mhz" in p.state]
    if clocks:
        source += f"; {median(clocks):.0f} MHz"
    kind: ProvenanceKind = "imported" if others else "measured"
    return _sourced(kind, source, _stamp(points, *GROUPS_OF[field]))


def _judged(provenance: Provenance, quality: Quality) -> Provenance:
    """The same with its residual, and a word on a poor fit."""
    if provenance.kind not in ("measured", "imported"):
        return provenance
    source = provenance.source
    if not quality.good:
        why = quality.note or "see the fit quality table at the head of this file"
        source += f"; POOR FIT: {why}"
    residual = None if quality.residual is None else float(f"{quality.residual:.3g}")
    return replace(provenance, source=source, residual=residual)


# ---- files ------------------------------------------------------------------------------------


def _rounded(value: Any) -> Any:
    """The same value to five digits: what the file will say."""
    if isinstance(value, Link):
        latency_s = value.latency_s if value.latency_s > _LEAST_S else 0.0  # what a fit leaves of 0
        return Link(_rounded(latency_s), _rounded(value.bytes_per_s))
    if isinstance(value, Curve):
        return Curve(value.x, tuple(map(_rounded, value.y)))
    if isinstance(value, Grid):
        return Grid(value.x, value.y, tuple(tuple(map(_rounded, row)) for row in value.z))
    return float(f"{value:.{_DIGITS}g}")


def write_profile(fitted: Fitted, folder: Path) -> Path:
    """Write ``<folder>/<name>.yaml``; the file read back gives the same profile."""
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / f"{fitted.hardware.name}.yaml"
    rows = table(fitted.qualities)
    widths = [max(len(row[i]) for row in rows) for i in range(len(rows[0]))]
    lines = ["  ".join(c.ljust(w) for c, w in zip(row, widths, strict=True)) for row in rows]
    head = [f"Measured and fitted by calibrate. {RULE}.", "Errors are of seconds.", *lines]
    text = "".join(f"# {line.rstrip()}\n" for line in head)
    body = yaml.safe_dump(hardware_to_mapping(fitted.hardware), sort_keys=False, width=98)
    path.write_text(text + body, encoding="utf-8", newline="\n")
    return path


def read_profile(path: Path) -> HardwareProfile:
    """A profile from a YAML file; ``ValueError`` naming the file and what is wrong in it."""
    try:
        data = yaml.safe_load(path.read_text(encoding="utf-8"))
        return hardware_from_mapping(data)
    except (ValueError, yaml.YAMLError) as error:
        raise ValueError(f"{path}: {error}") from error
