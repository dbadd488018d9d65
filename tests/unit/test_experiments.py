"""Sweeps: results of every kind of run become rows, a table and figures; every experiment runs."""

import io
import math
import warnings
from dataclasses import replace
from functools import lru_cache
from itertools import product
from pathlib import Path

import numpy as np
import pandas as pd
import pytest
import yaml
from hydra import compose, initialize_config_dir
from hydra.core.override_parser.overrides_parser import OverridesParser
from matplotlib.lines import Line2D
from omegaconf import OmegaConf
from rich.console import Console

from experiments import ablation, attribution, memory, mixed, policies, style, throughput, timeline
from experiments.callback import Aggregate, draw_figure, find
from experiments.load import load_sweep, run_config, write_results
from experiments.table import comparison, significant, status_text, swept_columns
from policies.trace.jsonl import read_jsonl
from sim.files import write_row, write_run
from sim.result import RunRecord
from sim.run import simulate
from sim.settings import build

CONF = Path(__file__).parents[2] / "conf"
EXPERIMENTS = (
    "ablation", "ablation-grid", "attribution", "decode-length", "memory", "mixed",
    "motivation-175b", "policies", "prefill-length", "tasks", "timeline",
)  # fmt: skip
STEPS = sorted(path.stem for path in (CONF / "step").glob("*.yaml"))


@pytest.fixture(autouse=True)
def coarse(monkeypatch):
    """Few pixels: tests look at what is drawn, not at how sharp it is."""
    monkeypatch.setattr(style, "DPI", 40)


@lru_cache
def composed(*overrides: str, with_hydra: bool = False):
    with initialize_config_dir(version_base="1.3", config_dir=str(CONF)):
        return compose("config", list(overrides), return_hydra_config=with_hydra)


def settings(*overrides: str) -> dict[str, object]:
    return OmegaConf.to_container(composed(*overrides), resolve=True)


def run_cell(folder: Path, overrides: list[str]) -> None:
    """One run as the command line makes it in a sweep, Hydra's own files included."""
    (folder / ".hydra").mkdir(parents=True)
    (folder / ".hydra" / "overrides.yaml").write_text(yaml.safe_dump(overrides))
    config = settings(*overrides)
    choices = {group: config[group]["name"] for group in ("policy", "model", "hardware")}
    note = {"hydra": {"runtime": {"choices": choices}}}
    (folder / ".hydra" / "hydra.yaml").write_text(yaml.safe_dump(note))
    write_run(folder, simulate(build(config, overrides)), config, {})


def cell(policy: str, prompt_len: int, *more: str) -> list[str]:
    return [f"policy={policy}", f"workload.prompt_len={prompt_len}", "model=tiny",
            "workload=fixed", "workload.gen_len=3", "workload.batch_size=2",
            *(more or ("hardware.gpu_bytes=25769803776",))]  # fmt: skip


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


def frame(**columns) -> pd.DataFrame:
    """A row a combination of the listed values, with plausible results."""
    lists = {name: value for name, value in columns.items() if isinstance(value, list)}
    rows = [dict(zip(lists, values, strict=True)) for values in product(*lists.values())]
    base = {**RunRecord("p", "opt-30b", 48, "a800", "fixed").as_row(), "bottleneck": "disk"}
    base |= {"n_requests": 8, "n_batches": 4, "batch_size": 2, "prompt_len": 512, "max_new": 64}
    out = pd.DataFrame([{**base, "run": str(i), **row} for i, row in enumerate(rows)])
    sources = ("n_load", "n_project", "n_recompute", "n_cpu", "n_resident")
    for i, name in enumerate(sources):
        out[f"{name}_mean"] = [100.0 * (n % (i + 2)) + 1.0 for n in range(len(out))]
    for i, name in enumerate(("prefill_tokens_per_s", "decode_tokens_per_s", "makespan_s")):
        out[name] = [10.0 ** (i + 1) * (1 + n % 5) for n in range(len(out))]
    return out


