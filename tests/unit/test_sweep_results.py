"""Rows of cells: a job of a sweep that ran many runs, and what a table makes of it."""

import json

import pytest
import yaml

from experiments import ablation_grid
from experiments.load import load_sweep, run_config
from experiments.table import swept_columns
from sim.files import write_row
from sim.result import RunRecord
from sim.sweep import write_cells

CELLS = {"0": ("policy=flexgen", "workload.prompt_len=16"), "1": ("policy=tightllm", "seed=3")}


@pytest.fixture
def sweep(tmp_path):
    """A job of two cells, one of which never ended, beside a job that is a run itself."""
    for name in ("0", "1"):
        (tmp_path / name / ".hydra").mkdir(parents=True)
        asked = ["model=opt-13b", "+sweep.resume=x", "grid.seed=[1]", "model.n_layers=2"]
        (tmp_path / name / ".hydra" / "overrides.yaml").write_text(yaml.safe_dump(asked))
        chosen = {"hydra": {"runtime": {"choices": {"model": "opt-13b", "policy": "accelerate"}}}}
        (tmp_path / name / ".hydra" / "hydra.yaml").write_text(yaml.safe_dump(chosen))
    write_cells(tmp_path / "0", CELLS)
    record = RunRecord("flexgen", "opt-13b", 2, "a800", "fixed", decode_tokens_per_s=3.0)
    write_row(tmp_path / "0" / "0", record.as_row(), {"seed": 0}, {})
    write_row(tmp_path / "1", record.as_row(), {"seed": 0}, {})
    return tmp_path


def test_every_cell_has_a_row(sweep):
    results = load_sweep(sweep)
    assert list(results["run"]) == ["0/0", "0/1", "1"]
    assert list(results["status"]) == ["ok", "failed", "ok"]
    assert results["reason"][1] == "result.json is missing, the run did not end"
    assert list(results["policy"]) == ["flexgen", "tightllm", "flexgen"]
    assert list(results["model"]) == ["opt-13b"] * 3
    assert results["override.workload.prompt_len"][0] == 16
    assert results["seed"][1] == 3
    assert not [name for name in results if "sweep" in name or "grid" in name]
    assert "policy" in swept_columns(results)
    assert run_config(sweep, "0/0") == {"seed": 0}


def test_what_a_job_was_to_run_is_written_before_it_runs(sweep):
    assert json.loads((sweep / "0" / "cells.json").read_text()) == {
        name: list(cell) for name, cell in CELLS.items()
    }


def test_losses_of_a_grid_are_by_model_machine_and_length(sweep):
    results = load_sweep(sweep)
    results = results.assign(
        policy=["tightllm", "tightllm-no-loader", "tightllm"], status="ok",
        decode_tokens_per_s=[4.0, 3.0, 5.0], prompt_len=[16, 16, 32], hardware="a800",
    )  # fmt: skip
    found = ablation_grid.losses(results, "decode_tokens_per_s")
    assert found.loc[("opt-13b", "a800", 16), "tightllm-no-loader"] == pytest.approx(0.25)
    with pytest.raises(ValueError, match="no run of policy tightllm"):
        ablation_grid.losses(results[:1].assign(policy="flexgen"), "decode_tokens_per_s")
