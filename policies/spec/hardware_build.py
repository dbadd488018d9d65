"""A ``HardwareProfile`` out of nested mappings, as a YAML file or a calibration writes them.

What goes wrong first is a number that is none: YAML 1.1 reads ``25e9`` and ``25.0e9`` as text and
only ``25.0e+9`` as a float, and ``true`` counts as 1 in Python. Both are refused here, as is any
key that is unknown, missing or without provenance, so a misspelt field never means a default.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import fields
from typing import TypeVar, cast

from policies.spec.curve import Curve, Grid
from policies.spec.hardware import (
    OPTIONAL,
    PROVENANCE_KINDS,
    HardwareProfile,
    Link,
    Provenance,
    ProvenanceKind,
)

_Part = TypeVar("_Part")


def hardware_from_mapping(data: Mapping[str, object]) -> HardwareProfile:
    """Build a profile from numbers, ``{latency_s, bytes_per_s}``, ``{x, y}`` and ``{x, y, z}``.

    ``data`` has exactly the fields of ``HardwareProfile``; those in ``OPTIONAL`` may be null or
    left out. ``provenance`` maps every field that has a value, but ``name``, to
    ``{kind, source, date?, device?, driver?, residual?}``. Raises ``ValueError``
    naming ``hardware.<field>``, the value and what is allowed.
    """
    root = "hardware"
    if not isinstance(data, Mapping):
        raise ValueError(f"{root}: {data!r} must be a mapping of fields to numbers")
    required = tuple(f.name for f in fields(HardwareProfile) if f.name not in OPTIONAL)
    check_keys(root, data, required, OPTIONAL)

    def number(name: str) -> float:
        return _number(f"{root}.{name}", data[name])

    def link(name: str) -> Link:
        part = _numbers(f"{root}.{name}", data[name], ("latency_s", "bytes_per_s"))
        return _named(f"{root}.{name}", lambda: Link(**part))

    return HardwareProfile(
        name=_text(f"{root}.name", data["name"]),
        gpu_bytes=number("gpu_bytes"),
        host_bytes=number("host_bytes"),
        disk_bytes=number("disk_bytes"),
        gpu_reserve_bytes=number("gpu_reserve_bytes"),
        host_reserve_bytes=number("host_reserve_bytes"),
        disk_reserve_bytes=number("disk_reserve_bytes"),
        h2d=link("h2d"),
        d2h=link("d2h"),
        h2d_pageable=link("h2d_pageable"),
        d2h_pageable=link("d2h_pageable"),
        duplex=number("duplex"),
        disk_read=link("disk_read"),
        disk_write=link("disk_write"),
        host_copy=link("host_copy"),
        hbm_bytes_per_s=number("hbm_bytes_per_s"),
        gemm=_curve(f"{root}.gemm", data["gemm"]),
        attention_decode=_curve(f"{root}.attention_decode", data["attention_decode"]),
        attention_prefill=_curve(f"{root}.attention_prefill", data["attention_prefill"]),
        attention_window=_grid(f"{root}.attention_window", data["attention_window"]),
        cpu_attention_bytes_per_s=number("cpu_attention_bytes_per_s"),
        cpu_bytes_per_s=number("cpu_bytes_per_s"),
        launch_s=number("launch_s"),
        sync_s=number("sync_s"),
        idle_watts=number("idle_watts"),
        tdp_watts=number("tdp_watts"),
        n_gpus=_count(f"{root}.n_gpus", data["n_gpus"]),
        attention_unfused_decode=_optional_curve(root, data, "attention_unfused_decode"),
        attention_unfused_scores=_optional_curve(root, data, "attention_unfused_scores"),
        layer_norm=_optional_curve(root, data, "layer_norm"),
        rms_norm=_optional_curve(root, data, "rms_norm"),
        rotary=_optional_curve(root, data, "rotary"),
        provenance=_provenances(f"{root}.provenance", data["provenance"]),
    )


# ---- fields that have parts -------------------------------------------------------------------


def _curve(field: str, value: object) -> Curve:
    part = _mapping(field, value)
    check_keys(field, part, required=("x", "y"))
    x, y = _axis(f"{field}.x", part["x"]), _axis(f"{field}.y", part["y"])
    return _named(field, lambda: Curve(x, y))


def _optional_curve(root: str, data: Mapping[str, object], name: str) -> Curve | None:
    value = data.get(name)
    return None if value is None else _curve(f"{root}.{name}", value)


def _grid(field: str, value: object) -> Grid:
    part = _mapping(field, value)
    check_keys(field, part, required=("x", "y", "z"))
    x, y = _axis(f"{field}.x", part["x"]), _axis(f"{field}.y", part["y"])
    rows = _sequence(f"{field}.z", part["z"])
    z = tuple(_axis(f"{field}.z[{i}]", row) for i, row in enumerate(rows))
    return _named(field, lambda: Grid(x, y, z))


def _provenances(field: str, value: object) -> dict[str, Provenance]:
    entries = _mapping(field, value)
    named = (f.name for f in fields(HardwareProfile) if f.name not in ("name", "provenance"))
    required = tuple(name for name in named if name not in OPTIONAL)
    check_keys(field, entries, required, OPTIONAL)
    return {name: _provenance(f"{field}.{name}", entry) for name, entry in entries.items()}


def _provenance(field: str, value: object) -> Provenance:
    part = _mapping(field, value)
    texts = ("kind", "source", "date", "device", "driver")
    check_keys(field, part, required=texts[:2], optional=(*texts[2:], "residual"))
    text = {name: _text(f"{field}.{name}", part[name]) for name in texts if name in part}
    kind = text.pop("kind")
    if kind not in PROVENANCE_KINDS:
        raise ValueError(f"{field}.kind: {kind!r} is none of {', '.join(PROVENANCE_KINDS)}")
    residual = part.get("residual")
    checked = None if residual is None else _number(f"{field}.residual", residual)
    return _named(field, lambda: Provenance(cast(ProvenanceKind, kind), residual=checked, **text))


# ---- values -----------------------------------------------------------------------------------


def _named(field: str, build: Callable[[], _Part]) -> _Part:
    """Put the field's name before the reason that a part gives for refusing its values."""
    try:
        return build()
    except ValueError as error:
        raise ValueError(f"{field}: {error}") from error