EVERY = sorted(path.stem for path in (CONF / "policy").glob("*.yaml"))
RIVALS = ["zero-inference", "tightllm", "mixed"]
VARIANTS = ["tightllm-no-both", "tightllm-no-distributor", "tightllm-no-loader", "tightllm"]
BASELINES = ["accelerate", "flexgen", "tightllm"]
FRAMES = {
    "ablation.throughput": frame(policy=VARIANTS, hardware=["a800", "t4"], prompt_len=[512, 8192]),
    "ablation.loss": frame(policy=VARIANTS, hardware=["a800", "t4"], prompt_len=[512, 8192]),
    "ablation_grid.decode": frame(model=["opt-13b", "x"], policy=VARIANTS, prompt_len=[512, 8192]),
    "ablation_grid.prefill": frame(hardware=["a800", "t4"], policy=VARIANTS, prompt_len=[1, 700]),
    "policies.speedup": frame(policy=BASELINES, model=["opt-13b", "x"], prompt_len=[512, 2048]),
    "throughput.both": frame(policy=BASELINES, model=["opt-13b", "x"], prompt_len=[512, 2048]),
    "throughput.decode": frame(policy=[*BASELINES, "mine"], workload=["fixed", "finqa"]),
    "throughput.prefill": frame(policy=BASELINES, prompt_len=[700, 1024]),
    "mixed.decode": frame(model=["opt-13b", "x"], policy=RIVALS, prompt_len=[512, 8192]),
    "mixed.sources": frame(model=["opt-13b", "x"], policy=RIVALS, prompt_len=[512, 8192]),
    "tasks.completion": frame(policy=BASELINES, workload=["translation", "extraction"]),
    "attribution.decode": frame(policy=BASELINES).assign(**{"override.step": ["1", "2", "3"]}),
    "attribution.prefill": frame(policy=BASELINES).assign(**{"override.step": ["1", "2", "3"]}),
}


