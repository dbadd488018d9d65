"""Hardware profiles: the links' law, the parser, and what no shipped profile may claim.

The expected peaks here are the physical ones, written independently of the profiles: a profile
that quotes both directions of a link as one, or sparse FLOP/s as dense, fails.
"""

from __future__ import annotations

import copy
from collections.abc import Callable
from dataclasses import fields, replace
from importlib import resources

import pytest
import yaml
from hypothesis import given
from hypothesis import strategies as st
from omegaconf import OmegaConf

from policies.spec.curve import Curve
from policies.spec.hardware import OPTIONAL, HardwareProfile, Link
from policies.spec.hardware_build import hardware_from_mapping

KIB, MIB, GIB = 2**10, 2**20, 2**30

# One-way physical peak of each host link in bytes/s, after line coding; gh200-paper counts both
# directions of NVLink-C2C as one, as its source does.
LINK_PEAK = {
    "t4": 15.75e9,
    "rtx3090": 31.5e9,
    "a800": 31.5e9,
    "a100": 31.5e9,
    "h100": 63.0e9,
    "h100x8": 8 * 64e9,  # the kappa paper's link rate, before line coding
    "h100x8-paper": 63.0e9,
    "h200": 63.0e9,
    "h200-measured": 63.0e9,
    "b200": 63.0e9,
    "gh200": 450e9,
    "gh200-measured": 450e9,
    "gh200-paper": 900e9,
    "unified-hbm": 8e12,
}
# Datasheet peaks: dense FP16 FLOP/s with FP32 accumulation, HBM bytes/s.
CHIP_PEAK = {
    "t4": (65e12, 320e9),
    "rtx3090": (71e12, 936e9),
    "a800": (312e12, 1935e9),
    "a100": (312e12, 2039e9),
    "h100": (989e12, 3350e9),
    "h100x8": (8 * 989e12, 8 * 3350e9),
    "h100x8-paper": (8 * 989e12, 8 * 3350e9),
    "h200": (989e12, 4800e9),
    "h200-measured": (989e12, 4800e9),
    "b200": (2250e12, 8000e9),
    "gh200": (989e12, 4000e9),
    "gh200-measured": (989e12, 4000e9),
    "gh200-paper": (989e12, 4000e9),
    "unified-hbm": (2250e12, 8000e9),
}
NAMES = sorted(LINK_PEAK)
FOLDER = resources.files("conf") / "hardware"


def read(name: str) -> dict[str, object]:
    """Raw content of a shipped profile, as PyYAML reads it."""
    data = yaml.safe_load((FOLDER / f"{name}.yaml").read_text(encoding="utf-8"))
    assert isinstance(data, dict)
    return data


def profile(name: str) -> HardwareProfile:
    return hardware_from_mapping(read(name))


# ---- Link -------------------------------------------------------------------------------------


@given(st.floats(1.0, 1e12), st.floats(1e6, 1e13))
def test_doubling_the_rate_without_latency_halves_the_time(nbytes: float, rate: float) -> None:
    assert Link(0.0, 2 * rate).seconds(nbytes) == pytest.approx(Link(0.0, rate).seconds(nbytes) / 2)


@given(st.floats(1.0, 1e12), st.floats(1e-9, 1e-2), st.floats(1e6, 1e13))
def test_effective_rate_rises_with_size_and_never_reaches_the_peak(
    nbytes: float, latency: float, rate: float
) -> None:
    link = Link(latency, rate)
    effective = link.effective_bytes_per_s(nbytes)
    assert effective <= rate * (1 + 1e-12)
    assert effective <= link.effective_bytes_per_s(2 * nbytes) * (1 + 1e-12)
    # Half of the peak is reached at latency * rate bytes.
    assert link.effective_bytes_per_s(latency * rate) == pytest.approx(rate / 2)


def test_nothing_moves_in_no_time() -> None:
    assert Link(1e-3, 1e9).seconds(0) == 0.0


