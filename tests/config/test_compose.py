import functools

import pytest
from composed import composed, options

from sim.run import RunSpec, simulate
from sim.settings import build

TINY = ("model=tiny", "workload=fixed", "workload.n_batches=2", "workload.batch_size=1",
        "workload.prompt_len=16", "workload.gen_len=2")  # fmt: skip


@functools.cache
def built(*overrides: str) -> RunSpec:
    return build(composed(*overrides), overrides)


@pytest.mark.parametrize("name", options("policy"))
def test_every_policy_has_the_name_of_its_file(name):
    assert built(*TINY, f"policy={name}").policy.name == name


@pytest.mark.parametrize("name", options("model"))
def test_every_model_composes(name):
    assert built(f"model={name}").model.name == name


@pytest.mark.parametrize("name", options("hardware"))
def test_every_machine_composes(name):
    assert built(f"hardware={name}").hardware.name == name


@pytest.mark.parametrize("name", options("workload"))
def test_every_workload_composes(name):
    spec = built(f"workload={name}").workload
    assert (spec.name, spec.source, spec.batch_size, spec.n_batches) == (name, name, None, 4)
    if name != "fixed":
        assert (spec.limit, spec.max_new) == (64, 32)


def test_defaults():
    spec = built()
    names = (spec.model.name, spec.hardware.name, spec.workload.name, spec.policy.name)
    assert names == ("opt-30b", "rtx3090", "sharegpt", "tightllm")
    assert (spec.seed, spec.trace, spec.belief) == (0, "auto", None)


@pytest.mark.parametrize("policy", options("policy"))
def test_every_policy_runs_two_steps_on_every_machine(policy):
    base = built(*TINY, f"policy={policy}")
    for name in options("hardware"):
        hardware = built(f"hardware={name}").hardware
        result = simulate(RunSpec(base.model, hardware, base.policy, base.workload))
        assert result.record.status == "ok", name
        assert {decision.step for decision in result.decisions} == {0, 1}
        assert result.record.bound_ratio >= 1.0 - 1e-9
