"""More of a resource, and machines as they may be."""

from dataclasses import fields, replace

import numpy as np
import pytest

from policies.spec.curve import Curve
from policies.spec.hardware import OPTIONAL, HardwareProfile, Provenance
from sim.resources import (
    RESOURCES,
    SIGMA_BY_KIND,
    UNCERTAIN,
    draw,
    scaled,
    sigmas,
    with_factors,
)
from tests.policies_table import SMALL

NAMES = {f.name for f in fields(HardwareProfile)}
WHOLE = replace(
    SMALL,
    attention_unfused_decode=Curve((128, 1024), (1e11, 2e11)),
    attention_unfused_scores=Curve((128, 1024), (1e10, 2e10)),
    layer_norm=Curve((1e6,), (4e11,)),
    rms_norm=Curve((1e6,), (5e11,)),
    rotary=Curve((1e6,), (2e11,)),
)


@pytest.mark.parametrize("resource", RESOURCES)
def test_a_resource_scales_its_numbers_and_no_other(resource):
    more = scaled(WHOLE, resource, 2.0)
    changed = {name for name in NAMES if getattr(more, name) != getattr(WHOLE, name)}
    assert changed == set(RESOURCES[resource])
    for name in changed:
        old, new = getattr(WHOLE, name), getattr(more, name)
        if hasattr(old, "bytes_per_s"):
            assert (new.latency_s, new.bytes_per_s) == (old.latency_s, 2 * old.bytes_per_s)
        elif hasattr(old, "z"):
            assert (new.x, new.y) == (old.x, old.y)
            assert np.array_equal(new.z, 2 * np.array(old.z))
        elif hasattr(old, "x"):
            assert new.x == old.x
            assert np.array_equal(new.y, 2 * np.array(old.y))
        else:
            assert new == 2 * old


def test_curves_that_a_profile_lacks_stay_lacking():
    assert scaled(SMALL, "hbm", 2.0).attention_unfused_decode is None
    deviations = dict.fromkeys(UNCERTAIN, 0.1)
    drawn = draw(SMALL, deviations, np.random.default_rng(1))
    more = draw(WHOLE, deviations, np.random.default_rng(1))
    assert set(more) - set(drawn) == set(OPTIONAL)
    assert with_factors(SMALL, more).attention_unfused_scores is None


def test_every_rate_belongs_to_one_resource():
    scaled_names = [name for names in RESOURCES.values() for name in names]
    assert len(scaled_names) == len(set(scaled_names))
    left = set(UNCERTAIN) - set(scaled_names)
    assert left == {"duplex", "launch_s", "sync_s"}


@pytest.mark.parametrize(
    ("resource", "factor", "message"),
    [("pcie", 2.0, "resource: 'pcie' is none of link"), ("link", 0.0, "factor: 0.0 must be")],
)
def test_what_cannot_be_scaled_is_refused(resource, factor, message):
    with pytest.raises(ValueError, match=message):
        scaled(SMALL, resource, factor)


def sourced(**entries: Provenance) -> HardwareProfile:
    measured = Provenance("measured", "here")
    return replace(SMALL, provenance={**dict.fromkeys(NAMES - {"name", "provenance"}, measured),
                                      **entries})  # fmt: skip


def test_a_stated_residual_counts_before_the_kind():
    hardware = sourced(
        h2d=Provenance("measured", "fit", residual=0.015), gemm=Provenance("guess", "a hunch")
    )
    found = sigmas(hardware, {"guess": 0.5})
    assert (found["h2d"], found["gemm"]) == (0.015, 0.5)
    assert found["d2h"] == SIGMA_BY_KIND["measured"]
    assert set(sigmas(SMALL, {}).values()) == {SIGMA_BY_KIND["guess"]}  # nothing is sourced
    assert "gpu_bytes" not in found
    for wrong, message in (({"hunch": 0.1}, r"sigma\.hunch"), ({"guess": -1.0}, r"sigma\.guess")):
        with pytest.raises(ValueError, match=message):
            sigmas(SMALL, wrong)


def test_drawn_machines_deviate_as_stated():
    deviations = {**dict.fromkeys(UNCERTAIN, 0.0), "h2d": 0.1, "duplex": 0.5}
    rng = np.random.default_rng(1)
    drawn = [draw(SMALL, deviations, rng) for _ in range(2000)]
    logs = np.log([factors["h2d"] for factors in drawn])
    assert abs(logs.mean()) < 0.01
    assert logs.std() == pytest.approx(0.1, rel=0.05)
    assert {factors["d2h"] for factors in drawn} == {1.0}
    machines = [with_factors(SMALL, factors) for factors in drawn[:200]]  # none is out of domain
    assert min(machine.duplex for machine in machines) >= 0.5
    assert len({machine.duplex for machine in machines}) > 100
    again = np.random.default_rng(1)
    assert draw(SMALL, deviations, again) == drawn[0]
