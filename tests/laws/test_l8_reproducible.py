"""L8: the same seed gives a byte-identical simulated trace, in this process and in another."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from policies.plan.op import Op
from policies.trace.jsonl import dump_span
from sim.engine import SimBackend
from tests.strategies import TableCosts, plans

ROOT = Path(__file__).parents[2]


class NoisyCosts:
    """Costs with multiplicative noise from one seeded generator."""

    def __init__(self, costs: TableCosts, seed: int) -> None:
        self.costs = costs
        self.rng = np.random.default_rng(seed)
        self.nbytes = costs.nbytes
        self.flops = costs.flops

    def seconds(self, op: Op) -> float:
        return self.costs.seconds(op) * self.rng.lognormal(0.0, 0.1)


def trace_bytes(plan, seed, duplex):
    ops, costs = plan
    trace = SimBackend(NoisyCosts(costs, seed), duplex).run(iter(ops))
    return "\n".join(dump_span(span) for span in trace.spans).encode()


@settings(deadline=None)
@given(plans(), st.integers(0, 2**32), st.sampled_from([1.0, 0.9]))
def test_same_seed_same_bytes(plan, seed, duplex):
    assert trace_bytes(plan, seed, duplex) == trace_bytes(plan, seed, duplex)


SCRIPT = """
from policies.plan.op import Kind, Op, Slot, Tier
from tests.laws.test_l8_reproducible import trace_bytes
from tests.strategies import KINDS, SLOTS, TableCosts
import sys
ops = [
    Op(kind, 0, 0, layer, reads=SLOTS[layer % 4 :][:2], writes=SLOTS[kind_i % 5 :][:2])
    for layer in range(10)
    for kind_i, kind in enumerate(dict.fromkeys(KINDS))
    if kind is not Kind.FENCE
]
costs = TableCosts({op.key: 1.0 + len(op.key) % 3 for op in ops}, {op.key: 7 for op in ops})
sys.stdout.buffer.write(trace_bytes((ops, costs), int(sys.argv[1]), 0.9))
"""


def in_new_process(seed, hash_seed):
    return subprocess.run(
        [sys.executable, "-c", SCRIPT, str(seed)],
        cwd=ROOT,
        env={**os.environ, "PYTHONHASHSEED": str(hash_seed)},
        check=True,
        capture_output=True,
    ).stdout


def test_same_bytes_whatever_the_hash_seed_and_other_bytes_for_another_seed():
    first = in_new_process(seed=1, hash_seed=1)
    assert first.count(b"\n") == 129
    assert in_new_process(seed=1, hash_seed=2) == first
    assert in_new_process(seed=2, hash_seed=1) != first
