"""The h200 profile is its measurement: every measured number recomputed from the record.

The fits stand here a second time, from the raw fields of the record, so that an edit of the YAML
that the record does not support fails. The YAML rounds to four or five digits, hence the
tolerance.
"""

from __future__ import annotations

import json
from importlib import resources
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import yaml

from policies.spec.hardware import HardwareProfile, Link
from policies.spec.hardware_build import hardware_from_mapping

GIB = 2**30
LARGE = slice(-3, None)  # 64 MiB, 256 MiB, 1 GiB: what weights and KV are copied in
ROUNDING = 1e-3


@pytest.fixture(scope="module")
def record() -> dict[str, Any]:
    path = Path(__file__).parent / "h200_linkbench.json"
    data: dict[str, Any] = json.loads(path.read_text(encoding="utf-8"))
    return data


@pytest.fixture(scope="module")
def h200() -> HardwareProfile:
    path = resources.files("conf") / "hardware" / "h200.yaml"
    return hardware_from_mapping(yaml.safe_load(path.read_text(encoding="utf-8")))


def near(expected: float | list[float]) -> Any:
    return pytest.approx(expected, rel=ROUNDING)


def same_link(link: Link, latency_s: float, bytes_per_s: float) -> None:
    assert link.latency_s == near(latency_s)
    assert link.bytes_per_s == near(bytes_per_s)


def test_capacities(record: dict[str, Any], h200: HardwareProfile) -> None:
    assert h200.gpu_bytes == pytest.approx(record["sys"]["gpu_gib"] * GIB, rel=1e-9)
    assert h200.host_bytes == pytest.approx(record["sys"]["MemTotal"] * GIB, rel=1e-9)
    assert h200.disk_bytes == record["disk"]["free_gib"] * GIB


def test_provenance_names_the_run(record: dict[str, Any], h200: HardwareProfile) -> None:
    device, driver = record["sys"]["smi"].split(", ")[:2]
    measured = [p for p in h200.provenance.values() if p.kind == "measured"]
    assert len(measured) > 15
    assert {(p.device, p.driver) for p in measured} == {(device, driver)}


@pytest.mark.parametrize("direction", ["h2d", "d2h"])
def test_pinned_link(record: dict[str, Any], h200: HardwareProfile, direction: str) -> None:
    """Least squares on relative errors of t = t0 + s / BW over sizes from 256 KiB.

    On absolute errors the rounding of the 1 GiB copy (50 us) would drown a t0 of 10 us.
    """
    size = np.array(record["link"]["size"], dtype=float)
    seconds = np.array(record["link"][f"{direction}_lat_us"]) * 1e-6
    kept = size >= 256 * 2**10
    size, seconds = size[kept], seconds[kept]
    terms = np.stack([1 / seconds, size / seconds], axis=1)  # [n_sizes, 2]
    (latency, per_byte), *_ = np.linalg.lstsq(terms, np.ones(len(size)), rcond=None)
    link: Link = getattr(h200, direction)
    same_link(link, latency, 1 / per_byte)

    error = max(abs(link.seconds(s) / t - 1) for s, t in zip(size, seconds, strict=True))
    assert h200.provenance[direction].residual == pytest.approx(error, abs=1e-3)
    # The back-to-back copies of the same run are a second, independent reading of the peak.
    assert link.bytes_per_s == pytest.approx(
        np.mean(record["link"][direction][LARGE]) * 1e9, rel=5e-3
    )


@pytest.mark.parametrize("direction", ["h2d", "d2h"])
def test_pageable_link(record: dict[str, Any], h200: HardwareProfile, direction: str) -> None:
    rates = record["link"][f"pageable_{direction}"]
    peak = float(np.mean(rates[LARGE])) * 1e9
    smallest = record["link"]["size"][0]
    latency = smallest / (rates[0] * 1e9) - smallest / peak
    same_link(getattr(h200, f"{direction}_pageable"), latency, peak)


