"""``mode=phase``: rows, mistakes, and the diagram that is drawn from nothing but rows."""

import json
import math
from itertools import product

import matplotlib.image
import numpy as np
import pandas as pd
import pytest
import yaml
from hydra import compose, initialize_config_dir
from omegaconf import OmegaConf
from rich.console import Console

from experiments import phase, style
from experiments.callback import draw_figure, find
from experiments.load import load_sweep
from experiments.table import comparison
from policies.cost.layer_work import layer_work
from sim.cells import expand
from sim.mode_keys import PHASE, mode_of
from sim.modes import run_alone, run_in_sweep
from sim.phase import phase_case, phase_record, print_phase
from tests.serving_table import CONF, model

MACHINES = ("h200", "h100x8-paper", "unified-hbm")


def composed(*overrides, with_hydra=False):
    with initialize_config_dir(version_base="1.3", config_dir=str(CONF)):
        return compose("config", list(overrides), return_hydra_config=with_hydra)


def case(*overrides):
    config = OmegaConf.to_container(composed("+experiment=phase", *overrides), resolve=True)
    return phase_case(config, list(overrides))


@pytest.fixture(scope="module")
def sweep(tmp_path_factory):
    """The experiment with three machines: 36 rows."""
    folder = tmp_path_factory.mktemp("phase")
    hydra = composed("+experiment=phase", with_hydra=True).hydra
    models = hydra.sweeper.params.model.split(",")
    cells = product(models, MACHINES, ("streamed", "resident"), (1, 4))
    for i, (name, hardware, weights, n_batches) in enumerate(cells):
        overrides = ["+experiment=phase", f"model={name}", f"hardware={hardware}",
                     f"phase.weights={weights}", f"workload.n_batches={n_batches}"]  # fmt: skip
        config = OmegaConf.to_container(composed(*overrides), resolve=True)
        run = folder / str(i)
        (run / ".hydra").mkdir(parents=True)
        (run / ".hydra" / "overrides.yaml").write_text(yaml.safe_dump(overrides))
        status, line = run_in_sweep(mode_of(config), config, overrides, run, str(i), {})
        assert status == "ok"
        assert line.startswith(f"#{i} model={name} ")
    return folder


def test_the_sweep_covers_every_shipped_machine():
    composed_config = composed("+experiment=phase", with_hydra=True)
    cells = expand(OmegaConf.to_container(composed_config.grid))
    machines = {text.partition("=")[2] for cell in cells for text in cell if "hardware" in text}
    assert machines == {path.stem for path in (CONF / "hardware").glob("*.yaml")}
    assert len(cells) == len(set(cells)) == 4 * len(machines)
    aggregate = composed_config.hydra.callbacks.aggregate
    assert all(callable(find("figures", name)) for name in aggregate.figures)
    assert all(callable(find("tables", name)) for name in aggregate.tables.values())


def test_a_row_has_the_answer_and_what_the_diagram_needs(sweep):
    results = load_sweep(sweep)
    assert len(results) == 36
    shares = results[["share_kv", "share_input", "share_recompute"]].sum(axis=1)
    assert shares.to_numpy() == pytest.approx(np.ones(36))
    row = next(
        row
        for row in results.to_dict("records")
        if (row["model"], row["hardware"], row["weights"], row["n_batches"])
        == ("opt-30b", "h200", "streamed", 4)
    )
    assert row["region"] == "input+recompute"
    assert row["gain_over_load_all"] == pytest.approx(1.66, abs=0.01)  # the probe's 1079 / 653
    assert row["step_s"] * row["gain_over_two_sources"] == pytest.approx(row["two_sources_s"])
    grouped = results[results["model"] != "opt-30b"]
    assert (grouped["share_input"] == 0).all()
    assert grouped["gain_over_two_sources"].to_numpy() == pytest.approx(np.ones(24))
    table = comparison(results, "phase", 160)
    assert table.row_count == 36
    assert {"best mix", "weights", "x load\nall"} <= {column.header for column in table.columns}


def test_the_boundaries_are_the_closed_forms_at_other_contexts(sweep):
    table = phase.boundaries(load_sweep(sweep), sweep)
    assert len(table) == 3 * 3 * len(phase.TABLE_CONTEXTS)  # resident weights count once
    for row in table.to_dict("records"):
        work = layer_work(model(row["model"]), row["n_ctx"], row["n_batches"], 16,
                          resident=row["weights"] == "resident")  # fmt: skip
        edges = work.boundaries()
        found = [row[name] for name in ("recompute_all_below", "inputs_at", "load_all_above")]
        expected = [edges.recompute, math.nan if edges.input is None else edges.input,
                    edges.load_all]  # fmt: skip
        assert found == pytest.approx(expected, nan_ok=True)


