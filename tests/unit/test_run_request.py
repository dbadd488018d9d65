from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest
import yaml

from policies.cost.model import CostModel
from policies.run_request import RunRequest, read_request
from policies.spec.hardware_build import hardware_from_mapping
from policies.spec.workload import Batch, Block
from tests.policies_table import GQA, OPT, POLICIES, RAGGED, SMALL, FixedRecompute

REQUEST = RunRequest("cell", OPT, SMALL, POLICIES["tightllm"], RAGGED, steps_run=2, seed=3)
SHIPPED = Path(__file__).parents[2] / "conf" / "hardware" / "h200.yaml"


@pytest.mark.parametrize("name", [n for n in POLICIES if not n.startswith("recompute")])
def test_a_request_survives_its_file(name: str, tmp_path: Path) -> None:
    hardware = hardware_from_mapping(yaml.safe_load(SHIPPED.read_text()))
    request = RunRequest("a", GQA, hardware, POLICIES[name], RAGGED, gpu_mem_cap_bytes=2**34)
    path = tmp_path / "a.json"
    path.write_text(request.to_json())
    assert read_request(path) == request


def test_a_profile_without_provenance_survives() -> None:
    assert RunRequest.from_json(REQUEST.to_json()) == REQUEST


def edited(**changes: object) -> str:
    data = json.loads(REQUEST.to_json())
    for path, value in changes.items():
        at = data
        *folders, last = path.split("__")
        for key in folders:
            at = at[int(key) if key.isdigit() else key]
        if value is None and last != "seed":
            del at[last]
        else:
            at[last] = value
    return json.dumps(data)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("{", "not valid JSON"),
        ("[]", "holds a list"),
        (edited(schema=2), "request.schema: 2 must be 1"),
        (edited(model=None), "request.model: is missing"),
        (edited(colour="red"), "request.colour: unknown key"),
        (edited(name="a/b"), "request.name: 'a/b'"),
        (edited(seed="x"), "request.seed: 'x' must be of type int"),
        (edited(seed=-1), "request.seed: -1"),
        (edited(steps_run=-1), "request.steps_run: -1"),
        (edited(gpu_mem_cap_bytes=0), "request.gpu_mem_cap_bytes: 0"),
        (edited(dtype="int8"), "request.dtype: 'int8' is none of float16"),
        (edited(dtype="float32"), "is 4 bytes wide, but model.weight_bytes_per_elem is 2"),
        (edited(policy__class="os.system"), "request.policy.class: 'os.system' is no policy"),
        (edited(policy__args__speed=9), "request.policy.args.speed: unknown key"),
        (edited(policy__args__bucket_tokens=0), "policy.bucket_tokens: 0"),
        (edited(policy__args__bucket_tokens="x"),
         "request.policy.args.bucket_tokens: 'x' must be a whole number"),
        (edited(policy__args__n_slices=1.5), "n_slices: 1.5 must be a whole number or null"),
        (edited(policy__args__feedback="yes"), "feedback: 'yes' must be true or false"),
        (edited(policy__args__distributor=1), "distributor: 1 must be true or false"),
        (edited(policy={"class": "policies.flexgen.FlexGen", "args": {"percent": [0, "x"]}}),
         "percent: .* must be a list of numbers or null"),
        (edited(model__n_layers="3"), "request.model.n_layers: '3' must be a whole number"),
        (edited(model__kv_bytes_per_elem=True), "kv_bytes_per_elem: True must be a finite number"),
        (edited(model__d_model=-1), "model.d_model: -1 must be positive"),
        (edited(model__d_model=None), "request.model.d_model: is missing, ModelSpec needs it"),
        (edited(hardware__h2d=None), "hardware.h2d: is missing"),
        (edited(blocks=[]), "request.blocks: is empty"),
        (edited(blocks__0__batches=[[1, "x"]]), r"request.blocks\[0\]: batches: \[1, 'x'\]"),
        (edited(blocks__0__batches=[[0, 5]]), r"request.blocks\[0\]: n_seqs: 0"),
        (edited(blocks__1__max_new=0), r"request.blocks\[1\]: max_new: 0"),
    ],
)  # fmt: skip
def test_errors_name_the_field(text: str, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        RunRequest.from_json(text)


def test_a_policy_of_a_test_has_no_file() -> None:
    with pytest.raises(ValueError, match="FixedRecompute' is no policy"):
        replace(REQUEST, policy=FixedRecompute()).to_json()


def test_files_that_cannot_be_read_are_named(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"none\.json: cannot be read"):
        read_request(tmp_path / "none.json")
    (tmp_path / "bad.json").write_text("{}")
    with pytest.raises(ValueError, match=r"bad\.json: request\.schema: is missing"):
        read_request(tmp_path / "bad.json")


def test_a_cap_makes_the_machine_smaller() -> None:
    capped = replace(REQUEST, gpu_mem_cap_bytes=2**30)
    assert capped.machine.usable_bytes("gpu") == 2**30 - SMALL.gpu_reserve_bytes
    assert replace(REQUEST, gpu_mem_cap_bytes=10**15).machine == SMALL


def test_a_cut_keeps_the_fences_between_blocks() -> None:
    blocks = (Block(0, (Batch(2, 8),), 5), Block(1, (Batch(2, 8),), 2))
    request = replace(REQUEST, blocks=blocks, steps_run=1)
    placement = request.policy.place(OPT, SMALL, blocks)
    costs = CostModel(OPT, SMALL, placement)
    ops = list(request.plan(costs))
    fences = [op.key for op in ops if op.kind.value == "fence"]
    assert fences == ["fence/g0/s4/l3/b1/p0", "fence/g1/s1/l3/b1/p0"]
    assert {op.step for op in ops if op.kind.value == "forward"} == {0, 1}
    whole = list(replace(request, steps_run=None).plan(costs))
    assert [op for op in whole if op in ops] == ops