@pytest.mark.parametrize(
    ("nbytes", "expected_gb_per_s"),
    [
        (32 * KIB, 2.41),
        (64 * KIB, 4.63),
        (128 * KIB, 8.57),
        (256 * KIB, 14.9),
        (1 * MIB, 33.4),
        (2 * MIB, 42.1),
    ],
)
def test_effective_rate_of_published_granularity(nbytes: int, expected_gb_per_s: float) -> None:
    link = Link(latency_s=13e-6, bytes_per_s=57e9)
    assert link.effective_bytes_per_s(nbytes) / 1e9 == pytest.approx(expected_gb_per_s, rel=5e-3)


@pytest.mark.parametrize(
    ("latency", "rate", "message"),
    [(-1e-6, 1e9, "latency_s: -1e-06"), (0.0, 0.0, "bytes_per_s: 0.0"), (0.0, -1.0, "bytes_per_s")],
)
def test_link_refuses_bad_values(latency: float, rate: float, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        Link(latency, rate)


# ---- shipped profiles -------------------------------------------------------------------------


def test_every_shipped_profile_is_checked_here() -> None:
    shipped = sorted(
        p.name.removesuffix(".yaml") for p in FOLDER.iterdir() if p.name != "README.md"
    )
    assert shipped == NAMES == sorted(CHIP_PEAK)


@pytest.mark.parametrize("name", NAMES)
def test_profile_parses_alike_in_both_yaml_readers(name: str) -> None:
    """PyYAML (a bare GPU machine) and OmegaConf (Hydra) disagree on ``25.0e9``."""
    hydra = OmegaConf.to_container(OmegaConf.load(str(FOLDER / f"{name}.yaml")))
    assert hydra == read(name)
    assert profile(name).name == name


@pytest.mark.parametrize("name", NAMES)
def test_every_number_has_a_provenance(name: str) -> None:
    hardware = profile(name)
    numbers = {f.name for f in fields(hardware) if getattr(hardware, f.name) is not None}
    assert set(hardware.provenance) == numbers - {"name", "provenance"}
    assert {f.name for f in fields(hardware)} - numbers <= set(OPTIONAL)


@pytest.mark.parametrize("name", NAMES)
def test_no_link_is_faster_than_its_bus(name: str) -> None:
    hardware = profile(name)
    for link in ("h2d", "d2h", "h2d_pageable", "d2h_pageable"):
        assert getattr(hardware, link).bytes_per_s <= LINK_PEAK[name], link
    # Both directions at once stay below the bus as well, and pageable never beats pinned.
    assert hardware.duplex * hardware.h2d.bytes_per_s <= LINK_PEAK[name]
    assert hardware.h2d_pageable.bytes_per_s <= hardware.h2d.bytes_per_s
    assert hardware.d2h_pageable.bytes_per_s <= hardware.d2h.bytes_per_s


def test_paper_link_is_the_physical_total_of_both_directions() -> None:
    paper, physical = profile("gh200-paper"), profile("gh200")
    assert paper.h2d.bytes_per_s == physical.h2d.bytes_per_s + physical.d2h.bytes_per_s
    both_ways = paper.duplex * (paper.h2d.bytes_per_s + paper.d2h.bytes_per_s)
    assert both_ways == physical.duplex * 2 * physical.h2d.bytes_per_s == 900e9


@pytest.mark.parametrize("name", NAMES)
def test_no_rate_is_above_the_chip(name: str) -> None:
    hardware, (peak_flops, peak_hbm) = profile(name), CHIP_PEAK[name]
    assert 0.7 * peak_hbm <= hardware.hbm_bytes_per_s <= peak_hbm
    assert max(hardware.gemm.y) <= peak_flops
    assert max(hardware.attention_prefill.y) <= peak_flops
    assert max(max(row) for row in hardware.attention_window.z) <= peak_flops
    assert max(hardware.attention_decode.y) <= peak_hbm


@pytest.mark.parametrize("name", NAMES)
def test_compute_rates_respect_the_memory_that_feeds_them(name: str) -> None:
    """Two FLOPs a row need one 2-byte weight, so FLOP/s <= rows * HBM bytes/s; likewise one FLOP
    a query needs one byte of KV."""
    hardware = profile(name)
    hbm = hardware.hbm_bytes_per_s
    assert hardware.gemm.x[0] == 1  # below the first point the rate is a guess of the curve
    for rows, rate in zip(hardware.gemm.x, hardware.gemm.y, strict=True):
        assert rate <= rows * hbm
    assert hardware.gemm(1) >= 0.8 * hbm
    for queries, row in zip(hardware.attention_window.x, hardware.attention_window.z, strict=True):
        assert max(row) <= queries * hbm


def test_gib_and_gb_are_not_swapped() -> None:
    """Memory is sold in binary units (24 GB is 24 GiB), links and disks in decimal ones."""
    hardware = profile("rtx3090")
    assert hardware.gpu_bytes == 24 * GIB
    assert hardware.host_bytes == 128 * GIB
    assert hardware.h2d.bytes_per_s == 23.9e9
    assert hardware.disk_bytes == 2.0e12
    assert profile("a800").gpu_bytes == 80 * GIB
    assert profile("a800").h2d.bytes_per_s == 24.8e9


@pytest.mark.parametrize("name", NAMES)
def test_reserves_leave_room(name: str) -> None:
    hardware = profile(name)
    for tier in ("gpu", "host", "disk"):
        capacity = getattr(hardware, f"{tier}_bytes")
        assert 0.9 * capacity < hardware.usable_bytes(tier) < capacity


# ---- parser -----------------------------------------------------------------------------------


def _set(*path: str | int, to: object) -> Callable[[dict[str, object]], None]:
    def change(data: dict[str, object]) -> None:
        node: object = data
        for key in path[:-1]:
            node = node[key]  # type: ignore[index]
        node[path[-1]] = to  # type: ignore[index]

    return change


def _drop(*path: str) -> Callable[[dict[str, object]], None]:
    def change(data: dict[str, object]) -> None:
        node: object = data
        for key in path[:-1]:
            node = node[key]  # type: ignore[index]
        del node[path[-1]]  # type: ignore[attr-defined]

    return change


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (_set("pcie_gen", to=5), r"hardware\.pcie_gen: unknown key, allowed are name, gpu_bytes"),
        (_drop("gemm"), r"hardware\.gemm: is missing"),
        (_set("gpu_bytes", to="25.0e9"), r"hardware\.gpu_bytes: '25\.0e9' must be a finite number"),
        (_set("gpu_bytes", to=True), r"hardware\.gpu_bytes: True must be a finite number"),
        (_set("sync_s", to=float("nan")), r"hardware\.sync_s: nan must be a finite number"),
        (_set("host_bytes", to=float("inf")), r"hardware\.host_bytes: inf must be a finite"),
        (_set("name", to=""), r"hardware\.name: '' must be a non-empty text"),
        (_set("n_gpus", to=1.5), r"hardware\.n_gpus: 1\.5 must be a whole number >= 1"),
        (_set("n_gpus", to=0), r"hardware\.n_gpus: 0 must be a whole number >= 1"),
        (_set("duplex", to=1.8), r"hardware\.duplex: 1\.8 must be in"),
        (_set("h2d", to=25e9), r"hardware\.h2d: 25000000000\.0 must be a mapping"),
        (_set("h2d", "gb_per_s", to=25), r"hardware\.h2d\.gb_per_s: unknown key"),
        (_drop("d2h", "latency_s"), r"hardware\.d2h\.latency_s: is missing"),
        (_set("d2h", "bytes_per_s", to=0), r"hardware\.d2h: bytes_per_s: 0\.0 must be positive"),
        (_set("gemm", "x", to="1, 2"), r"hardware\.gemm\.x: '1, 2' must be a list"),
        (_set("gemm", "y", 2, to=None), r"hardware\.gemm\.y\[2\]: None must be a finite number"),
        (_set("gemm", "x", 1, to=1), r"hardware\.gemm: Curve\.x: .* strictly increasing"),
        (_set("attention_window", "z", 0, to=7), r"hardware\.attention_window\.z\[0\]: 7 must be"),
        (_set("attention_window", "y", to=[1, 2]), r"hardware\.attention_window: Grid\.z"),
        (_drop("provenance", "h2d"), r"hardware\.provenance\.h2d: is missing"),
        (_set("provenance", "pcie", to={}), r"hardware\.provenance\.pcie: unknown key"),
        (_drop("provenance", "h2d", "source"), r"provenance\.h2d\.source: is missing"),
        (_set("provenance", "h2d", "kind", to="rumour"), r"h2d\.kind: 'rumour' is none of datash"),
        (_set("provenance", "h2d", "date", to=20261129), r"h2d\.date: 20261129 .*quote a date"),
        (_set("provenance", "h2d", "residual", to="1 %"), r"h2d\.residual: '1 %' must be a finite"),
        (_set("gpu_reserve_bytes", to=1e15), r"hardware\.gpu_reserve_bytes: .* exceeds gpu_bytes"),
    ],
)
def test_parser_names_the_field_that_it_refuses(
    change: Callable[[dict[str, object]], None], message: str
) -> None:
    data = copy.deepcopy(read("h200"))
    change(data)
    with pytest.raises(ValueError, match=message):
        hardware_from_mapping(data)


