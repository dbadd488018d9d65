import copy
import json

import pytest
from composed import composed
from hydra.errors import HydraException

from sim.settings import build, explain

BASE = composed("model=tiny", "workload=fixed")
TRACE = composed("model=tiny", "workload=narrativeqa")
FLEXGEN = composed("model=tiny", "workload=fixed", "policy=flexgen")


def changed(base: dict, **values: object) -> dict:
    """A copy of ``base`` with ``group__key__key=value`` set."""
    config = copy.deepcopy(base)
    for path, value in values.items():
        *parents, last = path.split("__")
        part = config
        for name in parents:
            part = part[name]
        part[last] = value
    return config


@pytest.mark.parametrize(
    ("config", "parts"),
    [
        (changed(BASE, foo=1), ["foo: unknown key", "workload"]),
        (changed(BASE, seed=-1), ["seed: -1", ">= 0"]),
        (changed(BASE, seed="x"), ["seed: 'x'", "whole number"]),
        (changed(BASE, trace="some"), ["trace: 'some'", "auto"]),
        (changed(BASE, model__n_layer=3), ["model.n_layer: unknown", "did you mean n_layers"]),
        (changed(BASE, model__n_layers=0), ["model.n_layers: 0", "positive"]),
        (changed(BASE, model__n_layers=True), ["model.n_layers: True", "whole number"]),
        (changed(BASE, model__gated_ffn=1), ["model.gated_ffn: 1", "true or false"]),
        (changed(BASE, model__from_hf="/nope/x.json"), ["/nope/x.json: cannot be read"]),
        (changed(BASE, hardware__gpu_bytes=-1), ["hardware.gpu_bytes: -1", "positive"]),
        (changed(BASE, hardware__h2d__rate=1), ["hardware.h2d.rate: unknown key"]),
        (changed(BASE, hardware="rtx"), ["hardware: 'rtx'", "mapping"]),
        (changed(BASE, belief={"h2d": {"bytesper_s": 1}}), ["belief.h2d.bytesper_s: unknown"]),
        (changed(BASE, belief={"h3d": 1}), ["belief.h3d: unknown key", "h2d"]),
        (changed(BASE, belief={"h2d": {"bytes_per_s": 0}}), ["belief.h2d: bytes_per_s: 0"]),
        (changed(BASE, belief=3), ["belief: 3", "null or a mapping"]),
        (changed(BASE, workload__prompt_len=-5), ["workload.prompt_len: -5", ">= 1"]),
        (changed(BASE, workload__prompt_len=1e3), ["workload.prompt_len: 1000.0", "exponent"]),
        (changed(BASE, workload__batch_size=0), ["workload.batch_size: 0", "auto"]),
        (changed(BASE, workload__batch_size="big"), ["workload.batch_size: 'big'", "auto"]),
        (changed(BASE, workload__source="mars"), ["workload.source: 'mars'", "sharegpt"]),
        (changed(TRACE, workload__limit=0), ["workload.limit: 0", "null"]),
        (changed(TRACE, workload__limit="all"), ["workload.limit: 'all'", "whole number or null"]),
        (changed(TRACE, workload__task="extraction"), ["workload.task", "workload.path"]),
        (
            changed(TRACE, workload__path="x.csv", workload__n_generated=3),
            ["workload.n_generated: 3", "null with workload.path"],
        ),
        (changed(BASE, policy__slices=3), ["policy.slices: unknown", "n_slices"]),
        (changed(BASE, policy__n_slices=0), ["policy.n_slices: 0"]),
        (changed(BASE, policy__bucket_tokens=1.5), ["policy.bucket_tokens: 1.5", "whole number"]),
        (changed(BASE, policy__solver="cplex"), ["policy.solver: 'cplex'", "gurobi, highs"]),
        (changed(BASE, policy___target_="policies.x.Y"), ["policy._target_: 'policies.x.Y'"]),
        (changed(BASE, policy___target_="builtins.dict"), ["'builtins.dict' is no policy"]),
        (changed(FLEXGEN, policy__percent="all"), ["policy.percent: 'all'", "list of numbers"]),
        (changed(FLEXGEN, policy__attention="flash"), ["policy.attention: 'flash'", "unfused"]),
    ],
)
def test_what_is_wrong_is_named(config, parts):
    with pytest.raises(ValueError) as caught:
        build(config)
    message = str(caught.value)
    assert all(part in message for part in parts), message
    assert "\n" not in message
    assert explain(caught.value) == message


