"""A serving run for a reader: one grouped table, or one line in a sweep.

What readers get wrong: "scheduled" counts new tokens of an iteration; the bound beside it is what
GPU memory allows, so a budget that is far above it cannot be used whatever the scheduler does.
"""

from __future__ import annotations

from collections.abc import Sequence

from rich import box
from rich.console import Console
from rich.progress_bar import ProgressBar
from rich.table import Table
from rich.text import Text

from policies.cost.kappa import advise, kappa_of
from policies.cost.kappa_paper import WORKLOADS
from policies.spec.hardware import HardwareProfile
from policies.spec.model import ModelSpec
from sim.report import count, duration, gib
from sim.serve_result import ServeRecord
from sim.serve_settings import ServeJob

Row = tuple[str, str | Table | Text]
_BINDS = 0.95  # share of the token budget in use from which it is what limits the schedule


def serve_line(label: str, overrides: Sequence[str], record: ServeRecord) -> str:
    """One line for a run of a sweep."""
    cell = [text for text in overrides if not text.startswith("+experiment=")]
    what = " ".join(cell) or f"{record.admission} {record.prefix} {record.hardware}"
    if record.status != "ok":
        return f"#{label} {what}: {record.status}: {record.reason}"
    return (
        f"#{label} {what}: {record.scheduled_tokens_mean:,.0f} new tokens/iteration, "
        f"TTFT p99 {duration(record.ttft_p99_s)}, {record.requests_per_s:,.2f} requests/s"
    )


def serve_table(job: ServeJob, record: ServeRecord, console: Console) -> Table:
    """All that a serving run found out, grouped."""
    title = f"serving {record.model} on {record.hardware}: {record.workload}"
    table = Table(
        box=box.SIMPLE_HEAD, show_header=False, pad_edge=False, padding=(0, 1),
        title=Text(title), title_justify="left", title_style="bold",
    )  # fmt: skip
    table.add_column(no_wrap=True, style="dim", min_width=13)
    table.add_column(overflow="fold")
    groups = [_what_ran(job, record)]
    if record.status == "ok":
        wide = console.width >= 100
        groups += [
            _latency(record, job),
            _schedule(record),
            _lanes(record, 24 if wide else 12),
            _bytes(record),
            [("power", _power(record))],
        ]
    else:
        groups.append([("status", Text(f"{record.status}: {record.reason}", style="yellow"))])
    groups.append(_flags(job, record))
    for group in groups:
        for label, value in group:
            table.add_row(label, value)
        if group:
            table.add_section()
    return table


def _what_ran(job: ServeJob, record: ServeRecord) -> list[Row]:
    options = job.spec.options
    rows: list[Row] = [
        ("policies", f"admission {record.admission}, prefix {record.prefix}"
                     + (f", routing {record.routing}" if record.routing else "")),
        ("arrivals", _arrivals(job, record)),
    ]  # fmt: skip
    if record.capacity_tokens is not None:
        kv = record.capacity_tokens * job.spec.model.kv_bytes_per_token
        text = f"{record.capacity_tokens:,} tokens of KV ({gib(kv)}), "
        text += f"budget {options.budget_tokens:,} tokens/iteration"
        rows.append(("GPU memory", text))
    cached = "all history in host memory, as the trace says"
    if options.kv_store == "lru":
        cached = "LRU store in host memory" + (" over disk" if options.disk_store_bytes else "")
    modes = ["layer-wise overlap" if options.overlap else "loads before compute"]
    modes.append("write-back competes with loads" if options.write_back else "write-back free")
    if options.prefill_only:
        modes.append("prefill only")
    rows.append(("KV store", cached))
    rows.append(("mode", ", ".join(modes)))
    if record.n_new_mean is not None:
        rows.append(("workload", _statistics(record)))
    return rows


def _statistics(record: ServeRecord) -> Table:
    """Lengths of the workload, beside the paper's where it prints them."""
    grid = Table(box=None, padding=(0, 2, 0, 0), pad_edge=False)
    printed = next((p for name, p in WORKLOADS.items() if record.workload.startswith(name)), {})
    grid.add_column("")
    for name in ("mean", "p50", "p90"):
        grid.add_column(name + (" (paper)" if printed else ""), justify="right")
    for label, name in (("T", "n_new"), ("K", "n_history"), ("K/T", "kappa_ratio")):
        cells = []
        for statistic in ("mean", "p50", "p90"):
            key = f"{name}_{statistic}"
            ours, theirs = getattr(record, key, None), printed.get(key)
            cell = "" if ours is None else f"{ours:,.0f}"
            cells.append(cell + (f" ({theirs:,.0f})" if theirs is not None else ""))
        grid.add_row(label, *cells)
    return grid


