"""Several machines, routing between them, power, and what a run's row says."""

from dataclasses import replace

import numpy as np
import pytest

from policies.errors import OutOfMemory
from policies.routing import KappaThresholds, LeastWaiting, MachineView, ShortestFinish
from policies.spec.request import Request
from sim.arrivals import Arrivals
from sim.fleet import ServeSpec, serve
from sim.power import PowerModel, capped
from sim.serve_log import Log
from sim.serve_options import ServeOptions, kv_capacity_tokens, store_blocks
from sim.serve_result import Targets, base_record, summarise
from tests.serving_table import backlog, machine, model, singles


def views(kappa_ratio, waits=(0.0, 0.0, 0.0), runs=(1.0, 2.0, 3.0)):
    request = Request(0, 0.0, round(10 * kappa_ratio), 10, 1)
    crits = (30.0, 200.0, 30.0)
    return [MachineView(f"m{i}", request, crits[i], 1e9, 1e12, waits[i], runs[i]) for i in range(3)]


def test_thresholds_follow_the_ratio():
    rule = KappaThresholds()
    assert rule.pick(views(500, waits=(0.0, 9.0, 0.0))) == 1  # whatever the queue
    assert rule.pick(views(0.5, waits=(5.0, 0.0, 4.0))) == 2
    assert rule.pick(views(10, waits=(5.0, 1.0, 4.0))) == 1


def test_predicting_rules():
    assert ShortestFinish().pick(views(500, waits=(5.0, 9.0, 0.0))) == 2
    assert ShortestFinish().pick(views(500)) == 0
    assert LeastWaiting().pick(views(500, waits=(5.0, 1.0, 2.0))) == 1
    with pytest.raises(ValueError, match="low: 5"):
        KappaThresholds(high=1.0, low=5.0)


def fleet(routing, names=("gh200", "h100", "h100"), rate=400.0, all_long=False):
    mixed = [(0, 300, 4) if i % 2 else (60_000, 20, 4) for i in range(120)]
    rows = [(60_000, 20, 4)] * 120 if all_long else mixed
    spec = ServeSpec(
        model("llama3.1-8b"),
        tuple(machine(name) for name in names),
        ServeOptions(max_new=8),
        Arrivals(rate=rate),
        routing=routing,
    )
    return serve(spec, singles(rows))


def test_thresholds_send_long_prefixes_to_the_fast_link():
    run = fleet(KappaThresholds())
    server, cached = run.requests.column("server"), run.requests.column("n_cached")
    assert (server[cached > 0] == 0).all()
    assert (server[cached == 0] != 0).all()


def mean_ttft(run):
    return (run.requests.column("first_token_s") - run.requests.column("arrival_s")).mean()


def test_thresholds_overload_the_machine_that_suits_everybody():
    thresholds = fleet(KappaThresholds(), all_long=True)
    assert set(thresholds.requests.column("server")) == {0}
    assert mean_ttft(fleet(ShortestFinish(), all_long=True)) < 0.9 * mean_ttft(thresholds)


def test_with_light_load_both_send_requests_where_they_run_best():
    assert mean_ttft(fleet(ShortestFinish(), rate=20.0)) <= 1.01 * mean_ttft(
        fleet(KappaThresholds(), rate=20.0)
    )
    assert mean_ttft(fleet(ShortestFinish(), rate=20.0)) < mean_ttft(
        fleet(LeastWaiting(), rate=20.0)
    )


def test_every_request_is_served_by_one_machine():
    run = fleet(LeastWaiting())
    assert sorted(run.requests.column("request")) == list(range(120))
    assert set(run.requests.column("server")) == {0, 1, 2}
    for index in range(3):
        own = run.iterations.column("server") == index
        starts = run.iterations.column("start_s")[own]
        ends = starts + run.iterations.column("seconds")[own]
        assert (starts[1:] >= ends[:-1] - 1e-12).all()


# ---- power -------------------------------------------------------------------------------


POWER = PowerModel(70.0, 700.0, 1e15, context_watts=50.0)


def test_power_is_between_base_and_tdp():
    assert POWER.watts(0, 0, 0) == 120.0
    assert POWER.watts(1, 1, 1) == 700.0
    assert POWER.watts(1, 0, 0) == 120 + 580 * 0.3


