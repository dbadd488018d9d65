"""Which points a measurement takes: log-spaced grids per group, what they need, in which order.

The fit sees only grid points. Held-out points lie between grid points and, where a group has
shapes, use the shapes of a model that the grid does not contain. What readers get wrong: the order.
Points are shuffled so that a device that warms up or throttles does not bend a curve along its
axis; a coarse half of every grid comes first, so that a budget that runs out leaves sparse curves,
not missing ones.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np

from calibrate.presets import MIB, Heads, Preset
from policies.cost.model import NORM_PASSES, ROPE_PASSES

LINKS = ("h2d", "d2h", "h2d_pageable", "d2h_pageable", "host_copy")
DUPLEX = ("duplex_h2d", "duplex_d2h")
DISK = ("disk_read", "disk_write")
PASSES = ("layer_norm", "rms_norm", "rotary")
UNFUSED = ("attention_unfused_decode", "attention_unfused_prefill")
ATTENTION = ("attention_decode", "attention_prefill", "attention_window", *UNFUSED)
SECTIONS: Mapping[str, tuple[str, ...]] = {
    "links": (*LINKS, *DUPLEX),
    "disk": DISK,
    "hbm": ("hbm", *PASSES, "elementwise"),
    "gemm": ("gemm",),
    "attention": ATTENTION,
    "host": ("cpu_attention", "cpu_read"),
    "overheads": ("launch", "sync"),
    "readings": ("memory", "power"),
}
GROUPS = tuple(group for groups in SECTIONS.values() for group in groups)

# Checks are held out as a whole: the cost model prices them with rates of other groups.
CHECKS = ("elementwise",)


@dataclass(frozen=True, slots=True)
class Case:
    """A point to be measured. ``priority``: 0 is taken first; ``fit`` false: held out."""

    group: str
    x: Mapping[str, float]
    fit: bool = True
    priority: int = 0

    @property
    def name(self) -> str:
        """Group and amounts; identifies a point in a file."""
        return "/".join((self.group, *(f"{key}={value:g}" for key, value in self.x.items())))


def cases(preset: Preset) -> tuple[Case, ...]:
    """Every case of a preset, in no particular order."""
    return (
        Case("memory", {}, priority=-1),
        Case("power", {"load": 0.0}, priority=-1),
        Case("power", {"load": 1.0}, priority=1),
        Case("launch", {}),
        Case("sync", {}),
        *_transfers(preset),
        *_gemms(preset),
        *_passes(preset),
        *_attention(preset),
        *_unfused(preset),
        *_checks(preset),
    )


def select(all_cases: Iterable[Case], only: Sequence[str]) -> tuple[Case, ...]:
    """Cases of the sections or groups named; all if none is. ``ValueError`` if one is unknown."""
    if not only:
        return tuple(all_cases)
    groups: set[str] = set()
    for name in only:
        if name not in SECTIONS and name not in GROUPS:
            allowed = ", ".join(dict.fromkeys((*SECTIONS, *GROUPS)))
            raise ValueError(f"only: {name!r} is none of {allowed}")
        groups.update(SECTIONS.get(name, (name,)))
    return tuple(case for case in all_cases if case.group in groups)


def ordered(chosen: Sequence[Case], seed: int) -> tuple[Case, ...]:
    """Cases by priority, shuffled within one."""
    order = np.random.default_rng(seed).permutation(len(chosen))
    return tuple(sorted((chosen[i] for i in order), key=lambda case: case.priority))


# ---- groups -----------------------------------------------------------------------------------


def _line(group: str, key: str, amounts: Sequence[int], held: Sequence[int] = ()) -> Iterator[Case]:
    """Cases along one amount; every second one from the last is part of the coarse grid."""
    for i, amount in enumerate(reversed(amounts)):
        coarse = i % 2 == 0 or i == len(amounts) - 1
        yield Case(group, {key: amount}, priority=0 if coarse else 1)
    for amount in held:
        yield Case(group, {key: amount}, fit=False, priority=2)


def _transfers(preset: Preset) -> Iterator[Case]:
    for group in LINKS:
        yield from _line(group, "nbytes", preset.link_bytes, preset.held_link_bytes)
    for group in DUPLEX:
        yield from _line(group, "nbytes", preset.duplex_bytes)
    for group in DISK:
        yield from _line(group, "nbytes", preset.disk_bytes, preset.held_disk_bytes)
    yield from _line("hbm", "nbytes", preset.hbm_bytes)
    yield from _line("cpu_read", "nbytes", preset.cpu_read_bytes)


def _gemms(preset: Preset) -> Iterator[Case]:
    def x(rows: int, shape: tuple[int, int]) -> dict[str, float]:
        return {"rows": rows, "k": shape[0], "n": shape[1], "elem_bytes": preset.elem_bytes}

    for i, rows in enumerate(reversed(preset.rows)):
        coarse = i % 2 == 0 or rows == preset.rows[0]
        for shape in preset.gemm_shapes:
            yield Case("gemm", x(rows, shape), priority=0 if coarse else 1)
    for rows in preset.held_rows:
        for shape in preset.held_gemm_shapes:
            yield Case("gemm", x(rows, shape), fit=False, priority=2)


def _passes(preset: Preset) -> Iterator[Case]:
    d_model, (_, kv_heads, head_dim) = preset.norm_width, preset.heads[0]
    for i, rows in enumerate(reversed(preset.pass_rows)):
        common, priority = {"rows": rows, "elem_bytes": preset.elem_bytes}, i % 2
        for norm in ("layer_norm", "rms_norm"):
            yield Case(norm, {**common, "d_model": d_model}, priority=priority)
        heads = {"n_heads": kv_heads, "head_dim": head_dim}
        yield Case("rotary", {**common, **heads}, priority=priority)


def _attention(preset: Preset) -> Iterator[Case]:
    case, held = _attention_case(preset), preset.held_heads
    for i, keys in enumerate(reversed(preset.decode_contexts)):
        for heads in preset.heads:
            for batch in preset.decode_batches:
                yield case("decode", batch, 1, keys, heads, i % 2 == 0)
    for keys, batch in preset.held_decode:
        yield case("decode", batch, 1, keys, held, False, False)
    for i, keys in enumerate(reversed(preset.prefill_contexts)):
        batch = max(1, preset.prefill_tokens // keys)
        for heads in preset.heads:
            yield case("prefill", batch, keys, keys, heads, i % 2 == 0)
    for keys in preset.held_prefill:
        batch = max(1, preset.prefill_tokens // keys)
        yield case("prefill", batch, keys, keys, held, False, False)
    for queries in preset.window_queries:  # a grid needs every point: all are coarse
        for keys in preset.window_contexts:
            if queries > keys:
                continue
            for heads in preset.heads:
                yield case("window", preset.window_batch, queries, keys, heads, True)
    for queries, keys in preset.held_window:
        yield case("window", preset.window_batch, queries, keys, held, False, False)


def _unfused(preset: Preset) -> Iterator[Case]:
    """One query and as many as keys; between them only held out: the cost model draws a line."""
    case = _attention_case(preset)
    for i, keys in enumerate(reversed(preset.unfused_contexts)):
        for heads in preset.heads:
            for batch in preset.unfused_batches:
                yield case("unfused_decode", batch, 1, keys, heads, i % 2 == 0)
            batch = max(1, preset.unfused_tokens // keys)
            yield case("unfused_prefill", batch, keys, keys, heads, i % 2 == 0)
    for batch, queries, keys in preset.held_unfused:
        kind = "unfused_decode" if queries == 1 else "unfused_prefill"
        yield case(kind, batch, queries, keys, preset.held_heads, False, False)


def _attention_case(preset: Preset) -> Callable[..., Case]:
    def case(
        kind: str, batch: int, queries: int, keys: int, heads: Heads, coarse: bool, fit: bool = True
    ) -> Case:
        x = attention_x(batch, queries, keys, heads, preset.elem_bytes)
        return Case(f"attention_{kind}", x, fit, (0 if coarse else 1) if fit else 2)

    return case


def _checks(preset: Preset) -> Iterator[Case]:
    for rows, d_model, d_ffn in preset.elementwise:
        sizes = {"rows": rows, "d_model": d_model, "d_ffn": d_ffn, "elem_bytes": preset.elem_bytes}
        yield Case("elementwise", sizes, fit=False, priority=2)
    for keys, batch in preset.cpu_attention:
        yield Case("cpu_attention", attention_x(batch, 1, keys, preset.heads[0], preset.elem_bytes))


def attention_x(
    batch: int, queries: int, keys: int, heads: Heads, elem_bytes: int
) -> dict[str, float]:
    """Amounts of an attention point."""
    n_heads, n_kv_heads, head_dim = heads
    return {"batch": batch, "queries": queries, "keys": keys, "n_heads": n_heads,
            "n_kv_heads": n_kv_heads, "head_dim": head_dim, "elem_bytes": elem_bytes}  # fmt: skip


# ---- what a case needs ------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Needs:
    """Bytes that a case allocates per tier."""

    device_bytes: float = 0.0
    host_bytes: float = 0.0
    disk_bytes: float = 0.0

    def missing(self, have: Needs) -> str:
        """What does not fit into ``have``, in words; empty if all fits."""
        for tier in ("device", "host", "disk"):
            need, free = getattr(self, f"{tier}_bytes"), getattr(have, f"{tier}_bytes")
            if need > free:
                return f"needs {need / 1e9:.2f} GB of {tier} memory, {free / 1e9:.2f} GB are free"
        return ""


def needs(case: Case, preset: Preset) -> Needs:
    """Bytes that a case allocates: operands, their rotation, results."""
    x, spare = case.x, preset.rotate_bytes
    nbytes = x.get("nbytes", 0.0)
    if case.group in (*LINKS, *DUPLEX):
        # Arenas as large as the largest copy so far: source and target on each side.
        return Needs(2 * max(nbytes, spare), 3 * max(nbytes, spare))
    if case.group in DISK:
        return Needs(0.0, max(nbytes, 16 * MIB), float(preset.disk_file_bytes))
    if case.group == "hbm":
        return Needs(device_bytes=4 * nbytes)
    if case.group == "cpu_read":
        return Needs(host_bytes=2 * nbytes)
    if case.group == "gemm":
        weights = x["k"] * x["n"] * x["elem_bytes"]
        rows = x["rows"] * (x["k"] + x["n"]) * x["elem_bytes"]
        return Needs(device_bytes=max(weights, spare + weights) + 2 * rows)
    if case.group in ("elementwise", *PASSES):
        if case.group == "elementwise":
            row = 4 * x["d_model"] + 3 * x["d_ffn"]
        else:
            row = pass_elems(case.group, x)
        return Needs(device_bytes=x["rows"] * row * x["elem_bytes"])
    if case.group in (*ATTENTION, "cpu_attention"):
        kv = kv_bytes(x)
        queries = x["batch"] * x["queries"] * x["n_heads"] * x["head_dim"] * x["elem_bytes"]
        scores = x["batch"] * x["n_heads"] * x["queries"] * x["keys"] * 4.0
        if case.group == "cpu_attention":
            return Needs(host_bytes=kv + spare + 2 * kv * 4 / x["elem_bytes"] + scores)
        # Separate kernels hold the scores before and after the softmax, and the cache once more.
        extra = 2 * scores * x["elem_bytes"] / 4 + kv if case.group in UNFUSED else 0.0
        return Needs(device_bytes=max(kv, spare) + kv + 4 * queries + extra)
    return Needs()


def pass_elems(group: str, x: Mapping[str, float]) -> float:
    """Elements of one row that a norm, or the kernels that rotate keys, read and write."""
    if group == "rotary":
        return ROPE_PASSES * x["n_heads"] * x["head_dim"]
    return NORM_PASSES * x["d_model"]


def kv_bytes(x: Mapping[str, float]) -> float:
    """Bytes of K and V of an attention point."""
    return 2 * x["batch"] * x["keys"] * x["n_kv_heads"] * x["head_dim"] * x["elem_bytes"]


@dataclass(frozen=True, slots=True)
class Plan:
    """What a run measures, in order, with the preset that says how large."""

    preset: Preset
    cases: tuple[Case, ...] = field(default=())


def make_plan(preset: Preset, only: Sequence[str] = (), seed: int = 0) -> Plan:
    """The cases of a preset that are asked for, in the order in which they are taken."""
    return Plan(preset, ordered(select(cases(preset), only), seed))