class TestFigures:
    @pytest.mark.parametrize("name", FRAMES)
    def test_draws_a_sweep_with_a_gap_without_warnings(self, name, tmp_path):
        results = FRAMES[name].copy()  # without gaps they are drawn in test_runs_when_shrunk
        results["status"] = results["status"].mask(results.index == 0, "oom")
        results.loc[0, ["prefill_tokens_per_s", "decode_tokens_per_s", "makespan_s"]] = np.nan
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            draw_figure(name, results, tmp_path, tmp_path / "figure.png")
        assert (tmp_path / "figure.png").read_bytes()[:4] == b"\x89PNG"

    @pytest.mark.parametrize("name", FRAMES)
    def test_nothing_to_draw_is_said(self, name, tmp_path):
        results = FRAMES[name].assign(status="failed")
        with pytest.raises(ValueError, match="nothing to draw"):
            draw_figure(name, results, tmp_path, tmp_path / "figure.png")
        assert not (tmp_path / "figure.png").exists()

    def test_all_policies_at_once_have_their_own_lines_and_a_legend_that_fits(self, tmp_path):
        results = frame(policy=EVERY, prompt_len=[512, 1024, 2048])
        results.loc[results["prompt_len"] == 2048, "status"] = "oom"
        throughput.both(results, tmp_path, tmp_path / "figure.png")
        with style.panels(tmp_path / "legend.png", "all", (1, 1), (4.0, 3.0)) as out:
            style.legend_below(out.figure, [Line2D([], [], label=name) for name in EVERY])
            out.figure.draw_without_rendering()
            (legend,) = out.figure.legends
            box = legend.get_window_extent()
            assert 0 <= box.x0 < box.x1 <= out.figure.bbox.width
            assert out.axes[0][0].get_window_extent().height > 1.8 * out.figure.dpi
            assert box.y0 >= 0

    def test_mixes_are_gains_over_tightllm_and_the_best_rival(self, tmp_path):
        results = frame(policy=["zero-inference", "cake", "tightllm", "mixed"], prompt_len=[1, 2])
        results["decode_tokens_per_s"] = [8.0, np.nan, 3.0, 3.0, 5.0, 4.0, 10.0, 6.0]
        results.loc[1, "status"] = "oom"
        table = mixed.throughput(results).set_index("prompt_len")
        assert list(table)[2:] == ["zero_inference", "cake", "tightllm", "mixed"]
        assert np.isnan(table.loc[2, "zero_inference"])
        assert table.loc[1, "mixed"] == 10.0
        found = mixed.mixes(results, tmp_path).set_index("prompt_len")
        assert found["over_tightllm"].tolist() == [2.0, 1.5]
        assert found["over_best_rival"].tolist() == [1.25, 1.5]
        assert found["best_rival"].tolist() == ["zero-inference", "tightllm"]
        shares = found[["load_share", "project_share", "recompute_share"]]
        row = results[(results["policy"] == "mixed") & (results["prompt_len"] == 2)].iloc[0]
        total = sum(row[name] for name in mixed.SOURCES)
        assert shares.loc[2, "project_share"] == float(f"{row['n_project_mean'] / total:.4g}")
        with pytest.raises(ValueError, match="no run of policy mixed"):
            mixed.mixes(results[results["policy"] != "mixed"], tmp_path)

    def test_no_two_runs_share_a_bar_or_a_point(self, tmp_path, monkeypatch):
        drawn = []
        bars = throughput._bars
        monkeypatch.setattr(throughput, "_bars", lambda *a: drawn.append(len(a[1])) or bars(*a))
        results = frame(policy=BASELINES, prompt_len=[512, 1024], batch_size=[2, 4])
        throughput.decode(results, tmp_path, tmp_path / "figure.png")
        assert drawn == [12]

    def test_losses_are_relative_to_tightllm(self):
        results = frame(policy=VARIANTS)
        results["decode_tokens_per_s"] = [6.0, 7.0, 8.0, 10.0]
        found = ablation.losses(results, "decode_tokens_per_s").loc[("a800", 512)]
        assert found.to_dict() == pytest.approx(
            {VARIANTS[0]: 0.4, VARIANTS[1]: 0.3, VARIANTS[2]: 0.2}
        )

    def test_speedups_are_of_tightllm_and_missing_where_a_baseline_failed(self):
        results = frame(policy=BASELINES)
        results["decode_tokens_per_s"] = [2.0, np.nan, 10.0]
        results.loc[1, "status"] = "oom"
        found = policies.speedups(results, "decode_tokens_per_s").loc[("a800", "opt-30b", 512)]
        assert found["accelerate"] == 5.0
        assert np.isnan(found["flexgen"])

    def test_factors_multiply_to_the_total_across_a_gap(self):
        results = frame(policy=["a", "b", "c", "d"]).assign(**{"override.step": list("1234")})
        results["decode_tokens_per_s"] = [2.0, np.nan, 3.0, 12.0]
        results.loc[1, "status"] = "oom"
        found = attribution.factors(results, "decode_tokens_per_s")
        assert found["factor"].dropna().tolist() == [1.5, 4.0]
        assert found["total"].iloc[-1] == found["factor"].prod() == 6.0

    def test_steps_must_run_the_same_requests(self):
        results = FRAMES["attribution.decode"].assign(n_requests=[8, 8, 16])
        with pytest.raises(ValueError, match="8, 16 requests"):
            attribution.factors(results, "decode_tokens_per_s")

    def test_colours_are_distinct_and_fixed(self):
        assert len(set(style.POLICY_COLOURS.values())) == len(style.POLICY_COLOURS)
        assert style.colour("tightllm", ["x", "tightllm"]) == style.colour("tightllm")
        assert style.colour("x", ["x", "y"]) != style.colour("y", ["x", "y"])
        assert {path.stem for path in (CONF / "policy").glob("*.yaml")} <= set(style.POLICY_COLOURS)

    def test_timeline_window_is_one_decode_step(self, tmp_path):
        run_cell(tmp_path / "0", [*cell("flexgen", 16), "workload.gen_len=4", "trace=full"])
        spans = read_jsonl(tmp_path / "0" / "trace.jsonl").spans
        inside, start, end, step = timeline.window(spans)
        assert step == 2
        heads = [s for s in spans if s.key.startswith("forward/g0/s2/l2/")]
        assert end == max(s.end_s for s in heads)
        assert start < min(s.start_s for s in spans if s.key.startswith("forward/g0/s2/l0/"))
        assert all(s.start_s < end and s.end_s > start for s in inside)
        timeline.step(load_sweep(tmp_path), tmp_path, tmp_path / "step.png")
        assert (tmp_path / "step.png").exists()
        with pytest.raises(ValueError, match="no decode step"):
            timeline.window([s for s in spans if "/s0/" in s.key])

    def test_memory_cases_are_exact(self, tmp_path):
        config = settings("model=opt-30b")
        record = replace(RunRecord("tightllm", "opt-30b", 48, "a800", "fixed"), batch_size=64,
                         prompt_len=2048, peak_gpu_bytes=1, peak_host_bytes=2**31)  # fmt: skip
        (tmp_path / "0").mkdir()
        write_row(tmp_path / "0", record.as_row(), config, {})
        (case,) = memory.cases(load_sweep(tmp_path), tmp_path)
        assert case.printed == case.paper.whole_gib == 225
        (row,) = memory.table(load_sweep(tmp_path), tmp_path).to_dict("records")
        assert (row["paper_prints"], row["formula_whole_gib"]) == (225, 225)
        assert [round(row[f"{name}_gib"], 3) for name in ("weight", "kv", "hidden", "formula")] == [
            55.803, 168.0, 1.75, 225.553
        ]  # fmt: skip
        assert math.isnan(row["booked_gib"])  # the disk's peak is not known
        memory.footprints(load_sweep(tmp_path), tmp_path, tmp_path / "memory.png")
        assert (tmp_path / "memory.png").exists()