def test_windows_weigh_their_width():
    starts, busy = np.array([0.0, 1.0, 2.0]), np.array([1.0, 0.0, 0.5])
    none = np.zeros(3)
    mean, most = POWER.over(starts, busy, none, none, 2.5)
    full = POWER.watts(1, 0, 0)
    assert most == full
    assert mean == pytest.approx((full + 120 + 0.5 * full) / 2.5)


def test_a_cap_lowers_the_best_rates_first():
    hardware = machine("h100")
    power = PowerModel(70.0, 700.0, max(hardware.gemm.y), context_watts=50.0, cap_watts=300.0)
    slow = capped(hardware, power)
    assert slow.name == "h100@300W"
    assert max(slow.gemm.y) / max(hardware.gemm.y) == pytest.approx(180 / 580)
    assert slow.gemm.y[0] == hardware.gemm.y[0]  # memory binds there
    assert (slow.h2d, slow.hbm_bytes_per_s) == (hardware.h2d, hardware.hbm_bytes_per_s)
    assert power.watts(1.0, 1.0, 0.0) == 300.0
    lower = capped(hardware, replace(power, cap_watts=200.0))
    assert lower.hbm_bytes_per_s == pytest.approx(hardware.hbm_bytes_per_s * 80 / 580 / 0.3)
    assert capped(hardware, replace(power, cap_watts=None)) is hardware
    with pytest.raises(ValueError, match=r"cap_watts: 100 must be in \(120, 700\]"):
        replace(power, cap_watts=100)


def test_a_capped_server_still_moves_long_prefixes():
    """The paper's what-if: where the link binds, a cap costs no throughput."""
    rows = [(60_000, 20, 1)] * 20
    power = PowerModel(70.0, 700.0, 1e15, context_watts=50.0, cap_watts=200.0)
    capped_gpu = capped(machine("h100"), power)

    def end(hardware):
        spec = ServeSpec(
            model("llama3.1-8b"), (hardware,), ServeOptions(prefill_only=True),
            Arrivals(mode="backlog"),
        )  # fmt: skip
        return serve(spec, singles(rows)).end_s

    assert end(capped_gpu) < 1.1 * end(machine("h100"))


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"idle_watts": 800.0}, "within the TDP"),
        ({"copy_activity": 2.0}, "copy_activity: 2"),
        ({"window_s": 0.0}, "window_s: 0"),
        ({"best_flops_per_s": 0.0}, "best_flops_per_s 0"),
    ],
)
def test_bad_power_is_named(values, message):
    with pytest.raises(ValueError, match=message):
        replace(POWER, **values)


# ---- options, logs, rows -----------------------------------------------------------------


def test_capacity_is_what_weights_and_activations_leave():
    options = ServeOptions()
    tokens = kv_capacity_tokens(model("llama3.1-70b"), machine("h100x8"), options)
    kv = tokens * 327_680
    assert 500e9 < kv < 8 * 85.6e9 - model("llama3.1-70b").weight_bytes
    with pytest.raises(OutOfMemory, match="gpu memory: need"):
        kv_capacity_tokens(model("llama3.1-70b"), machine("h100"), options)
    assert kv_capacity_tokens(model("tiny"), machine("h100"), ServeOptions(capacity_tokens=7)) == 7


def test_a_store_cannot_exceed_its_tier():
    with pytest.raises(ValueError, match=r"serve.host_store_bytes: .* exceeds the usable"):
        store_blocks(model("tiny"), machine("h100"), ServeOptions(host_store_bytes=1e15), 256)
    host, disk = store_blocks(model("tiny"), machine("h100"), ServeOptions(), 256)
    assert (host > 0, disk) == (True, 0)


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"budget_tokens": 0}, "serve.budget_tokens: 0"),
        ({"capacity_tokens": 0}, "serve.capacity_tokens: 0"),
        ({"floor_s": -1.0}, "serve.floor_s: -1"),
        ({"kv_store": "gpu"}, "serve.kv_store: 'gpu'"),
        ({"watermark": 1.0}, "serve.watermark: 1"),
        ({"host_store_bytes": -1.0}, "serve.host_store_bytes: -1"),
    ],
)
def test_bad_options_are_named(values, message):
    with pytest.raises(ValueError, match=message):
        ServeOptions(**values)


