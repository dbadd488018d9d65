"""Sweeps: results of every kind of run become rows, a table and figures."""

import io
from pathlib import Path

import numpy as np
import pandas as pd
import pytest
from omegaconf import OmegaConf
from rich.console import Console

from experiments import ablation, memory
from experiments.callback import Aggregate
from experiments.load import load_sweep, run_config, write_results
from experiments.table import comparison, significant, status_text, swept_columns
from sim.files import write_row
from sim.result import RunRecord
from tests.sweeps import BASELINES, cell, frame, run_cell
from tests.sweeps import coarse as coarse


@pytest.fixture(scope="module")
def sweep(tmp_path_factory) -> Path:
    """Runs that went well, did not fit, failed, left nothing, and left half a file."""
    folder = tmp_path_factory.mktemp("sweep")
    for i, policy in enumerate(("accelerate", "flexgen", "tightllm")):
        run_cell(folder / str(i), cell(policy, 16))
    run_cell(folder / "3", cell("accelerate", 32, "hardware.gpu_bytes=1073750000"))
    run_cell(folder / "4", cell("flexgen", 32))
    failed = RunRecord("tightllm", "tiny", 2, "rtx3090", "fixed", status="failed", reason="no luck")
    (folder / "10" / ".hydra").mkdir(parents=True)
    write_row(folder / "10", failed.as_row(), {}, {})
    for name in ("5", "6"):
        run_cell(folder / name, cell("tightllm", 32))
    (folder / "5" / "result.json").unlink()
    text = (folder / "6" / "result.json").read_text()
    (folder / "6" / "result.json").write_text(text[: len(text) // 2])
    (folder / "notes").mkdir()  # not a run
    return folder


class TestLoad:
    def test_a_row_for_every_run_in_run_order(self, sweep):
        results = load_sweep(sweep)
        assert list(results["run"]) == ["0", "1", "2", "3", "4", "5", "6", "10"]
        expected = ["ok", "ok", "ok", "oom", "ok", "failed", "failed", "failed"]
        assert list(results["status"]) == expected
        assert set(RunRecord.__dataclass_fields__) <= set(results)
        assert "config" not in results

    def test_dead_runs_say_what_they_were_and_why_they_are_empty(self, sweep):
        results = load_sweep(sweep).set_index("run")
        for run, reason in (("5", "missing"), ("6", "cannot be read")):
            row = results.loc[run]
            assert (row["policy"], row["prompt_len"], row["model"]) == ("tightllm", 32, "tiny")
            assert reason in row["reason"]
            assert pd.isna(row["decode_tokens_per_s"])

    def test_csv_reads_back(self, sweep, tmp_path):
        results = load_sweep(sweep)
        write_results(results, tmp_path / "results.csv")
        back = pd.read_csv(tmp_path / "results.csv")
        assert list(back.columns) == list(results.columns)
        np.testing.assert_allclose(back["makespan_s"], results["makespan_s"].astype(float))
        assert [path.name for path in tmp_path.iterdir()] == ["results.csv"]

    def test_failed_write_leaves_the_old_file(self, tmp_path, monkeypatch):
        path = tmp_path / "results.csv"
        path.write_text("old")
        monkeypatch.setattr(pd.DataFrame, "to_csv", lambda *_, **__: 1 / 0)
        with pytest.raises(ZeroDivisionError):
            write_results(pd.DataFrame({"a": [1]}), path)
        assert path.read_text() == "old"

    def test_no_runs_is_an_error(self, tmp_path):
        with pytest.raises(ValueError, match="no run folders"):
            load_sweep(tmp_path)

    def test_config_of_a_run(self, sweep):
        assert run_config(sweep, "0")["workload"]["prompt_len"] == 16
        with pytest.raises(ValueError, match="missing"):
            run_config(sweep, "5")


class TestTable:
    def printed(self, results: pd.DataFrame, width: int) -> str:
        console = Console(file=io.StringIO(), width=width)
        console.print(comparison(results, "title", width))
        return console.file.getvalue()

    def test_only_what_differs_is_a_column(self, sweep):
        swept = swept_columns(load_sweep(sweep))
        assert swept[:2] == ["policy", "prompt_len"]
        assert "model" not in swept
        assert "override.hardware.gpu_bytes" in swept

    @pytest.mark.parametrize("width", [80, 120])
    def test_fits_and_names_every_policy_and_outcome(self, sweep, width):
        text = self.printed(load_sweep(sweep), width)
        assert max(map(len, text.splitlines())) <= width
        for word in ("accelerate", "flexgen", "tightllm", "oom gpu:", "failed:", "model tiny"):
            assert word in text

    def test_makespan_is_dropped_first_unless_asked_for(self):
        results = frame(policy=BASELINES, workload=["fixed", "finqa"])

        def shown(width: int, *always: str) -> list[str]:
            return [str(c.header) for c in comparison(results, "title", width, always).columns]

        wide = shown(300)
        assert "makespan\ns" in wide
        needed = next(w for w in range(300, 0, -1) if shown(w) != wide)
        assert shown(needed) == [name for name in wide if name != "makespan\ns"]
        assert "makespan\ns" in shown(60, "makespan_s")
        assert "makespan\ns" not in shown(60)
        with pytest.raises(ValueError, match="columns: makespan must be among"):
            shown(60, "makespan")

    def test_out_of_memory_reads_as_need_and_have(self):
        row = pd.Series({"status": "oom", "oom_tier": "gpu", "need_bytes": 91.2e9,
                         "have_bytes": 24.7e9})  # fmt: skip
        assert status_text(row) == "oom gpu: need 91.2 GB, have 24.7 GB"

    @pytest.mark.parametrize(
        ("value", "text"),
        [(0.0, "0"), (14.82, "14.8"), (1234.5, "1,234"), (0.09164, "0.0916"), (0.9996, "1.00"),
         (999.6, "1,000"), (3.2e9, "3.2e+09"), (2.5e-6, "2.5e-06")],
    )  # fmt: skip
    def test_three_significant_digits(self, value, text):
        assert significant(value) == text


class TestCallback:
    def config(self, folder: Path):
        return OmegaConf.create(
            {
                "hydra": {
                    "sweep": {"dir": str(folder)},
                    "runtime": {"choices": {"experiment": "mine"}},
                }
            }
        )

    def test_table_csv_and_figures_survive_a_raising_figure(self, sweep, monkeypatch, capsys):
        monkeypatch.setattr(ablation, "loss", lambda *_: 1 / 0)
        callback = Aggregate(["ablation.loss", "nothing.here", "throughput.both"])
        callback.on_multirun_end(self.config(sweep))
        out = " ".join(capsys.readouterr().out.split())
        assert "mine: 8 runs" in out
        assert "figure ablation.loss was not drawn: ZeroDivisionError" in out
        assert "figure nothing.here was not drawn: ValueError: figures: 'nothing.here'" in out
        assert len(pd.read_csv(sweep / "results.csv")) == 8
        assert (sweep / "throughput_both.png").stat().st_size > 1_000

    def test_tables_are_printed_and_written_and_survive_a_wrong_name(
        self, sweep, monkeypatch, capsys
    ):
        made = pd.DataFrame({"some_name": ["one"], "n_gib": [61], "gib": [60.994]})
        monkeypatch.setattr(memory, "table", lambda results, _: made if len(results) == 8 else None)
        Aggregate([], {"mine": "memory.table", "none": "memory.nothing"}).on_multirun_end(
            self.config(sweep)
        )
        out = " ".join(capsys.readouterr().out.split())
        assert "one 61 60.994" in out
        assert "table none was not made: ValueError: tables: 'memory.nothing'" in out
        pd.testing.assert_frame_equal(pd.read_csv(sweep / "mine.csv"), made)
        assert not (sweep / "none.csv").exists()