def grid(experiment: str) -> dict[str, list[str]]:
    """Keys that an experiment varies, between its jobs and inside them, and their values."""
    config = composed(f"+experiment={experiment}", with_hydra=True)
    varied = {**config.hydra.sweeper.params, **(config.grid or {})}
    texts = [f"{name}={value}" for name, value in varied.items()]
    found = {}
    for override in OverridesParser.create().parse_overrides(texts):
        name = str(override.input_line).partition("=")[0]
        found[name] = list(override.sweep_string_iterator())
    return found


SHRUNK = {  # values to keep instead of the first one, and what makes a run small
    "ablation": ({"policy": 4}, ["model.n_layers=2"]),
    "ablation-grid": ({"policy": 4}, ["model.n_layers=2"]),
    "mixed": ({"policy": 8}, ["model.n_layers=2"]),
    "attribution": ({"+step": 9}, ["model.n_layers=2", "workload.batch_size=2"]),
    "memory": ({"workload.batch_size": 2}, []),  # a footprint is of the whole model
    "tasks": ({"policy": 2}, ["model.n_layers=2", "workload.limit=8"]),
    "policies": ({"policy": 4}, ["model.n_layers=2"]),
}


class TestExperiments:
    @pytest.mark.parametrize("name", EXPERIMENTS)
    def test_sweeps_over_what_exists_and_draws_what_exists(self, name):
        hydra = composed(f"+experiment={name}", with_hydra=True).hydra
        assert hydra.mode.name == "MULTIRUN"
        assert hydra.callbacks.aggregate.figures
        for source in hydra.callbacks.aggregate.get("tables", {}).values():
            assert callable(find("tables", source))
        for key, values in grid(name).items():
            group = CONF / key.lstrip("+")
            if group.is_dir():
                assert set(values) <= {path.stem for path in group.glob("*.yaml")}
            assert len(values) == len(set(values)) > 1

    @pytest.mark.parametrize("name", EXPERIMENTS)
    def test_runs_when_shrunk(self, name, tmp_path):
        keep, small = SHRUNK.get(name, ({"policy": 2}, ["model.n_layers=2"]))
        kept = [[f"{k}={v}" for v in values[: keep.get(k, 1)]] for k, values in grid(name).items()]
        for i, overrides in enumerate(product(*kept)):
            run_cell(tmp_path / str(i), [f"+experiment={name}", *overrides, *small])
        results = load_sweep(tmp_path)
        assert set(results["status"]) == {"ok"}
        aggregate = composed(f"+experiment={name}", with_hydra=True).hydra.callbacks.aggregate
        for source in aggregate.get("tables", {}).values():
            assert len(find("tables", source)(results, tmp_path))
        for figure in aggregate.figures:
            draw_figure(figure, results, tmp_path, tmp_path / f"{figure}.png")
            assert (tmp_path / f"{figure}.png").exists()

    def test_ablation_is_the_grid_of_forty_runs(self):
        swept = grid("ablation")
        assert sorted(swept["policy"]) == sorted(VARIANTS)
        assert np.prod([len(values) for values in swept.values()]) == 40

    def test_steps_change_one_thing_at_a_time(self):
        fields = [settings("workload=fixed", f"+step={name}")["policy"] for name in STEPS]
        assert len(STEPS) == 9
        for before, after in ((0, 1), (2, 3), (3, 4), (4, 5), (5, 6), (7, 8)):
            old, new = fields[before], fields[after]
            changed = {key for key in old if key != "name" and old[key] != new[key]}
            assert len(changed) == 1, (STEPS[after], changed)