def test_a_log_keeps_rows_by_column():
    log = Log(("a", "b"))
    log.add((1, 2.5))
    log.add((3, 4))
    assert log.column("b").tolist() == [2.5, 4.0]
    assert list(log.lines()) == ["a,b\n", "1,2.5\n", "3,4\n"]
    with pytest.raises(ValueError, match="has 1 values"):
        log.add((1,))
    with pytest.raises(ValueError, match="column: 'c'"):
        log.column("c")


def test_a_row_agrees_with_its_logs():
    rows = [(1000 * (i % 7), 10 + i, 1 + i % 30) for i in range(80)]
    sessions = singles(rows)
    spec = ServeSpec(model("tiny"), (machine("h100"),), ServeOptions(), Arrivals(rate=200.0))
    run = serve(spec, sessions)
    power = (PowerModel(70.0, 700.0, 1e15),)
    row = summarise(spec, sessions, run, base_record(spec, "rows"), Targets(), power)
    kv = model("tiny").kv_bytes_per_token
    assert row.load_bytes == pytest.approx(sum(k for k, _, _ in rows) * kv)
    assert row.store_bytes == pytest.approx(sum(t + r - 1 for _, t, r in rows) * kv)
    assert row.prefill_tokens_per_s == pytest.approx(sum(t for _, t, _ in rows) / run.end_s)
    assert row.decode_tokens_per_s == pytest.approx(sum(r - 1 for _, _, r in rows) / run.end_s)
    assert row.ttft_p50_s <= row.ttft_p90_s <= row.ttft_p99_s
    assert row.queue_mean_s < row.ttft_mean_s
    assert row.goodput_per_s == pytest.approx(row.slo_share * row.requests_per_s)
    assert 70.0 <= row.power_mean_watts <= row.power_max_watts <= 700.0
    assert 0 < row.gpu_busy <= 1
    assert row.hit_rate == 1.0
    assert row.n_iterations == run.iterations.n_rows
    assert row.scheduled_tokens_mean <= spec.options.budget_tokens


def test_targets_decide_goodput():
    sessions = singles([(0, 10, 5)] * 4)
    spec = ServeSpec(model("tiny"), (machine("h100"),), ServeOptions(), Arrivals(mode="backlog"))
    run = serve(spec, sessions)
    power = (PowerModel(70.0, 700.0, 1e15),)

    def share(targets):
        return summarise(spec, sessions, run, base_record(spec, "rows"), targets, power).slo_share

    assert share(Targets(10.0, 10.0)) == 1.0
    assert share(Targets(1e-9, 10.0)) == 0.0
    with pytest.raises(ValueError, match="slo_ttft_s: 0"):
        Targets(ttft_s=0.0)


def test_nothing_served_is_a_row_too():
    sessions = singles([(10**6, 10, 5)])
    spec = ServeSpec(
        model("tiny"), (machine("h100"),), ServeOptions(capacity_tokens=100), Arrivals()
    )
    run = serve(spec, sessions)
    power = (PowerModel(70.0, 700.0, 1e15),)
    row = summarise(spec, sessions, run, base_record(spec, "rows"), Targets(), power)
    assert (row.status, row.n_rejected) == ("infeasible", 1)


def test_progress_is_reported():
    seen = []
    spec = ServeSpec(model("tiny"), (machine("h100"),), ServeOptions(), Arrivals(mode="backlog"))
    serve(spec, singles([(0, 5, 1)] * 1200), lambda done, total: seen.append((done, total)))
    assert seen == [(500, 1200), (1000, 1200), (1200, 1200)]


def test_belief_is_not_the_plant():
    """A prefix policy that believes in a slow link recomputes on a fast one and pays for it."""
    from policies.prefix import Adaptive

    slow = replace(machine("h100"), h2d=replace(machine("h100").h2d, bytes_per_s=1e8))
    sessions = singles([(3000, 20, 1)] * 5)
    options = ServeOptions(prefill_only=True, budget_tokens=4096)

    def tail(belief):
        spec = ServeSpec(
            model("llama3.1-8b"), (machine("h100"),), options, Arrivals(mode="backlog"),
            prefix=Adaptive(), belief=belief,
        )  # fmt: skip
        return serve(spec, sessions).requests.column("n_tail").sum()

    assert tail(slow) > tail(None)
    with pytest.raises(ValueError, match="belief: applies to one machine"):
        ServeSpec(model("tiny"), (slow, slow), belief=slow)
    assert backlog(sessions).requests.n_rows == 5
