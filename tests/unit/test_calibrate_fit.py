"""Fits recover the parameters that synthetic points were made with, and say when they cannot."""

from __future__ import annotations

import math
import shutil
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from calibrate import fit
from calibrate.grid import Case, cases
from calibrate.predict import predicted_s, work
from calibrate.presets import FULL, MIB, TINY
from calibrate.profile import fit_profile, read_profile, write_profile
from calibrate.quality import (
    GROUPS_OF,
    fit_points,
    leave_one_out_curve,
    leave_one_out_grid,
    quickest_s,
)
from calibrate.record import Machine, Point
from policies.spec.curve import Curve, Grid
from policies.spec.hardware import HardwareProfile, Link
from policies.spec.hardware_file import find_profile
from tests.policies_table import SMALL

HERE = Machine("Test GPU", "1.0", "2.0", "Test CPU, 8 CPUs")
READINGS = {
    "memory": {
        "gpu_bytes": 16e9,
        "gpu_used_bytes": 0.4e9,
        "host_bytes": 64e9,
        "host_used_bytes": 3e9,
        "disk_bytes": 1e12,
    },
    "power": {"watts": 25.0, "limit_watts": 300.0},
}
# A machine whose window rate is what its memory allows, so that the cost model's maximum of read
# time and arithmetic is always the arithmetic and the truth can be recovered.
TRUTH = replace(
    SMALL,
    duplex=0.9,
    gemm=Curve(tuple(map(float, TINY.rows)), (4e11, 3e12, 2e13)),
    hbm_bytes_per_s=8e11,
    attention_decode=Curve(tuple(map(float, TINY.decode_contexts)), (6e11, 7e11, 7.5e11)),
    attention_prefill=Curve(tuple(map(float, TINY.prefill_contexts)), (1e13, 2e13, 3e13)),
    attention_window=Grid(
        tuple(map(float, TINY.window_queries)),
        tuple(map(float, TINY.window_contexts)),
        ((1e11, 2e11), (2e11, 4e11), (2e11, 4.5e11)),  # no 128 queries over 64 keys: held
    ),
    attention_unfused_decode=Curve(tuple(map(float, TINY.unfused_contexts)), (1e11, 1.5e11)),
    attention_unfused_scores=Curve(tuple(map(float, TINY.unfused_contexts)), (2e9, 3e9)),
    layer_norm=Curve(tuple(8.0 * TINY.norm_width * rows for rows in TINY.pass_rows), (1e11, 3e11)),
    rms_norm=Curve(tuple(8.0 * TINY.norm_width * rows for rows in TINY.pass_rows), (2e11, 4e11)),
    rotary=Curve(tuple(24.0 * 4 * 32 * rows for rows in TINY.pass_rows), (5e10, 1e11)),
)


def synthetic(
    hardware: HardwareProfile, noise: float = 0.0, preset: object = TINY
) -> Iterator[Point]:
    rng = np.random.default_rng(1)
    for case in cases(preset):  # type: ignore[arg-type]
        if case.group in READINGS:
            yield point(case, (), READINGS[case.group])
        else:
            seconds = predicted_s(hardware, case.group, case.x)
            repeats = seconds * np.exp(rng.normal(0.0, noise, 7))
            yield point(case, tuple(map(float, repeats)))


def point(
    case: Case, seconds: tuple[float, ...], readings: dict[str, float] | None = None
) -> Point:
    return Point(
        case.group, case.name, case.x, seconds, case.fit, HERE, "2026-01-02T03:04:05+00:00",
        readings or {},
    )  # fmt: skip


def rates(value: object) -> list[float]:
    if isinstance(value, Link):
        return [value.bytes_per_s]
    if isinstance(value, Curve):
        return list(value.y)
    if isinstance(value, Grid):
        return [rate for row in value.z for rate in row]
    return [float(value)]  # type: ignore[arg-type]


@pytest.mark.parametrize(("noise", "error"), [(0.0, 2e-4), (0.02, 0.04)])
def test_synthetic_profile_is_recovered(noise: float, error: float) -> None:
    fitted = fit_profile(tuple(synthetic(TRUTH, noise)), "truth").hardware
    for field in GROUPS_OF:
        expected = pytest.approx(rates(getattr(TRUTH, field)), rel=error)
        assert rates(getattr(fitted, field)) == expected, field
    assert fitted.h2d.latency_s == pytest.approx(TRUTH.h2d.latency_s, rel=0.3)
    assert fitted.gpu_bytes == 16e9
    assert fitted.tdp_watts == 300.0


