import csv
import json
from dataclasses import fields

import pytest
from composed import composed

from sim import files
from sim.result import RunRecord
from sim.run import RunResult, simulate
from sim.settings import build
from sim.sweep import run_in_sweep

SMALL = ("model=tiny", "workload=fixed", "workload.n_batches=2", "workload.batch_size=2",
         "workload.prompt_len=64", "workload.gen_len=4")  # fmt: skip
CONFIG = composed(*SMALL)
RESULT = simulate(build(CONFIG, ()))


@pytest.fixture
def folder(tmp_path):
    files.write_run(tmp_path / "run", RESULT, CONFIG, files.provenance(CONFIG, SMALL))
    return tmp_path / "run"


def test_the_files_of_a_run_and_no_others(folder):
    names = {path.name for path in folder.iterdir()}
    assert names == {"result.json", "decisions.csv", "trace.jsonl", "trace.chrome.json"}


def test_a_result_is_the_flat_record_with_config_and_provenance(folder):
    row = json.loads((folder / "result.json").read_text())
    config, provenance = row.pop("config"), row.pop("provenance")
    assert row == RESULT.record.as_row()
    assert list(row) == [field.name for field in fields(RunRecord)]
    assert config == CONFIG
    assert set(provenance) == {
        "python", "numpy", "scipy", "simpy", "gurobipy", "hydra_core", "package", "git_commit",
        "git_dirty", "profile_sha256", "trace_sha256", "cell_sha256", "seed", "overrides",
    }  # fmt: skip
    assert provenance["overrides"] == list(SMALL)
    assert (provenance["seed"], provenance["trace_sha256"]) == (0, None)
    assert all(provenance[name] for name in ("python", "numpy", "scipy", "simpy", "hydra_core"))


def test_decisions_are_a_row_a_step_and_batch(folder):
    with (folder / "decisions.csv").open(newline="") as file:
        rows = list(csv.DictReader(file))
    assert list(rows[0]) == [
        "block", "step", "batch", "n_ctx", "n_recompute", "slices", "n_front", "n_inputs", "on_cpu"
    ]  # fmt: skip
    assert [(row["step"], row["batch"]) for row in rows] == [(s, b) for s in "0123" for b in "01"]
    assert [int(row["n_ctx"]) for row in rows] == [0, 0, 64, 64, 65, 65, 66, 66]


def test_traces_hold_every_span(folder):
    lines = (folder / "trace.jsonl").read_text().splitlines()
    assert [json.loads(line)["key"] for line in lines] == [span.key for span in RESULT.spans]
    events = json.loads((folder / "trace.chrome.json").read_text())["traceEvents"]
    assert sum(event["ph"] == "X" for event in events) == len(lines) == RESULT.record.n_ops


def test_what_a_run_does_not_write_is_removed(folder):
    files.write_error(folder, "Traceback")
    without = RunResult(RESULT.record)
    files.write_run(folder, without, CONFIG, {})
    assert {path.name for path in folder.iterdir()} == {"result.json"}


def test_a_number_that_json_lacks_is_refused_and_the_old_file_stays(folder):
    before = (folder / "result.json").read_bytes()
    with pytest.raises(ValueError, match="not finite"):
        files.write_row(folder, {"makespan_s": float("nan")}, CONFIG, {})
    assert (folder / "result.json").read_bytes() == before


def test_the_hash_of_a_profile_is_of_its_numbers_not_their_order():
    hardware = CONFIG["hardware"]
    turned = dict(reversed(hardware.items()))
    assert files.profile_hash(turned) == files.profile_hash(hardware)
    assert files.profile_hash(hardware | {"gpu_bytes": 1}) != files.profile_hash(hardware)


def test_the_trace_file_is_hashed(tmp_path):
    path = tmp_path / "lengths.csv"
    path.write_text("prompt_tokens,response_tokens\n1,2\n")
    config = {"workload": {"path": str(path)}, "hardware": {}}
    first = files.provenance(config, ())["trace_sha256"]
    path.write_text("prompt_tokens,response_tokens\n1,3\n")
    assert len(first) == 64
    assert files.provenance(config, ())["trace_sha256"] != first


def test_the_hash_of_a_cell_is_of_what_decides_its_row(tmp_path):
    path = tmp_path / "lengths.csv"
    path.write_text("prompt_tokens,response_tokens\n1,2\n")
    workload = {**CONFIG["workload"], "path": str(path)}
    first = files.provenance({**CONFIG, "workload": workload}, ())["cell_sha256"]
    path.write_text("prompt_tokens,response_tokens\n1,3\n")
    assert files.provenance({**CONFIG, "workload": workload}, ())["cell_sha256"] != first
    plain = files.cell_hash(CONFIG, None)
    assert files.cell_hash({**CONFIG, "sweep": {"resume": "x"}, "grid": {"seed": 1}}, None) == plain
    assert files.cell_hash({**CONFIG, "seed": 9}, None) != plain
    asked = files.cell_hash({**CONFIG, "advise": {"change": 0.1}}, None)
    assert len({plain, asked, files.cell_hash({**CONFIG, "advise": {"change": 0.2}}, None)}) == 3


@pytest.mark.parametrize("policy", ["flexgen", "tightllm"])
def test_the_same_seed_gives_the_same_bytes(tmp_path, policy):
    overrides = ["model=tiny", "workload=extraction", "workload.limit=9", "workload.max_new=3",
                 "workload.n_batches=2", f"policy={policy}", "seed=7"]  # fmt: skip
    config = composed(*overrides)
    for name in ("a", "b"):
        assert run_in_sweep(config, overrides, tmp_path / name, "0") == "ok"
    for name in ("trace.jsonl", "trace.chrome.json", "decisions.csv"):
        assert (tmp_path / "a" / name).read_bytes() == (tmp_path / "b" / name).read_bytes()
    other = composed(*overrides[:-1], "seed=8")
    run_in_sweep(other, overrides, tmp_path / "c", "0")
    assert (tmp_path / "c/trace.jsonl").read_bytes() != (tmp_path / "a/trace.jsonl").read_bytes()


def test_a_defect_in_a_sweep_is_a_row_and_a_traceback(tmp_path, monkeypatch, capsys):
    def broken(spec, **_):
        raise RuntimeError("boom")

    monkeypatch.setattr("sim.sweep.simulate", broken)
    assert run_in_sweep(CONFIG, list(SMALL), tmp_path, "3") == "failed"
    row = json.loads((tmp_path / "result.json").read_text())
    assert (row["status"], row["reason"]) == ("failed", "RuntimeError: boom")
    assert (row["policy"], row["model"], row["n_layers"]) == ("tightllm", "tiny", 2)
    assert row["makespan_s"] is None
    assert 'RuntimeError("boom")' in (tmp_path / "error.txt").read_text()
    assert capsys.readouterr().out.count("\n") == 1


def test_wrong_settings_in_a_sweep_are_a_row(tmp_path, capsys):
    config = composed(*SMALL, "model.from_hf=/nope")
    assert run_in_sweep(config, ["model.from_hf=/nope"], tmp_path, "0") == "failed"
    row = json.loads((tmp_path / "result.json").read_text())
    assert row["reason"] == "/nope: cannot be read (No such file or directory)"
    assert row["n_layers"] is None
    assert "/nope: cannot be read" in capsys.readouterr().out
