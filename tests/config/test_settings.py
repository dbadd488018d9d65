import copy
import json
import math

import pytest
import yaml
from composed import composed
from hydra.errors import HydraException
from rich.console import Console

from policies.errors import OutOfMemory
from sim.__main__ import _break_even, _job
from sim.files import write_row
from sim.report import break_even_lines, parameters
from sim.run import simulate
from sim.settings import build, explain

BASE = composed("model=tiny", "workload=fixed")
TRACE = composed("model=tiny", "workload=narrativeqa")
DEEPSEEK = composed("model=deepseek-v3", "workload=fixed")
N_GEMM = len(BASE["hardware"]["gemm"]["x"])
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
        (
            changed(BASE, hardware__h2d__bytes_per_s=1e-300),
            ["hardware.h2d.bytes_per_s: 1e-300", ">= 1 a second"],
        ),
        (changed(BASE, hardware__gemm__y=[1e-300] * N_GEMM), ["hardware.gemm.y: 1e-300"]),
        (changed(BASE, hardware__hbm_bytes_per_s=1e-9), ["hardware.hbm_bytes_per_s: 1e-09"]),
        (changed(BASE, hardware__d2h__latency_s=1e300), ["hardware.d2h.latency_s: 1e+300", "<="]),
        (changed(BASE, belief={"sync_s": 1e300}), ["belief.sync_s: 1e+300", "seconds"]),
        (
            changed(DEEPSEEK, model__n_layers=2),
            ["model.n_dense_layers: 3", "lower it, or raise model.n_layers to 3 or more"],
        ),
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
        (changed(BASE, workload__batch_size=1e6), ["1000000.0", "or auto", "without an exponent"]),
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
        build(config, ())
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


@pytest.mark.parametrize(
    ("error", "message"),
    [
        (PermissionError(13, "Permission denied", "/x/out"), "/x/out: Permission denied"),
        (NotADirectoryError(20, "Not a directory", "a/b"), "a/b: a file is in the way of this"),
        (FileExistsError(17, "File exists", "a"), "a: must be a folder, a file is in the way"),
        (OSError("no more of it"), "no more of it"),
        (BrokenPipeError(32, "Broken pipe"), "Broken pipe"),
        (yaml.YAMLError("bad\n  indent"), "bad indent"),
    ],
)
def test_what_the_system_refuses_is_one_line(error, message):
    assert explain(error).startswith(message)


def test_activations_left_to_the_disk_are_refused_by_the_name_of_the_setting():
    spec = build(changed(FLEXGEN, policy__percent=[0, 0, 0, 0, 30, 50]), ())
    with pytest.raises(ValueError, match=r"^policy\.percent: .* leaves 20 % of the activations"):
        simulate(spec)


def test_a_row_that_is_not_finite_names_its_numbers(tmp_path):
    row = {"ttft_s": math.inf, "tpot_s": 1.0, "energy_j": math.nan, "reason": ""}
    with pytest.raises(ValueError, match=r"not finite: ttft_s \(inf\), energy_j \(nan\);"):
        write_row(tmp_path, row, {}, {})
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize(
    ("need", "have", "text"),
    [
        (30_000_000_000, 24_000_000_000, "need 30.00 GB, have 24.00 GB"),
        (24_001_000_000, 24_000_000_000, "need 24001.00 MB, have 24000.00 MB"),
        (2_500, 0, "need 2.50 KB, have 0.00 KB"),
        (1_000_000_007, 1_000_000_000, "need 1000000007 B, have 1000000000 B"),
    ],
)
def test_a_memory_shortage_is_visible_in_its_unit(need, have, text):
    assert str(OutOfMemory("gpu", need, have, "x")) == f"gpu memory: {text} (largest: x)"


@pytest.mark.parametrize(
    ("n", "text"), [(8_030_000_000, "8.0 B"), (125_239_296, "125.2 M"), (33_400, "33.4 K")]
)
def test_parameters_have_a_unit_that_fits(n, text):
    assert parameters(n) == text


def test_what_is_on_the_gpu_already_is_not_advised():
    texts = []
    for placement in ("host", "auto"):
        config = changed(BASE, policy__placement=placement, workload__batch_size=1)
        spec = build(config, ())
        found = _break_even(spec, _job(spec))
        console = Console(width=400)
        with console.capture() as capture:
            console.print(break_even_lines(found))
        texts.append(capture.get())
    assert "policy.placement=auto keeps the weights of all layers there" in texts[0]
    assert "policy.placement" not in texts[1]
    assert "the weights of all layers are there already" in texts[1]


def test_a_defect_of_the_program_is_not_explained_away():
    assert explain(RuntimeError("boom")) is None
    assert explain(KeyError("x")) is None


def test_belief_changes_one_nested_number_for_the_policy_alone():
    spec = build(composed("model=tiny", "+belief.h2d.bytes_per_s=10e9", "+belief.duplex=1"), ())
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
    spec = build(config, ()).workload
    assert (spec.source, spec.path, spec.name) == ("path", "/data/chat log.csv", "chat log")
    assert (spec.limit, spec.max_new) == (64, 32)


def test_flexgen_takes_percentages_as_a_list():
    config = composed("policy=flexgen", "policy.percent=[20,80,0,100,100,0]")
    assert build(config, ()).policy.percent == (20, 80, 0, 100, 100, 0)
