"""``+experiment=advise`` as a user asks it: an answer, its files, and a line that runs it."""

import json
import shlex
from itertools import product
from pathlib import Path

import pandas as pd
import pytest
from composed import CONF, composed
from hydra import compose, initialize_config_dir
from hydra.core.hydra_config import HydraConfig

from experiments.advise import advices, answer
from experiments.load import load_sweep
from sim.advise_entry import settings_of
from sim.run import simulate
from sim.settings import build
from sim.sweep import run_job

ASK = ("+experiment=advise", "model=opt-6.7b", "model.n_layers=4", "workload.gen_len=6",
       "advise.max_batch_size=64", "advise.n_samples=20", "advise.n_batches=[1,4]")  # fmt: skip


def ask(folder: Path, *overrides: str) -> dict:
    """The answer, as a job of a sweep gives it; without one ``{}``."""
    folder.mkdir(parents=True, exist_ok=True)
    with initialize_config_dir(version_base="1.3", config_dir=str(CONF)):
        whole = compose("config", [*overrides], return_hydra_config=True)
        HydraConfig.instance().set_config(whole)
        try:
            run_job(compose("config", [*overrides]), overrides, folder, 0)
        finally:
            HydraConfig.instance().cfg = None
    path = folder / "advice.json"
    return json.loads(path.read_text()) if path.exists() else {}


@pytest.fixture(scope="module")
def answered(tmp_path_factory):
    folder = tmp_path_factory.mktemp("advice")
    advice = ask(folder / "0", *ASK, "hardware=t4", "belief=null")
    return folder, advice


def test_the_line_runs_what_was_promised(answered):
    folder, advice = answered
    row = json.loads((folder / "0" / "result.json").read_text())
    python, flag, module, *line = shlex.split(advice["run"])
    assert (python, flag, module) == ("python", "-m", "sim")
    assert not any("advise" in text for text in line)
    record = simulate(build(composed(*line), line)).record
    assert record.decode_tokens_per_s == pytest.approx(advice["ranking"][0]["value"], rel=1e-9)
    assert row["decode_tokens_per_s"] == record.decode_tokens_per_s
    assert row["status"] == "ok"
    wanted = {key: value for key, value in row["config"].items() if key not in ("advise", "trace")}
    got = composed(*line)
    assert {key: got[key] for key in wanted} == wanted


def test_the_answer_is_ranked_and_explained(answered):
    folder, advice = answered
    values = [row["value"] for row in advice["ranking"]]
    assert values == sorted(values, reverse=True)
    assert len({row["policy"] for row in advice["ranking"]}) == len(values) == 11
    assert all(row["low"] <= row["median"] <= row["high"] for row in advice["ranking"])
    assert {row["resource"] for row in advice["elasticity"]} == {
        "link", "compute", "hbm", "host_cpu", "disk", "gpu_memory", "host_memory"
    }  # fmt: skip
    assert advice["n_simulated"] < advice["n_candidates"]
    assert len(pd.read_csv(folder / "0" / "ranking.csv")) == 11


def test_it_is_drawn(answered, tmp_path):
    folder, _ = answered
    results = load_sweep(folder)
    assert list(results["status"]) == ["ok"]
    assert len(advices(results, folder)) == 1
    answer(results, folder, tmp_path / "advice.png")
    assert (tmp_path / "advice.png").read_bytes()[:4] == b"\x89PNG"
    with pytest.raises(ValueError, match="no run has an answer"):
        answer(results, tmp_path, tmp_path / "nothing.png")


def test_no_answer_is_a_row_that_says_why(tmp_path, capsys):
    advice = ask(tmp_path, *ASK, "hardware=t4", "advise.max_tpot_s=1e-7")
    assert advice["ranking"] == []
    assert "no candidate reaches advise.max_tpot_s 1e-07" in advice["reason"]
    row = json.loads((tmp_path / "result.json").read_text())
    assert (row["status"], row["reason"]) == ("infeasible", advice["reason"])
    assert "none: no candidate reaches" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("data", "message"),
    [
        ("all", "advise: 'all' must be null or a mapping"),
        ({"objectiv": "x"}, "advise.objectiv: unknown key, did you mean objective"),
        ({"objective": "latency"}, "advise.objective: 'latency' is none of decode_tokens_per_s"),
        ({"n_batches": [1, "x"]}, "advise.n_batches: 'x' must be a whole number"),
        ({"sigma": {"guess": "large"}}, "advise.sigma.guess: 'large' must be a finite number"),
        ({"max_tpot_s": 0.0}, "advise.max_tpot_s: 0.0 must be > 0"),
    ],
)
def test_settings_say_what_is_wrong(data, message):
    with pytest.raises(ValueError, match=message):
        settings_of(data)


# ---- the cases that must hold --------------------------------------------------------------------

GRID = {
    "policy": ("flexgen-pinned", "tightllm", "accelerate-big-pinned", "mixed", "hybridserve",
               "cpu-attention"),
    "workload.batch_size": (8, 128),
    "workload.n_batches": (4,),
}  # fmt: skip


@pytest.mark.slow
@pytest.mark.parametrize(
    ("machine", "placements"),
    [
        (("model=opt-30b", "hardware=rtx3090"), ("host", "auto")),
        (("model=llama3.1-70b", "hardware=h200", "hardware.host_bytes=1.0e12",
          "advise.placements=[host]"), ("host",)),
    ],
    ids=["opt-30b", "llama3.1-70b"],
)  # fmt: skip
def test_never_worse_than_a_coarse_grid(tmp_path, machine, placements):
    """By few simulations; what they save: ``python -m experiments.bench_advise``."""
    names = f"advise.policies=[{','.join(GRID['policy'])}]"
    advice = ask(tmp_path, "+experiment=advise", *machine, names, "advise.n_batches=[4]",
                 "advise.n_samples=4")  # fmt: skip
    assert advice["n_simulated"] < 0.25 * advice["n_candidates"]
    own = [text for text in machine if not text.startswith("advise")]
    best = 0.0
    for placement, *values in product(placements, *GRID.values()):
        cell = [f"{k}={v}" for k, v in zip(GRID, values, strict=True)]
        line = ["workload=fixed", "trace=none", *own, *cell, f"policy.placement={placement}"]
        best = max(best, simulate(build(composed(*line), line)).record.decode_tokens_per_s or 0.0)
    assert advice["ranking"][0]["value"] >= best > 0