def test_the_diagram_has_the_regions_where_the_closed_form_has_them(sweep, tmp_path, monkeypatch):
    """Colours of panels, read back from the picture."""
    seen = {}

    def fill(axes, part):
        row = part.iloc[0]
        seen[row["model"], row["weights"], row["n_batches"]] = axes
        return regions(axes, part)

    regions = phase._regions
    monkeypatch.setattr(phase, "_regions", fill)
    monkeypatch.setattr(style, "DPI", 60)
    path = tmp_path / "phase.png"
    draw_figure("phase.diagram", load_sweep(sweep), sweep, path)
    picture = matplotlib.image.imread(path)
    height, width = picture.shape[:2]
    assert len(seen) == 9
    for (name, weights, n_batches), axes in seen.items():
        box = axes.get_position()
        for x, n_ctx in ((0.3, 90000), (0.75, 40000), (0.12, 200)):
            ratio = phase.RATIOS[0] * (phase.RATIOS[1] / phase.RATIOS[0]) ** x
            mix = layer_work(
                model(name), n_ctx, int(n_batches), 16, resident=weights == "resident"
            ).mix(ratio, 1.0)
            low, high = np.log2(phase.CONTEXTS)
            y = (np.log2(n_ctx) - low) / (high - low)
            column = round((box.x0 + x * box.width) * width)
            line = round((1.0 - box.y0 - y * box.height) * height)
            around = picture[line - 3 : line + 4, column - 3 : column + 4, :3].reshape(-1, 3)
            shown = np.median(around, axis=0)
            tints = {region: np.array(matplotlib.colors.to_rgb(colour)) * 0.55 + 0.45
                     for region, (colour, _) in phase.REGIONS.items()}  # fmt: skip
            veil = 0.62 if mix.gain_over_load_all < phase.WORTHWHILE_GAIN else 0.0
            nearest = min(tints, key=lambda r: np.abs(tints[r] * (1 - veil) + veil - shown).sum())
            assert nearest == mix.region, (name, weights, n_batches, x, n_ctx)


def test_names_of_machines_lie_apart_and_near_their_lines():
    places = [0.1, 0.5, 0.5, 0.51, 0.52, 0.99, 1.0]
    moved = phase._apart(places, 0.05)
    assert np.diff(moved).min() >= 0.05 - 1e-12
    assert (moved[0], moved[-1]) == (0.1, pytest.approx(1.0))
    assert np.abs(np.subtract(moved, places)).max() < 0.1
    assert moved[1:5] == pytest.approx([0.4325, 0.4825, 0.5325, 0.5825])


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        (("phase.weights=both",), "phase.weights: 'both' is none of streamed, resident"),
        (("+phase.rows=1",), "phase.rows: unknown key"),
        (("workload=sharegpt", "workload.batch_size=4"), "workload"),
        (("workload.batch_size=auto",), "workload.batch_size: 'auto' must be a whole number"),
        (("workload.n_batches=0",), "workload.n_batches: 0 must be >= 1"),
    ],
)
def test_mistakes_are_named(overrides, message):
    with pytest.raises(ValueError, match=message):
        case(*overrides)


def test_several_batch_sizes_are_no_diagram(sweep):
    results = load_sweep(sweep)
    results.loc[0, "batch_size"] = 17
    with pytest.raises(ValueError, match="several batch sizes"):
        phase.boundaries(results, sweep)
    with pytest.raises(ValueError, match="lack the columns"):
        phase.boundaries(pd.DataFrame({"model": ["x"], "status": ["ok"]}), sweep)


def test_one_run_prints_its_answer(tmp_path, capsys):
    overrides = ["+experiment=phase", "grid=null", "model=opt-30b", "hardware=h200"]
    config = OmegaConf.to_container(composed(*overrides), resolve=True)
    run_alone(PHASE, config, overrides, tmp_path)
    row = json.loads((tmp_path / "result.json").read_text())
    assert (row["mode"], row["serial_region"]) == ("phase", "kv")
    assert "best mix: 94.4% layer inputs loaded, 5.6% recomputed" in capsys.readouterr().out
    console = Console(width=200, record=True)
    print_phase(phase_record(case("model=llama3.1-70b", "hardware=h200")), console)
    assert "KV loaded" in console.export_text()