def check_keys(
    field: str,
    data: Mapping[str, object],
    required: Sequence[str],
    optional: Sequence[str] = (),
) -> None:
    """``ValueError`` naming the first key that is unknown or missing, and those allowed."""
    allowed = ", ".join((*required, *optional))
    for key in data:
        if key not in required and key not in optional:
            raise ValueError(f"{field}.{key}: unknown key, allowed are {allowed}")
    for key in required:
        if key not in data:
            raise ValueError(f"{field}.{key}: is missing, required are {', '.join(required)}")


def _mapping(field: str, value: object) -> Mapping[str, object]:
    if not isinstance(value, Mapping):
        raise ValueError(f"{field}: {value!r} must be a mapping")
    return cast(Mapping[str, object], value)


def _sequence(field: str, value: object) -> Sequence[object]:
    if isinstance(value, str) or not isinstance(value, Sequence):
        raise ValueError(f"{field}: {value!r} must be a list")
    return cast(Sequence[object], value)


def _text(field: str, value: object) -> str:
    if not isinstance(value, str) or not value:
        raise ValueError(f"{field}: {value!r} must be a non-empty text (quote a date)")
    return value


def _number(field: str, value: object) -> float:
    if isinstance(value, bool) or not isinstance(value, int | float) or not math.isfinite(value):
        raise ValueError(
            f"{field}: {value!r} must be a finite number; in YAML an exponent needs a point and a "
            "sign, as in 25.0e+9"
        )
    return float(value)


def _count(field: str, value: object) -> int:
    if isinstance(value, bool) or not isinstance(value, int) or value < 1:
        raise ValueError(f"{field}: {value!r} must be a whole number >= 1")
    return value


def _numbers(field: str, value: object, keys: Sequence[str]) -> dict[str, float]:
    part = _mapping(field, value)
    check_keys(field, part, required=keys)
    return {key: _number(f"{field}.{key}", part[key]) for key in keys}


def _axis(field: str, value: object) -> tuple[float, ...]:
    return tuple(_number(f"{field}[{i}]", v) for i, v in enumerate(_sequence(field, value)))
