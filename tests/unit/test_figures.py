"""Figures of sweeps: what is drawn, with gaps too, and the numbers behind it."""

import math
import warnings
from dataclasses import replace

import numpy as np
import pandas as pd
import pytest
from matplotlib.lines import Line2D

from experiments import ablation, attribution, memory, mixed, policies, style, throughput, timeline
from experiments.callback import draw_figure
from experiments.load import load_sweep
from policies.trace.jsonl import read_jsonl
from sim.files import write_row
from sim.result import RunRecord
from tests.sweeps import BASELINES, CONF, VARIANTS, cell, frame, run_cell, settings
from tests.sweeps import coarse as coarse

EVERY = sorted(path.stem for path in (CONF / "policy").glob("*.yaml"))
RIVALS = ["zero-inference", "tightllm", "mixed"]
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
    def test_several_runs_of_a_cell_are_not_averaged(self, tmp_path):
        once = frame(policy=["tightllm", "mixed"], prompt_len=[512, 1024])
        twice = pd.concat([once.assign(batch_size=4), once.assign(batch_size=16)])
        assert len(mixed.throughput(once)) == 2
        message = "2 runs of .*prompt_len 512, policy tightllm; they differ in batch_size, keep one"
        with pytest.raises(ValueError, match=message):
            mixed.throughput(twice)
        with pytest.raises(ValueError, match=r"2 runs of policy tightllm, .*differ in batch_size"):
            mixed.sources(twice, tmp_path, tmp_path / "never.png")
        with pytest.raises(ValueError, match="they are alike"):
            ablation.losses(pd.concat([once, once]), "decode_tokens_per_s")

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
