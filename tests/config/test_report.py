import io
from dataclasses import replace

import pytest
from composed import composed
from rich.console import Console

from policies.cost.flops import exact_recompute_flops, paper_recompute_flops
from sim.__main__ import _break_even, _job
from sim.report import (
    break_even_lines,
    duration,
    gib,
    matters,
    overridden,
    run_table,
    sweep_line,
)
from sim.run import simulate
from sim.settings import build

SMALL = ("model=opt-30b", "model.n_layers=2", "workload=fixed", "workload.batch_size=2",
         "workload.gen_len=3")  # fmt: skip
SPEC = build(composed(*SMALL), ())
RECORD = simulate(SPEC).record


def shown(renderable, width: int = 100, encoding: str = "utf-8") -> str:
    file = io.TextIOWrapper(io.BytesIO(), encoding=encoding)
    Console(file=file, width=width).print(renderable)
    file.seek(0)
    return file.read()


def table(record=RECORD, spec=SPEC, width=100, encoding="utf-8", overrides=()) -> str:
    stream = io.TextIOWrapper(io.BytesIO(), encoding=encoding)
    console = Console(file=stream, width=width)
    console.print(run_table(spec, record, console, overrides))
    stream.seek(0)
    return stream.read()


@pytest.mark.parametrize("width", [80, 100, 120])
def test_a_run_fits_the_width_and_says_everything(width):
    text = table(width=width)
    assert max(map(len, text.splitlines())) <= width
    for word in ("opt-30b", "rtx3090", "8 requests", "tokens/s", "TTFT", "TPOT", "H2D weights",
                 "memory peak", "GiB", "gurobi", "GFLOP exact", "guesses"):  # fmt: skip
        assert word in text, word


def test_bars_are_as_long_as_their_shares_in_any_encoding():
    for encoding, full, empty in (("utf-8", "█", "░"), ("ascii", "#", ".")):
        line = next(text for text in table(encoding=encoding).splitlines() if "compute" in text)
        n = round(24 * RECORD.wait_compute)
        assert full * n + empty * (24 - n) + f" {100 * RECORD.wait_compute:5.1f} %" in line


@pytest.mark.parametrize(
    ("sources", "said"),
    [
        (
            {"n_load": 30.0, "n_project": 10.0},
            "75.0 % KV loaded, 25.0 % projected from layer inputs",
        ),
        ({"n_recompute": 1.0, "n_load": 3.0, "solver": ""}, "75.0 % KV loaded, 25.0 % recomputed"),
        ({"n_cpu": 4.0, "solver": ""}, "100.0 % attended on the CPU"),
        ({"n_resident": 4.0, "solver": ""}, "100.0 % KV on the GPU"),
        ({"n_recompute": 1.0, "n_load": 3.0}, None),  # what is recomputed is said above
        ({"solver": "", "n_load": None}, None),  # nothing decoded
    ],
)
def test_cached_tokens_come_from_somewhere(sources, said):
    names = ("n_load", "n_project", "n_recompute", "n_cpu", "n_resident")
    means = {f"{name}_mean": sources.get(name, 0.0) for name in names}
    text = table(replace(RECORD, **means, solver=sources.get("solver", "gurobi")))
    assert said in text if said else "cached tokens" not in text


def test_both_flop_counts_stand_side_by_side():
    n_ctx = 512 + 3 // 2
    exact = exact_recompute_flops(SPEC.model, 1, n_ctx, 1) / 1e9
    paper = paper_recompute_flops(SPEC.model, 1, n_ctx, 1) / 1e9
    assert f"{exact:.3f} GFLOP exact, {paper:.3f} GFLOP by the paper's count" in table()


def test_out_of_memory_says_what_is_short_and_what_would_help():
    spec = build(
        composed(*SMALL, "policy=accelerate", "workload.batch_size=512", "model.n_layers=48"), ()
    )
    record = simulate(spec).record
    text = " ".join(table(record, spec, width=120).split())
    need, have = gib(record.need_bytes), gib(record.have_bytes)
    assert f"GPU memory: need {need}, have {have}" in text
    assert "largest pool block 0: resident KV" in text
    assert "keeps KV on the host" in text
    assert "tokens/s" not in text
    line = sweep_line(3, ["policy=accelerate", "+experiment=policies"], record)
    assert line.startswith("#3 policy=accelerate: oom: gpu memory: need")


def test_a_name_with_brackets_is_no_markup():
    record = replace(RECORD, workload="chat [red]")
    assert "chat [red]" in table(record)


def test_numbers_that_were_overridden_are_no_guesses_of_the_profile():
    text = table(overrides=["hardware.duplex=1", "++hardware.h2d.latency_s=0", "seed=1"])
    assert "duplex" not in text.partition("guesses")[2].partition("overridden")[0]
    assert "overridden" in text
    assert overridden(["hardware=h200", "hardware.h2d.latency_s=0"]) == ["h2d"]


def test_a_guess_matters_where_its_lane_worked():
    assert not matters("disk_read", RECORD)
    assert matters("disk_read", replace(RECORD, disk_busy=0.1))
    assert matters("duplex", RECORD)
    assert not matters("idle_watts", RECORD)


@pytest.mark.parametrize("width", [80, 120])
def test_break_even_names_the_bound_and_the_gain(width):
    text = shown(break_even_lines(_break_even(SPEC, _job(SPEC))), width)
    assert max(map(len, text.splitlines())) <= width
    joined = " ".join(text.split())
    assert "decode step bound by H2D, mostly weights" in joined
    assert "prefill bound by compute" in joined
    assert "a decode step gains" in joined
    assert "offloading cannot win: weights and KV fit in GPU memory" in joined
    assert "the CPU could read weights and KV" in joined


@pytest.mark.parametrize("policy", ["flexgen-cpu", "zero-inference-cpu"])
def test_break_even_of_an_engine_that_attends_on_the_cpu(policy):
    spec = build(composed(*SMALL, f"policy={policy}"), ())
    text = shown(break_even_lines(_break_even(spec, _job(spec))))
    assert "CPU attention" in text
    assert "KV in " not in text.partition("compute")[0]
    assert "none: the CPU attends, decode loads no KV" in text


@pytest.mark.parametrize(("n_cpu", "share"), [(0, ""), (1, "25 %"), (3, "75 %"), (4, "")])
def test_break_even_of_batches_on_both_sides_is_that_of_the_decision(n_cpu, share):
    spec = build(composed(*SMALL, "policy=cpu-attention", f"policy.cpu_share={n_cpu / 4}"), ())
    found = _break_even(spec, _job(spec))
    assert found.on_cpu_share == n_cpu / 4
    assert (found.decode.kv_s > 0, found.decode.cpu_s > 0) == (n_cpu < 4, n_cpu > 0)
    text = " ".join(shown(break_even_lines(found)).split())
    assert ("of the cached tokens are attended there" in text) == bool(share)
    assert share in text
    assert ("a decode step gains" in text) == (n_cpu == 0)


@pytest.mark.parametrize(
    ("seconds", "text"),
    [
        (None, "-"),
        (2e-6, "2.00 µs"),
        (0.0123, "12.3 ms"),
        (0.5, "500 ms"),
        (1.0, "1.00 s"),
        (599.0, "599 s"),
        (600.0, "10.0 min"),
    ],
)
def test_durations_have_three_digits_and_a_unit(seconds, text):
    assert duration(seconds) == text
