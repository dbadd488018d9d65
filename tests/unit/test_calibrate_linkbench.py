"""A machine that another tool measured gives the profile that was fitted to it independently."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from calibrate.importers.linkbench import read_linkbench
from calibrate.profile import fit_profile, read_profile
from policies.spec.curve import Curve, Grid
from policies.spec.hardware import HardwareProfile, Link
from policies.spec.hardware_file import find_profile

SOURCE = Path(__file__).parents[1] / "golden" / "h200_linkbench.json"


@pytest.fixture(scope="module")
def fitted() -> HardwareProfile:
    return fit_profile(read_linkbench(SOURCE), "h200-again").hardware


@pytest.fixture(scope="module")
def shipped() -> HardwareProfile:
    return read_profile(find_profile("h200"))


@pytest.mark.parametrize(
    ("field", "error"),
    [
        ("h2d", 1e-3),
        ("d2h", 1e-3),
        ("h2d_pageable", 0.03),  # a mean of rates there, least squares of seconds here
        ("d2h_pageable", 0.03),
        ("host_copy", 1e-3),
        ("disk_read", 0.01),
        ("disk_write", 1e-3),
        ("duplex", 0.02),  # four sizes here, the three largest there
        ("hbm_bytes_per_s", 1e-3),
        ("gemm", 5e-3),  # at 1 to 8 rows times fall by noise; here they share a mean
        ("attention_decode", 5e-3),
        ("attention_prefill", 0.06),  # Llama-70B heads weigh more than OPT-30B's
        ("attention_window", 5e-3),
        ("cpu_attention_bytes_per_s", 1e-3),
        ("cpu_bytes_per_s", 1e-3),
        ("launch_s", 1e-3),
        ("sync_s", 1e-3),
        ("gpu_bytes", 1e-9),
        ("host_bytes", 1e-9),
        ("tdp_watts", 1e-9),
    ],
)
def test_the_shipped_profile_is_reproduced(
    fitted: HardwareProfile, shipped: HardwareProfile, field: str, error: float
) -> None:
    ours, theirs = getattr(fitted, field), getattr(shipped, field)
    if isinstance(theirs, Link):
        ours, theirs = ours.bytes_per_s, theirs.bytes_per_s
    elif isinstance(theirs, Curve):
        assert ours.x == theirs.x
        ours, theirs = ours.y, theirs.y
    elif isinstance(theirs, Grid):
        assert (ours.x, ours.y) == (theirs.x, theirs.y)
        ours, theirs = sum(ours.z, ()), sum(theirs.z, ())
    assert ours == pytest.approx(theirs, rel=error)


def test_provenance_says_imported_and_from_where(fitted: HardwareProfile) -> None:
    source = fitted.provenance["cpu_attention_bytes_per_s"]
    assert source.kind == "imported"
    assert "linkbench: half_to_float" in source.source
    assert source.device == "NVIDIA H200"
    assert fitted.provenance["idle_watts"].kind == "guess"


def test_a_missing_section_is_named(tmp_path: Path) -> None:
    data = json.loads(SOURCE.read_text(encoding="utf-8"))
    del data["attn"]
    path = tmp_path / "half.json"
    path.write_text(json.dumps(data), encoding="utf-8")
    with pytest.raises(ValueError, match=r"half\.json.*attn"):
        read_linkbench(path)