def test_link_parameters_lie_within_their_standard_errors() -> None:
    rng = np.random.default_rng(7)
    truth, off = Link(10e-6, 25e9), 0
    for _ in range(40):
        points = [
            point(Case("h2d", {"nbytes": size}), (truth.seconds(size) * rng.normal(1, 0.02),))
            for size in FULL.link_bytes
        ]
        found = fit.fit_link(fit_points(points, "h2d"))
        off += abs(found.link.bytes_per_s - truth.bytes_per_s) > 2 * found.bytes_per_s_se
        off += abs(found.link.latency_s - truth.latency_s) > 2 * found.latency_se_s
    assert off <= 16  # of 80; two standard errors with five degrees of freedom miss one in ten


def test_small_sizes_are_left_out_of_a_pageable_link() -> None:
    sizes = [s for s in FULL.link_bytes if s >= 64 * MIB]
    points = [
        point(Case("h2d_pageable", {"nbytes": s}), (s / (8e9 if s >= 64 * MIB else 14e9),))
        for s in FULL.link_bytes
    ]
    used = fit_points(points, "h2d_pageable")
    assert [p.x["nbytes"] for p in used] == sizes
    assert fit.fit_link(used).link.bytes_per_s == pytest.approx(8e9)


def test_latency_is_at_most_what_the_quickest_copy_took() -> None:
    """Large copies that get faster with size would draw the line through a latency of 3 ms."""
    seconds = {64 * 2**10: 50e-6, 64 * MIB: 12e-3, 256 * MIB: 37e-3, 1024 * MIB: 142e-3}
    points = [point(Case("h2d_pageable", {"nbytes": n}), (s,)) for n, s in seconds.items()]
    used = fit_points(points, "h2d_pageable")
    link = fit.fit_link(used, quickest_s(points, "h2d_pageable")).link
    assert fit.fit_link(used).link.latency_s > 2e-3
    assert 0.0 <= link.latency_s <= 50e-6
    assert link.seconds(1024 * MIB) == pytest.approx(142e-3, rel=0.1)


def test_gemm_rate_is_total_flops_over_total_time() -> None:
    slow, quick = (Case("gemm", {"rows": 8, "k": k, "n": 128, "elem_bytes": 2}) for k in (64, 256))
    points = [point(slow, (2.0,)), point(quick, (1.0,))]
    flops = work("gemm", slow.x) + work("gemm", quick.x)
    assert fit.fit_gemm(points).y == pytest.approx((flops / 3.0,))


def test_attention_rate_is_the_median_by_work() -> None:
    x = {"queries": 1, "keys": 128, "n_heads": 8, "n_kv_heads": 8, "head_dim": 64, "elem_bytes": 2}
    points = [
        point(Case("attention_decode", {**x, "batch": batch}), (seconds,))
        for batch, seconds in ((1, 1.0), (2, 1.0), (16, 4.0))
    ]
    biggest = work("attention_decode", points[2].x) / 4.0
    assert fit.fit_decode(points).y == pytest.approx((biggest,))
    assert fit.weighted_median([3.0, 1.0], [1.0, 1.0]) == 2.0


def test_unfused_rates_are_both_there_or_neither() -> None:
    def lack(group: str) -> HardwareProfile:
        return fit_profile([p for p in synthetic(TRUTH) if p.group != group], "mine").hardware

    for group in ("attention_unfused_decode", "attention_unfused_prefill"):
        hardware = lack(group)
        assert (hardware.attention_unfused_decode, hardware.attention_unfused_scores) == (None,) * 2
        assert not {name for name in hardware.provenance if "unfused" in name}


def test_unfused_scores_are_a_prefill_less_its_cache() -> None:
    x = {"batch": 2, "queries": 64, "keys": 64, "n_heads": 8, "n_kv_heads": 2, "head_dim": 64,
         "elem_bytes": 2}  # fmt: skip
    points = [point(Case("attention_unfused_prefill", x), (4.0,))]
    kv, scores = 2 * 2 * 64 * 2 * 64 * 2, 2 * 8 * 63 * 64
    for kv_s, left_s in ((1.0, 3.0), (3.9, 0.4), (5.0, 0.4)):
        curve = fit.fit_unfused_scores(points, Curve((64,), (kv / kv_s,)))
        assert curve.y == pytest.approx((scores / left_s,))