@pytest.mark.parametrize(
    ("override", "parts"),
    [
        (
            "policy=tightlm",
            ["policy: 'tightlm' does not exist", "did you mean tightllm", "flexgen"],
        ),
        ("hardware=gtx", ["hardware: 'gtx' does not exist", "rtx3090"]),
        ("model=gpt", ["model: 'gpt' does not exist", "llama3.1-8b"]),
        ("workload=chat", ["workload: 'chat' does not exist", "narrativeqa"]),
        ("+experiment=none", ["experiment: 'none' does not exist"]),
        ("experiment=none", ["+experiment=none"]),
        ("workload.prompt_length=3", ["workload.prompt_length: unknown key", "limit"]),
        ("hardware.h2d.rate=3", ["hardware.h2d.rate: unknown key", "bytes_per_s"]),
        ("polcy=tightllm", ["polcy: unknown key", "did you mean policy"]),
        ("belief.h2d.bytes_per_s=1", ["belief is empty", "+belief.KEY=VALUE"]),
        ("workload.limit=[", ["workload.limit"]),
    ],
)
def test_what_hydra_refuses_is_one_line_without_its_advice(override, parts):
    with pytest.raises(HydraException) as caught:
        composed(override)
    message = explain(caught.value)
    assert all(part in message for part in parts), message
    assert "\n" not in message
    assert "hydra.cc" not in message


def test_a_defect_of_the_program_is_not_explained_away():
    assert explain(RuntimeError("boom")) is None
    assert explain(KeyError("x")) is None


def test_belief_changes_one_nested_number_for_the_policy_alone():
    spec = build(composed("model=tiny", "+belief.h2d.bytes_per_s=10e9", "+belief.duplex=1"))
    assert spec.belief.h2d.bytes_per_s == 10e9
    assert spec.belief.h2d.latency_s == spec.hardware.h2d.latency_s
    assert spec.hardware.h2d.bytes_per_s == 23.9e9
    assert (spec.belief.duplex, spec.hardware.duplex) == (1.0, 0.8)


@pytest.fixture
def checkpoint(tmp_path):
    folder = tmp_path / "small-llama"
    folder.mkdir()
    config = {
        "architectures": ["LlamaForCausalLM"],
        "hidden_size": 1024,
        "intermediate_size": 2816,
        "num_hidden_layers": 8,
        "num_attention_heads": 16,
        "num_key_value_heads": 4,
        "vocab_size": 32000,
        "max_position_embeddings": 4096,
        "torch_dtype": "bfloat16",
    }
    (folder / "config.json").write_text(json.dumps(config))
    return folder


def test_a_checkpoint_replaces_the_model_but_not_what_the_command_line_sets(checkpoint):
    overrides = [f"model.from_hf={checkpoint}"]
    spec = build(composed(*overrides), overrides).model
    assert (spec.name, spec.n_layers, spec.d_model) == ("small-llama", 8, 1024)
    overrides.append("model.n_layers=6")
    spec = build(composed(*overrides), overrides).model
    assert (spec.name, spec.n_layers, spec.d_model) == ("small-llama", 6, 1024)


def test_a_path_replaces_the_source_and_names_the_workload():
    config = composed("workload=sharegpt", "workload.path=/data/chat log.csv")
    spec = build(config).workload
    assert (spec.source, spec.path, spec.name) == ("path", "/data/chat log.csv", "chat log")
    assert (spec.limit, spec.max_new) == (64, 32)


def test_flexgen_takes_percentages_as_a_list():
    config = composed("policy=flexgen", "policy.percent=[20,80,0,100,100,0]")
    assert build(config).policy.percent == (20, 80, 0, 100, 100, 0)
