"""The memory ledger by hand; random sequences are in laws/test_l9_memory.py."""

from __future__ import annotations

import pytest

from policies.errors import OutOfMemory
from policies.plan.op import Tier
from sim.memory import Ledger, Pool


def test_peak_is_what_lived_together():
    ledger = Ledger({"gpu": 100, "host": 50})
    ledger.allocate("weights", "gpu", 40)
    ledger.allocate("kv", "gpu", 60)
    ledger.free("kv")
    ledger.allocate("acts", "gpu", 10)
    assert ledger.pools() == (Pool("weights", "gpu", 40), Pool("acts", "gpu", 10))
    assert ledger.held_bytes == {"gpu": 50, "host": 0}
    assert ledger.peak_bytes == {"gpu": 100, "host": 0}


def test_out_of_memory_names_the_largest_pool_of_the_tier():
    ledger = Ledger({"gpu": 100, "host": 1000})
    ledger.allocate("host kv", "host", 900)
    ledger.allocate("weights", "gpu", 70)
    with pytest.raises(OutOfMemory) as caught:
        ledger.allocate("kv", "gpu", 40)
    assert caught.value.key == "weights"
    with pytest.raises(OutOfMemory) as caught:
        ledger.allocate("big kv", "gpu", 80)
    assert (caught.value.key, caught.value.need_bytes) == ("big kv", 150)
    assert ledger.held_bytes["gpu"] == 70


def test_tiers_of_the_plan_vocabulary():
    ledger = Ledger({Tier.GPU: 10.5})
    ledger.allocate("a", Tier.GPU, 10)
    assert ledger.peak_bytes == {"gpu": 10}
    with pytest.raises(OutOfMemory):
        ledger.allocate("b", "gpu", 1)


def test_views_are_copies():
    ledger = Ledger({"gpu": 10})
    ledger.peak_bytes["gpu"] = 99
    ledger.held_bytes["gpu"] = 99
    assert (ledger.peak_bytes, ledger.held_bytes) == ({"gpu": 0}, {"gpu": 0})


@pytest.mark.parametrize(
    ("pool", "tier", "nbytes", "message"),
    [
        ("b", "hbm", 1, "tier: 'hbm' is none of gpu"),
        ("a", "gpu", 1, "pool: 'a' is held already"),
        ("b", "gpu", -1, "nbytes: -1 of pool 'b'"),
        ("b", "gpu", 1.5, "nbytes: 1.5 of pool 'b'"),
    ],
)
def test_bad_allocation(pool, tier, nbytes, message):
    ledger = Ledger({"gpu": 10})
    ledger.allocate("a", "gpu", 1)
    with pytest.raises(ValueError, match=message):
        ledger.allocate(pool, tier, nbytes)
    assert ledger.held_bytes == {"gpu": 1}


@pytest.mark.parametrize("capacity", [-1.0, float("nan")])
def test_bad_capacity(capacity):
    with pytest.raises(ValueError, match=r"capacities\[gpu\]"):
        Ledger({"gpu": capacity})


def test_audit_finds_books_that_do_not_add_up():
    ledger = Ledger({"gpu": 100})
    ledger.allocate("a", "gpu", 10)
    ledger._pools["a"] = Pool("a", "gpu", 11)
    with pytest.raises(AssertionError, match="gpu holds 15 bytes, its pools 16"):
        ledger.allocate("b", "gpu", 5)