def test_a_window_has_no_more_queries_than_keys() -> None:
    """Cells that cannot be measured hold their context's last rate and are not left out."""
    queries, contexts = (16.0, 64.0), (32.0, 128.0)
    points = [
        point(Case("attention_window", {"batch": 1, "queries": q, "keys": k, "n_heads": 1,
                                        "n_kv_heads": 1, "head_dim": 64, "elem_bytes": 2}), (s,))
        for q, k, s in ((16, 32, 1.0), (16, 128, 2.0), (64, 128, 3.0))
    ]  # fmt: skip
    grid = fit.fit_window(points)
    assert (grid.x, grid.y) == (queries, contexts)
    assert grid.z[1][0] == grid.z[0][0]
    assert grid.z[1][1] == pytest.approx(work("attention_window", points[2].x) / 3.0)
    three = Grid((1, 8, 32), (8, 32, 64), ((1, 2, 3), (4, 9, 7), (4, 5, 6)))
    columns = [Curve((1, 8, 32), (2, 9, 5)), Curve((1, 8, 32), (3, 7, 6))]
    rows = [Curve((8, 32, 64), (1, 2, 3)), Curve((8, 32, 64), (4, 9, 7))]
    expected = [e for line in (*columns, *rows) for e in leave_one_out_curve(line)]
    assert leave_one_out_grid(three) == pytest.approx(tuple(expected))


def test_time_never_falls_along_a_curve() -> None:
    curve = fit.curve_of({1: 1.0, 2: 2.5, 4: 4.0}, lambda x: x)  # times 1, 0.8, 1
    times = [x / y for x, y in zip(curve.x, curve.y, strict=True)]
    assert times == sorted(times)
    assert times[0] == pytest.approx(0.8**0.5)
    falling = fit.curve_of({1: 1.0, 2: 0.9, 4: 0.8}, lambda x: x)  # a power limit: times still rise
    assert falling.y == pytest.approx((1.0, 0.9, 0.8))


def test_leave_one_out_is_zero_only_on_a_line() -> None:
    assert leave_one_out_curve(Curve((1, 2, 4), (10, 20, 40))) == pytest.approx((0.0,))
    assert leave_one_out_curve(Curve((1, 2, 3), (10, 30, 30))) == pytest.approx((0.5,))


def test_profile_written_and_read_back_is_equal(tmp_path) -> None:  # type: ignore[no-untyped-def]
    fitted = fit_profile(tuple(synthetic(TRUTH, 0.05)), "mine")
    path = write_profile(fitted, tmp_path / "conf" / "hardware")
    assert path.name == "mine.yaml"
    assert read_profile(path) == fitted.hardware
    assert "h2d" in path.read_text(encoding="utf-8").split("name: mine")[0]  # the quality table


def test_provenance_is_complete_and_dated() -> None:
    fitted = fit_profile(tuple(synthetic(TRUTH)), "mine").hardware
    for field in GROUPS_OF:
        source = fitted.provenance[field]
        assert source.kind == "measured"
        assert (source.date, source.device, source.driver) == ("2026-01-02", "Test GPU", "1.0")
        assert source.residual is not None
    assert fitted.provenance["disk_reserve_bytes"].kind == "guess"


def test_what_was_not_measured_is_a_guess_with_its_reason() -> None:
    points = [
        replace(p, seconds=(), skipped="no folder") if p.group == "disk_read" else p
        for p in synthetic(TRUTH)
        if p.group not in ("disk_write", "power")
    ]
    sources = fit_profile(points, "mine").hardware.provenance
    assert sources["disk_read"].kind == "guess"
    assert "no folder" in sources["disk_read"].source
    assert "not asked for" in sources["disk_write"].source
    assert sources["tdp_watts"].kind == "guess"


def test_missing_groups_are_named() -> None:
    points = [p for p in synthetic(TRUTH) if p.group not in ("gemm", "sync", "memory")]
    with pytest.raises(ValueError, match=r"no points for gemm, sync_s, memory"):
        fit_profile(points, "mine")


