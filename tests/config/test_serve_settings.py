"""Serving through the configuration: every option composes, every mistake is named."""

import json

import pytest

from policies.errors import OutOfMemory
from sim import files
from sim.mode_keys import mode_of
from sim.modes import run_in_sweep
from sim.serve_entry import ITERATIONS, REQUESTS, serve_job, write_serve
from sim.serve_report import serve_line, serve_table
from sim.serve_settings import build_serve
from sim.settings import build
from tests.config.composed import composed, options
from tests.serving_table import CONF

SMALL = ("mode=serve", "model=tiny", "hardware=h100", "serve.limit=40", "serve.rate=50")


def job(*overrides):
    return build_serve(composed(*SMALL, *overrides), overrides)


@pytest.mark.parametrize("group", ["admission", "prefix", "routing"])
def test_every_policy_has_the_name_of_its_file_and_serves(group):
    for name in options(group):
        built = job(f"{group}={name}")
        assert getattr(built.spec, group).name == name
        assert serve_job(built).record.status == "ok"


def test_every_fleet_composes():
    names = options("fleet")
    assert "single" in names
    for name in names:
        machines = job(f"fleet={name}").spec.machines
        assert (len(machines) == 1) == (name == "single")


@pytest.mark.parametrize("name", [n for n in options("workload") if n != "fixed"])
def test_every_workload_serves(name):
    record = serve_job(job(f"workload={name}")).record
    assert (record.status, record.n_requests) == ("ok", 40)
    assert record.workload == name


def test_machines_too_small_are_rows():
    outcome = serve_job(job("model=llama3.1-70b"))
    assert (outcome.record.status, outcome.record.oom_tier) == ("oom", "gpu")
    assert outcome.record.need_bytes > outcome.record.have_bytes
    assert outcome.run is None
    assert isinstance(OutOfMemory("gpu", 2, 1, "x"), Exception)


def test_power_caps_are_per_gpu_and_by_machine():
    built = job("fleet=mixed", "serve.cap_watts={gh200: 400, a100: 250}")
    assert [p.cap_watts for p in built.power] == [400.0, None, None, 250.0]
    assert [m.name for m in built.spec.machines] == ["gh200@400W", "h100", "h100", "a100@250W"]
    group = job("hardware=h100x8", "serve.cap_watts=300")
    assert group.power[0].cap_watts == 2400.0
    assert group.spec.machines[0].name == "h100x8@300W"


def test_belief_reaches_the_prefix_policy():
    built = job("+belief.h2d.bytes_per_s=1e9")
    assert built.spec.belief.h2d.bytes_per_s == 1e9
    assert built.spec.machines[0].h2d.bytes_per_s == 57e9


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        (("serve.budget_tokens=0",), r"serve.budget_tokens: 0 must be >= 1"),
        (("serve.rate=fast",), r"serve.rate: 'fast' must be a finite number"),
        (("+serve.rat=3",), r"serve.rat: unknown key, did you mean rate"),
        (("~serve.rate",), r"serve.rate: is missing"),
        (("serve.arrivals=never",), r"serve.arrivals: 'never' is none of"),
        (("serve.log=loud",), r"serve.log: 'loud' is none of"),
        (("workload.limit=5",), r"workload.limit: mode=serve does not read it.*; serve.limit"),
        (("workload=fixed",), r"workload.source: 'fixed' cannot be served"),
        (("admission=utilisation-aware", "admission.aging_per_s=-1"), r"admission.aging_per_s: -1"),
        (("admission=vram-aware", "admission.rules.max_overtaken=1.5"),
         r"admission.rules.max_overtaken: 1.5 must be a whole number"),
        (("+admission.weight=1",), r"admission.weight: unknown key"),
        (("admission._target_=policies.admission.Rules",), r"no dataclass with choose"),
        (("prefix._target_=policies.nothing.Here",), r"cannot be imported"),
        (("prefix=adaptive", "prefix.solver=cplex"), r"prefix.solver: 'cplex' is none of null"),
        (("serve.cap_watts=50",), r"cap_watts: 50 must be in \(120, 700\]"),
        (("serve.cap_watts={h900: 300}",), r"serve.cap_watts.h900: unknown key"),
        (("workload.path=missing.csv",), r"missing.csv: does not exist"),
        (("fleet=mixed", "+belief.h2d.bytes_per_s=1e9"), r"belief: applies to one machine"),
        (("seed=-1",), r"seed: -1 must be >= 0"),
    ],
)  # fmt: skip
def test_mistakes_are_named(overrides, message):
    with pytest.raises(ValueError, match=message):
        job(*overrides).sessions()


def test_modes():
    assert mode_of({}) == "offline"
    assert mode_of(composed("mode=kappa")) == "kappa"
    with pytest.raises(ValueError, match=r"mode: 'online' is none of offline, serve, kappa"):
        mode_of({"mode": "online"})
    # The offline mode reads the same configuration and does not mind the others' groups.
    assert build(composed("model=tiny", "workload=fixed"), ()).model.name == "tiny"


def test_files_of_a_run(tmp_path):
    built = job()
    config = composed(*SMALL)
    outcome = serve_job(built)
    write_serve(tmp_path, built, outcome, config, files.provenance(config, []))
    row = json.loads((tmp_path / files.RESULT).read_text())
    assert row["ttft_p99_s"] == outcome.record.ttft_p99_s
    assert {"config", "provenance", "mode", "status"} <= set(row)
    lines = (tmp_path / REQUESTS).read_text().splitlines()
    assert len(lines) == 1 + row["n_requests"]
    lines = (tmp_path / ITERATIONS).read_text().splitlines()
    assert len(lines) == 1 + row["n_iterations"]
    quiet = job("serve.log=none")
    write_serve(tmp_path, quiet, outcome, config, {})
    assert not (tmp_path / REQUESTS).exists()
    assert not (tmp_path / ITERATIONS).exists()


def test_rows_of_a_sweep(tmp_path):
    status, line = run_in_sweep("serve", composed(*SMALL), ["serve.rate=50"], tmp_path, "3", {})
    assert status == "ok"
    assert line.startswith("#3 serve.rate=50: ")
    kappa = composed("mode=kappa", "model=llama3.1-8b", "hardware=h100")
    status, line = run_in_sweep("kappa", kappa, [], tmp_path, "4", {})
    assert (status, "kappa_crit" in line) == ("ok", True)
    row = json.loads((tmp_path / files.RESULT).read_text())
    assert abs(row["simulated_deviation"]) < 0.01


def test_the_table_says_what_matters(capsys):
    from rich.console import Console

    for width in (80, 120):
        console = Console(width=width)
        built = job("serve.prefill_only=true", "serve.arrivals=backlog")
        record = serve_job(built).record
        console.print(serve_table(built, record, console))
        text = capsys.readouterr().out
        assert max(len(line) for line in text.splitlines()) <= width
        for words in ("TTFT", "goodput", "memory allows", "POH", "kappa_crit", "J per token"):
            assert words in " ".join(text.split())
    small = job("model=llama3.1-70b")
    record = serve_job(small).record
    console.print(serve_table(small, record, console))
    assert "oom" in capsys.readouterr().out
    assert "oom" in serve_line("0", [], record)


def test_the_experiments_of_this_mode_exist():
    names = {"kappa", "kappa-load", "serve-policies", "interconnect", "routing"}
    assert names <= {path.stem for path in (CONF / "experiment").glob("*.yaml")}