def test_duplex(record: dict[str, Any], h200: HardwareProfile) -> None:
    link = record["link"]
    shares = [
        both / alone
        for way in ("h2d", "d2h")
        for both, alone in zip(link[f"bidir_{way}"][LARGE], link[way][LARGE], strict=True)
    ]
    assert h200.duplex == near(float(np.mean(shares)))


def test_disk_and_host_copy(record: dict[str, Any], h200: HardwareProfile) -> None:
    disk = record["disk"]
    latency = 2**20 / (disk["direct_1t_1M"] * 1e9) - 2**20 / (disk["direct_1t_16M"] * 1e9)
    same_link(h200.disk_read, latency, disk["direct_1t_16M"] * 1e9)
    same_link(h200.disk_write, latency, disk["write_gbs"] * 1e9)
    assert h200.host_copy.bytes_per_s == near(record["host"]["to_pinned"] * 1e9)


def test_gemm(record: dict[str, Any], h200: HardwareProfile) -> None:
    """FLOP-weighted over the shapes: total FLOPs over total time, not the mean of rates."""
    gemm = record["gemm"]
    shapes = [tuple(map(int, label.split()[1].split("x"))) for label in gemm["float16"]]
    assert len(shapes) == 8
    expected = []
    for i, rows in enumerate(gemm["tokens"]):
        flops = [2 * rows * k * n for k, n in shapes]
        rates = [curve[i] * 1e12 for curve in gemm["float16"].values()]
        expected.append(sum(flops) / sum(f / r for f, r in zip(flops, rates, strict=True)))
    assert list(h200.gemm.x) == gemm["tokens"]
    assert list(h200.gemm.y) == near(expected)


def test_attention(record: dict[str, Any], h200: HardwareProfile) -> None:
    attention = record["attn"]
    assert list(h200.attention_decode.x) == list(h200.attention_prefill.x) == attention["ctx"]
    decode = [rate * 1e9 for rate in attention["opt30"]["decode_kv_gbs"]]
    prefill = [rate * 1e12 for rate in attention["opt30"]["prefill_tflops"]]
    assert list(h200.attention_decode.y) == near(decode)
    assert list(h200.attention_prefill.y) == near(prefill)


def test_attention_prefill_counts_causal_pairs_once(record: dict[str, Any]) -> None:
    """The record's rate over its times: 2 * batch * heads * ctx^2 * head_dim FLOPs a call."""
    opt30 = record["attn"]["opt30"]
    for ctx, batch, ms, tflops in zip(
        record["attn"]["ctx"],
        opt30["prefill_batch"],
        opt30["prefill_ms"],
        opt30["prefill_tflops"],
        strict=True,
    ):
        assert 2 * batch * 56 * ctx**2 * 128 / (ms * 1e-3) == pytest.approx(tflops * 1e12, rel=0.01)


def test_attention_window(record: dict[str, Any], h200: HardwareProfile) -> None:
    times = record["attn"]["recompute_b16_opt30"]
    queries, contexts = (64, 256, 512), (1024, 2048, 4096)
    assert h200.attention_window.x == queries
    assert h200.attention_window.y == contexts
    for i, n in enumerate(queries):
        expected = []
        for ctx in contexts:
            pairs = sum(ctx - n + q + 1 for q in range(n))  # lower right: the last query sees all
            seconds = times[f"ctx{ctx}_nr{n}"]["lower_right_ms"] * 1e-3
            expected.append(4 * 16 * 7168 * pairs / seconds)
        assert list(h200.attention_window.z[i]) == near(expected)


def test_scalars(record: dict[str, Any], h200: HardwareProfile) -> None:
    assert h200.hbm_bytes_per_s == near(record["link"]["d2d_rw"] * 1e9)
    assert h200.cpu_attention_bytes_per_s == near(record["host"]["half_to_float"] * 1e9)
    # A copy reads and writes every byte.
    assert h200.cpu_bytes_per_s == near(2 * record["host"]["threads"]["16"] * 1e9)
    assert h200.launch_s == near(record["launch"]["linear_issue_us"] * 1e-6)
    assert h200.sync_s == near(record["launch"]["add_plus_sync_us"] * 1e-6)
    assert record["sys"]["smi"].endswith(f"{h200.tdp_watts:.2f} W")
