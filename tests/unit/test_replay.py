"""A replayed plan takes as long as the plan simulated on the other machine."""

from dataclasses import replace

import numpy as np
import pytest

from sim.job import WorkloadSpec
from sim.replay import Replay
from sim.resources import draw, sigmas, with_factors
from sim.run import RunSpec, simulate
from tests.policies_table import OPT, POLICIES, SMALL

FIXED = WorkloadSpec("fixed", "fixed", n_batches=2, batch_size=8, prompt_len=100, gen_len=5)
TRACE = WorkloadSpec("extraction", "extraction", n_batches=2, batch_size=8, limit=40, max_new=5)


@pytest.mark.parametrize("name", ["tightllm-dp", "flexgen", "accelerate", "recompute-changing"])
@pytest.mark.parametrize("workload", [FIXED, TRACE], ids=lambda w: w.name)
@pytest.mark.parametrize("engine", ["auto", "simpy"])
def test_replay_equals_simulation(name, workload, engine):
    hardware = replace(SMALL, duplex=0.9)
    spec = RunSpec(OPT, hardware, POLICIES[name], workload, trace="none", engine=engine)
    replay = Replay(spec)
    rng = np.random.default_rng(3)
    other = with_factors(hardware, draw(hardware, sigmas(hardware, {}), rng))
    for machine in (hardware, other):
        times = replay.on(machine)
        record = simulate(replace(spec, hardware=machine, belief=hardware)).record
        for field in ("prefill_s", "decode_s", "makespan_s", "tpot_s"):
            assert getattr(times, field) == pytest.approx(getattr(record, field), rel=1e-9)
    assert replay.on(other) != replay.on(hardware)


def test_a_belief_that_differs_decides():
    believed = replace(SMALL, h2d=replace(SMALL.h2d, bytes_per_s=2e9))
    workload = replace(FIXED, batch_size=64, prompt_len=1000)
    hardware = replace(SMALL, gpu_bytes=64e9)
    spec = RunSpec(OPT, hardware, POLICIES["tightllm-dp"], workload, believed, trace="none")
    mistaken, right = Replay(spec), Replay(replace(spec, belief=None))
    assert mistaken.on(hardware).decode_s > right.on(hardware).decode_s
    record = simulate(spec).record
    assert mistaken.on(hardware).decode_s == pytest.approx(record.decode_s, rel=1e-9)