def test_parser_keeps_every_value() -> None:
    """No field is dropped, swapped with its neighbour or converted to another unit."""
    data, hardware = read("h200"), profile("h200")
    names = [f.name for f in fields(HardwareProfile)]
    assert set(names) - set(OPTIONAL) == set(data)
    assert sorted(data, key=names.index) == [name for name in names if name in data]
    for name, raw in data.items():
        value = getattr(hardware, name)
        if name == "provenance":
            continue
        if not isinstance(raw, dict):
            assert value == raw, name
            continue
        for part, inner in raw.items():
            kept = getattr(value, part)
            if part == "z":
                assert [list(row) for row in kept] == inner, name
            else:
                assert (list(kept) if isinstance(inner, list) else kept) == inner, (name, part)
    entry = hardware.provenance["h2d"]
    assert (entry.kind, entry.date, entry.device) == ("measured", "2026-11-29", "NVIDIA H200")
    assert entry.residual is not None


def test_profile_without_provenance_of_one_field_is_refused() -> None:
    hardware = profile("t4")
    partial = {k: v for k, v in hardware.provenance.items() if k != "duplex"}
    with pytest.raises(ValueError, match="no entry for duplex"):
        replace(hardware, provenance=partial)


def test_curves_that_a_profile_may_lack() -> None:
    data = copy.deepcopy(read("h200"))
    source = {"kind": "measured", "source": "here"}
    curves: dict[str, object] = {
        "attention_unfused_decode": {"x": [128, 1024], "y": [2.0e11, 3.0e11]},
        "attention_unfused_scores": {"x": [256], "y": [1.0e11]},
    }
    assert hardware_from_mapping({**data, **dict.fromkeys(curves)}) == profile("h200")
    both = {**data, **curves, "provenance": {**data["provenance"], **dict.fromkeys(curves, source)}}  # type: ignore[dict-item]
    hardware = hardware_from_mapping(both)
    assert hardware.attention_unfused_decode == Curve((128, 1024), (2e11, 3e11))
    assert hardware.attention_unfused_scores == Curve((256,), (1e11,))
    with pytest.raises(ValueError, match=r"no entry for attention_unfused_decode"):
        hardware_from_mapping({**data, **curves})
    one = {**both, "attention_unfused_decode": None}
    with pytest.raises(ValueError, match=r"hardware\.attention_unfused_decode: is null"):
        hardware_from_mapping(one)
    with pytest.raises(ValueError, match=r"attention_unfused_scores\.y: 0\.5 must be >= 1"):
        replace(hardware, attention_unfused_scores=Curve((256,), (0.5,)))
