"""Every experiment runs and draws; what it varies exists."""

from itertools import product

import numpy as np
import pytest
from hydra import compose, initialize_config_dir
from omegaconf import OmegaConf

from experiments.callback import draw_figure, find
from experiments.load import load_sweep
from sim.cells import Composer, expand
from tests.sweeps import CONF, VARIANTS, composed, run_cell, settings, varied
from tests.sweeps import coarse as coarse

EXPERIMENTS = (
    "ablation", "ablation-grid", "attribution", "decode-length", "memory", "mixed",
    "motivation-175b", "policies", "prefill-length", "tasks", "timeline",
)  # fmt: skip
STEPS = sorted(path.stem for path in (CONF / "step").glob("*.yaml"))


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
        for key, values in varied(name).items():
            group = CONF / key.lstrip("+")
            if group.is_dir():
                assert set(values) <= {path.stem for path in group.glob("*.yaml")}
            assert len(values) == len(set(values)) > 1

    @pytest.mark.parametrize("name", EXPERIMENTS)
    def test_runs_when_shrunk(self, name, tmp_path):
        keep, small = SHRUNK.get(name, ({"policy": 2}, ["model.n_layers=2"]))
        kept = [
            [f"{k}={v}" for v in values[: keep.get(k, 1)]] for k, values in varied(name).items()
        ]
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

    @pytest.mark.parametrize("name", sorted(p.stem for p in (CONF / "experiment").glob("*.yaml")))
    def test_cells_are_what_the_command_line_composes(self, name):
        words = [f"+experiment={name}"]
        words += [f"{key}={values[-1]}" for key, values in varied(name, "jobs").items()]
        with initialize_config_dir(version_base="1.3", config_dir=str(CONF)):
            job = compose("config", words)
            cell = expand(OmegaConf.to_container(job.grid) if job.grid else None, words)[-1]
            whole = OmegaConf.to_container(compose("config", [*words, *cell]), resolve=True)
            assert Composer(job, words)(cell) == whole

    def test_ablation_is_the_grid_of_forty_runs(self):
        swept = varied("ablation")
        assert sorted(swept["policy"]) == sorted(VARIANTS)
        assert np.prod([len(values) for values in swept.values()]) == 40

    def test_steps_change_one_thing_at_a_time(self):
        fields = [settings("workload=fixed", f"+step={name}")["policy"] for name in STEPS]
        assert len(STEPS) == 9
        for before, after in ((0, 1), (2, 3), (3, 4), (4, 5), (5, 6), (7, 8)):
            old, new = fields[before], fields[after]
            changed = {key for key in old if key != "name" and old[key] != new[key]}
            assert len(changed) == 1, (STEPS[after], changed)
