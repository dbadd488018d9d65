"""In no cell of `ablation` is TightLLM more than one per cent slower than what it could have done.

OPT-30B with 12 of its layers, so that 50 runs take seconds; tests/README.md has the worst cell with
all 48. FlexGen needs more GPU memory for its unfused attention: where the batch of the cell does
not fit, both are compared at the largest batch that does.
"""

from __future__ import annotations

from dataclasses import replace
from functools import cache
from importlib import resources

import pytest
import yaml

from policies.flexgen import FlexGen
from policies.spec.hardware import HardwareProfile
from policies.spec.hardware_build import hardware_from_mapping
from policies.spec.model import ModelSpec
from policies.tightllm import TightLLM
from sim.job import WorkloadSpec, make_job
from sim.result import RunRecord
from sim.run import RunSpec, simulate

FULL = TightLLM()
ABLATIONS = (
    TightLLM(distributor=False),
    TightLLM(loader=False),
    TightLLM(distributor=False, loader=False),
)
STATIC = FlexGen(kv_pinned=True)
CELLS = [(h, n) for h in ("rtx3090", "a800") for n in (512, 1024, 2048, 4096, 8192)]


def config(group: str, name: str):
    path = resources.files("conf") / group / f"{name}.yaml"
    return yaml.safe_load(path.read_text(encoding="utf-8"))


@cache
def machine(name: str) -> HardwareProfile:
    return hardware_from_mapping(config("hardware", name))


@cache
def model() -> ModelSpec:
    return replace(ModelSpec(**config("model", "opt-30b")), n_layers=12)


def workload(prompt_len: int, batch_size: int | None) -> WorkloadSpec:
    return WorkloadSpec("fixed", "fixed", 4, batch_size, prompt_len=prompt_len, gen_len=8)


def auto_size(policy, hardware: str, prompt_len: int) -> int:
    job = make_job(workload(prompt_len, None), model(), machine(hardware), policy, 0)
    return job.blocks[0].batches[0].n_seqs


@cache
def run(policy, hardware: str, prompt_len: int, batch_size: int) -> RunRecord:
    record = simulate(
        RunSpec(model(), machine(hardware), policy, workload(prompt_len, batch_size), trace="none")
    ).record
    assert record.status == "ok"
    return record


@pytest.mark.parametrize(("hardware", "prompt_len"), CELLS)
def test_never_more_than_a_per_cent_slower(hardware, prompt_len):
    size = min(auto_size(p, hardware, prompt_len) for p in (FULL, *ABLATIONS))
    found = run(FULL, hardware, prompt_len, size)
    for other in ABLATIONS:
        compare(found, run(other, hardware, prompt_len, size))
    size = min(size, auto_size(STATIC, hardware, prompt_len))
    compare(run(FULL, hardware, prompt_len, size), run(STATIC, hardware, prompt_len, size))


def compare(found: RunRecord, other: RunRecord) -> None:
    assert found.decode_s <= 1.01 * other.decode_s
    assert found.prefill_s <= 1.01 * other.prefill_s


@pytest.mark.parametrize(("hardware", "prompt_len"), CELLS)
def test_planning_is_below_five_per_cent(hardware, prompt_len):
    found = run(FULL, hardware, prompt_len, auto_size(FULL, hardware, prompt_len))
    assert 0.0 < found.solve_s < 0.05 * found.makespan_s


def test_nor_where_the_disk_holds_the_kv():
    """OPT-66B on a 3090: a prediction that stored the whole prompt in every step lost 39 % here."""
    big = ModelSpec(**config("model", "opt-66b"))
    job = replace(workload(4096, 1), gen_len=3)
    found, without = (
        simulate(RunSpec(big, machine("rtx3090"), policy, job, trace="none")).record
        for policy in (FULL, ABLATIONS[0])
    )
    assert found.kv_disk > 0.9
    compare(found, without)


def test_the_comparison_can_fail():
    slow = run(STATIC, "a800", 1024, 16)
    with pytest.raises(AssertionError):
        compare(slow, run(FULL, "a800", 1024, 16))