def _arrivals(job: ServeJob, record: ServeRecord) -> str:
    arrivals = job.spec.arrivals
    words = {
        "poisson": f"Poisson, {arrivals.rate:g} requests/s, think {arrivals.think_s:g} s",
        "open": f"Poisson, {arrivals.rate:g} requests/s, every turn by itself",
        "trace": f"as in the trace, {arrivals.speedup:g}x as fast",
        "closed": f"{arrivals.n_clients} conversations at a time",
        "backlog": "all at once",
    }[arrivals.mode]
    if record.n_requests is None:
        return words
    served = f"{count(record.n_requests, 'request')} served"
    for n, what in (
        (record.n_rejected, "rejected (too large for GPU memory)"),
        (record.n_cut, f"cut at {job.spec.options.max_new} tokens"),
        (record.n_too_long, "beyond the model's positions"),
    ):
        if n:
            served += f", {n:,} {what}"
    return f"{words}; {served}"


def _latency(record: ServeRecord, job: ServeJob) -> list[Row]:
    grid = Table(box=None, padding=(0, 2, 0, 0), pad_edge=False)
    grid.add_column("")
    for name in ("mean", "p50", "p90", "p99"):
        grid.add_column(name, justify="right")
    for label, name in (("TTFT", "ttft"), ("TPOT", "tpot"), ("queueing", "queue")):
        values = [getattr(record, f"{name}_{q}_s") for q in ("mean", "p50", "p90", "p99")]
        if values[0] is not None:
            grid.add_row(label, *(duration(value) for value in values))
    rate = f"{record.requests_per_s:,.2f} requests/s, prefill {record.prefill_tokens_per_s:,.0f}"
    if record.decode_tokens_per_s is not None:
        rate += f", decode {record.decode_tokens_per_s:,.0f}"
    good = (
        f"{record.goodput_per_s:,.2f} requests/s with TTFT <= {job.targets.ttft_s:g} s and TPOT <= "
        f"{1e3 * job.targets.tpot_s:g} ms ({record.slo_share:.1%})"
    )
    return [
        ("latency", grid),
        ("throughput", f"{rate} tokens/s; makespan {duration(record.makespan_s)}"),
        ("goodput", good),
    ]


def _schedule(record: ServeRecord) -> list[Row]:
    text = (
        f"{record.scheduled_tokens_mean:,.0f} new tokens an iteration "
        f"({record.scheduled_tokens_first_half:,.0f} in the first half)"
    )
    if record.decode_tokens_per_s is None:  # a request stays for about one iteration
        text += f"; memory allows {record.scheduled_tokens_bound:,.0f}"
    binds = " (it binds)" if (record.budget_use or 0.0) > _BINDS else ""
    more = (
        f"{record.n_iterations:,} iterations, budget used {record.budget_use:.1%}{binds}, memory "
        f"held {record.held_share_mean:.1%}; {record.n_preempted:,} preemptions; nobody overtaken "
        f"more than {record.max_overtaken:,} times"
    )
    return [("scheduled", text), ("", more)]


def _lanes(record: ServeRecord, width: int) -> list[Row]:
    grid = Table(box=None, padding=(0, 1, 0, 0), pad_edge=False, show_header=False)
    for name in ("gpu", "h2d", "d2h", "disk"):
        share = getattr(record, f"{name}_busy")
        bar = ProgressBar(total=1.0, completed=min(1.0, share), width=width)
        grid.add_row(name.upper() if name != "disk" else name, bar, f"{share:.1%}")
    overhead = (
        f"loads take {record.transfer_overhead:,.2f}x as long as compute (POH), "
        f"{record.transfer_share:.1%} of both"
    )
    return [("lanes busy", grid), ("transfers", overhead)]


def _bytes(record: ServeRecord) -> list[Row]:
    rows: list[Row] = [
        ("moved", f"loaded {_tb(record.load_bytes)}, stored {_tb(record.store_bytes)}, from disk "
                  f"{_tb(record.disk_read_bytes)}, to disk {_tb(record.disk_write_bytes)}"),
    ]  # fmt: skip
    if record.hit_rate is not None:
        text = f"{record.hit_rate:.1%} of the history's tokens; "
        text += f"{record.recompute_share:.2%} of the cached were recomputed"
        rows.append(("hits", text))
    return rows


def _tb(nbytes: float | None) -> str:
    if nbytes is None:
        return "-"
    return f"{nbytes / 1e12:,.2f} TB" if nbytes >= 1e11 else f"{nbytes / 1e9:,.2f} GB"


def _power(record: ServeRecord) -> str:
    return (
        f"{record.power_mean_watts:,.0f} W a GPU on average, {record.power_max_watts:,.0f} W at "
        f"most; {record.energy_per_token_joules:,.2f} J per token (a model, see conf/serve)"
    )


def _flags(job: ServeJob, record: ServeRecord) -> list[Row]:
    lines = dict.fromkeys(_kappa(job.spec.model, machine) for machine in job.spec.machines)
    rows: list[Row] = [("kappa", line) for line in lines]
    if record.extrapolated:
        rows.append(("extrapolated", Text(record.extrapolated, style="yellow")))
    return rows


def _kappa(model: ModelSpec, machine: HardwareProfile) -> str:
    kappa = kappa_of(model, machine.h2d.bytes_per_s, machine.gemm.y[-1])
    return f"{machine.name}: kappa_crit {kappa.kappa_crit:.1f}; {advise(kappa).text}"