def test_two_machines_in_one_fit_are_refused() -> None:
    first, *others = synthetic(TRUTH)
    other = replace(first, machine=replace(HERE, device="Other GPU"))
    with pytest.raises(ValueError, match=r"one machine.*Test GPU.*Other GPU|Other GPU.*Test GPU"):
        fit_profile((other, *others), "mine")


def test_a_poor_fit_is_flagged_and_said_in_the_profile() -> None:
    def bend(p: Point) -> Point:
        if p.group != "h2d":
            return p
        # Rates that jump between sizes: no latency and rate describe them.
        factor = 2.0 if round(math.log2(p.x["nbytes"])) % 4 else 1.0
        return replace(p, seconds=tuple(factor * s for s in p.seconds))

    fitted = fit_profile([bend(p) for p in synthetic(TRUTH)], "mine")
    verdicts = {q.field: q.verdict for q in fitted.qualities}
    assert verdicts["h2d"] == "poor"
    assert verdicts["d2h"] == "good"
    assert verdicts["launch_s"] == "unchecked"  # one point, which it fits
    assert "POOR FIT" in fitted.hardware.provenance["h2d"].source
    assert "POOR FIT" not in fitted.hardware.provenance["d2h"].source


def test_one_slow_small_copy_does_not_move_the_rate() -> None:
    # As measured on an H200: 256 KiB took 18 us once where 12 us are usual, and squared relative
    # errors then put the rate 5 % above that of every large copy.
    like = next(p for p in synthetic(TRUTH) if p.group == "h2d")
    truth = Link(1e-5, 55e9)
    sizes = [2.0**power for power in range(18, 31, 2)]
    factors = [1.5] + [1.0] * (len(sizes) - 1)
    points = [
        replace(like, x={**like.x, "nbytes": n}, seconds=(factor * truth.seconds(n),) * 3)
        for n, factor in zip(sizes, factors, strict=True)
    ]
    found = fit.fit_link(fit_points(points, "h2d"))
    assert found.link.bytes_per_s == pytest.approx(truth.bytes_per_s, rel=0.01)


def test_held_out_points_judge_but_do_not_fit() -> None:
    def distort(p: Point) -> Point:
        return p if p.fit else replace(p, seconds=tuple(1.25 * s for s in p.seconds))

    clean = fit_profile(tuple(synthetic(TRUTH)), "mine")
    judged = fit_profile([distort(p) for p in synthetic(TRUTH)], "mine")
    assert all(getattr(clean.hardware, f) == getattr(judged.hardware, f) for f in GROUPS_OF)
    quality = {q.field: q for q in judged.qualities}["h2d"]
    assert quality.held_median == pytest.approx(0.2, abs=1e-3)
    assert not quality.good


def test_a_duplex_that_no_profile_holds_is_noted() -> None:
    points = [
        replace(p, seconds=tuple(3 * s for s in p.seconds)) if "duplex" in p.group else p
        for p in synthetic(TRUTH)
    ]
    fitted = fit_profile(points, "mine")
    assert fitted.hardware.duplex == 0.5
    assert "measured 0.30" in fitted.hardware.provenance["duplex"].source


def test_shipped_and_unknown_profiles(tmp_path, monkeypatch) -> None:  # type: ignore[no-untyped-def]
    monkeypatch.chdir(tmp_path)
    assert read_profile(find_profile("h200")).name == "h200"
    with pytest.raises(ValueError, match="profile: 'nosuch' is no YAML file and none of a100, "):
        find_profile("nosuch")
    own = tmp_path / "conf" / "hardware"
    own.mkdir(parents=True)
    shutil.copy(find_profile("h200"), own / "mine.yaml")
    assert find_profile("mine") == Path("conf/hardware/mine.yaml")
    shutil.copy(find_profile("h200"), own / "h200.yaml")  # the same: no matter which
    assert read_profile(find_profile("h200")).name == "h200"
    (own / "h200.yaml").write_text("name: h200\n", encoding="utf-8")
    with pytest.raises(ValueError, match=r"h200\.yaml: has the name of a shipped file"):
        find_profile("h200")
    bad = tmp_path / "bad.yaml"
    for text in ("name: [", "", "3"):
        bad.write_text(text, encoding="utf-8")
        with pytest.raises(ValueError, match=r"bad\.yaml"):
            read_profile(bad)
