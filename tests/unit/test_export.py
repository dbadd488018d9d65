"""Exported requests are the run: same plan, and a clear word where that cannot be."""

from dataclasses import replace

import pytest

from policies.run_request import read_request
from policies.tightllm import TightLLM
from sim.export import Export, read_export, request_of, write_request
from sim.job import WorkloadSpec, make_job
from sim.run import RunSpec
from tests.policies_table import POLICIES, SMALL, case

FIXED = WorkloadSpec("fixed", "fixed", n_batches=2, batch_size=2, prompt_len=8, gen_len=3)


def spec() -> RunSpec:
    model = case("tightllm", "opt").model
    return RunSpec(model, SMALL, TightLLM(), FIXED)


def test_a_request_holds_the_job_of_the_run(tmp_path):
    run = spec()
    path = write_request(run, Export(dir=str(tmp_path), steps_run=1))
    request = read_request(path)
    assert request.blocks == make_job(FIXED, run.model, SMALL, run.policy, 0).blocks
    assert (request.model, request.policy, request.steps_run) == (run.model, run.policy, 1)
    assert request.hardware == SMALL


@pytest.mark.parametrize(
    "name", ["kvpr", "hybridserve", "mixed", "cake", "cpu-attention-half", "zero-inference-cpu"]
)
def test_a_request_is_run_as_the_policy_that_was_asked_for(name, tmp_path):
    run = replace(spec(), policy=POLICIES[name])
    request = read_request(write_request(run, Export(dir=str(tmp_path))))
    assert request.policy == run.policy
    blocks = request.policy.blocks(request.blocks)
    assert request.policy.place(run.model, SMALL, blocks) == run.policy.place(
        run.model, SMALL, run.policy.blocks(request.blocks)
    )


def test_the_belief_is_what_the_engine_gets():
    belief = replace(SMALL, duplex=0.6)
    assert request_of(replace(spec(), belief=belief), Export(dir="x")).hardware == belief


def test_another_request_of_the_same_name_is_refused(tmp_path):
    write_request(spec(), Export(dir=str(tmp_path), name="one"))
    write_request(spec(), Export(dir=str(tmp_path), name="one"))
    with pytest.raises(ValueError, match=r"one\.json: holds another request"):
        write_request(spec(), Export(dir=str(tmp_path), name="one", steps_run=0))


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"dir": ""}, "export.dir: is empty"),
        ({"dtype": "int3"}, "export.dtype: 'int3' is none of float16"),
        ({"steps_run": -1}, "export.steps_run: -1 must be >= 0"),
        ({"steps_run": "all"}, "export.steps_run: 'all' must be int or null"),
        ({"folder": "x"}, "export.folder: unknown key"),
    ],
)
def test_wrong_settings_are_named(settings, message):
    with pytest.raises(ValueError, match=message):
        read_export({"export": settings})
