"""FlexGen's cost model as its authors fitted it (papers.md 3.3): FG-30B-512, -256, FG-175B-512."""

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import yaml

from policies.cost.flexgen_model import GIB, T4_FITTED, FlexGenJob, flexgen_times
from policies.spec.model import ModelSpec

CONF = Path(__file__).parents[2] / "conf" / "model"


def model(name: str) -> ModelSpec:
    return ModelSpec(**yaml.safe_load((CONF / f"{name}.yaml").read_text(encoding="utf-8")))


def shares(*percent: float) -> np.ndarray:
    """Nine shares of FlexGen's six percentages."""
    pairs = [percent[i : i + 2] for i in (0, 2, 4)]
    return np.array([x for gpu, cpu in pairs for x in (gpu, cpu, 100 - gpu - cpu)]) / 100


def test_fg_30b_512():
    """exact: 20 80 0 100 0 100, 48 x 3, prompt 512, 32 tokens."""
    times = flexgen_times(FlexGenJob(model("opt-30b"), 512, 32, 48, 3), T4_FITTED)
    at = shares(20, 80, 0, 100, 0, 100)
    assert times.prefill_layer_s(at) == pytest.approx(4.389, rel=0.002)
    assert times.decode_layer_s(at) == pytest.approx(0.2924, rel=0.002)
    assert times.tokens_per_s(at) == pytest.approx(7.136, rel=0.002)


def test_fg_30b_256():
    """exact: 10 90 0 100 0 100, 160 x 2, prompt 256."""
    times = flexgen_times(FlexGenJob(model("opt-30b"), 256, 32, 160, 2), T4_FITTED)
    assert times.tokens_per_s(shares(10, 90, 0, 100, 0, 100)) == pytest.approx(12.97, rel=0.002)


def test_fg_175b_512():
    """flag: their disk constant gives 0.154 where 0.69 was measured; 2.7 GiB/s would fit."""
    job, at = FlexGenJob(model("opt-175b"), 512, 32, 32, 8), shares(0, 50, 0, 0, 0, 100)
    assert flexgen_times(job, T4_FITTED).tokens_per_s(at) == pytest.approx(0.154, rel=0.005)
    faster = replace(T4_FITTED, disk_read_bytes_per_s=2.7 * GIB)
    assert flexgen_times(job, faster).tokens_per_s(at) == pytest.approx(0.69, rel=0.02)
