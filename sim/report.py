"""One run for a reader: the break-even lines, one grouped table, or one line in a sweep.

Here, and only here, numbers get units: bytes as GiB where they are capacities, seconds as s or ms.
What readers get wrong: "busy" is how long a lane works, "waits on" what the run's end depended on;
a lane that is busy all the time may hold nobody up.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from rich import box
from rich.console import Console, Group, RenderableType
from rich.table import Table
from rich.text import Text

from policies.cost.breakeven import BreakEven, PhaseCost
from policies.cost.flops import exact_recompute_flops, paper_recompute_flops
from policies.spec.hardware import HardwareProfile
from policies.spec.model import ModelSpec
from sim.cached_tokens import sources_text
from sim.remedy import WOULD_HELP
from sim.result import RunRecord
from sim.run import RunSpec

Row = tuple[str, RenderableType]

_BAR_WIDTH, _NARROW_BAR_WIDTH = 24, 12
_WIDE = 100  # characters from which the wide bars fit
_LANES = (
    ("GPU", "gpu_busy"),
    ("H2D", "h2d_busy"),
    ("D2H", "d2h_busy"),
    ("disk", "disk_busy"),
    ("CPU", "cpu_busy"),
)
_WAITS = (
    ("H2D weights", "wait_h2d_weights"),
    ("H2D KV", "wait_h2d_kv"),
    ("D2H", "wait_d2h"),
    ("disk", "wait_disk"),
    ("compute", "wait_compute"),
    ("host", "wait_host"),
    ("sync", "wait_sync"),
)
_RESOURCES = {
    "weights": "H2D, mostly weights",
    "kv": "KV transfers",
    "disk": "the disk",
    "compute": "compute",
    "cpu": "attention on the CPU",
}


# ---- break-even ----------------------------------------------------------------------------------


def break_even_lines(found: BreakEven) -> RenderableType:
    """What bounds the block, what recompute can gain, and when offloading cannot win."""
    title = f"Break-even of the largest block: {count(found.n_seqs, 'sequence')}"
    lines = Table.grid(padding=(0, 2))
    lines.add_column(no_wrap=True, style="dim")
    lines.add_column(overflow="fold")
    if found.decode:
        title += f", {found.n_ctx:,} tokens cached in mid-generation"
        lines.add_row(" decode step", _bound(found.decode))
    lines.add_row(" prefill", _bound(found.prefill))
    if found.decode and 0 < found.on_cpu_share < 1:
        share = f"{100 * found.on_cpu_share:.0f} % of the cached tokens"
        lines.add_row(" on the CPU", f"{share} are attended there, the KV of the others is loaded")
    elif found.decode:
        lines.add_row(" recompute", _recompute(found))
    for note in _cannot_win(found):
        lines.add_row(" but", Text(note, style="yellow"))
    return Group(Text(title, style="bold"), lines, Text())


def _bound(phase: PhaseCost) -> str:
    parts = [
        f"{name} {duration(value)}"
        for name, value in (
            ("weights", phase.weights_s),
            ("KV in", phase.kv_s),
            ("KV out", phase.store_s),
            ("disk", phase.disk_s),
            ("compute", phase.compute_s),
            ("CPU attention", phase.cpu_s),
        )
        if value > 0
    ]
    return (
        f"bound by {_RESOURCES[phase.bound]}: {duration(phase.bound_s)} with perfect overlap, "
        f"{phase.overlap_gain:.2f}x faster than with none ({', '.join(parts)})"
    )


def _recompute(found: BreakEven) -> str:
    if found.on_cpu_share:
        return "none: the CPU attends, decode loads no KV"
    closed = ""
    if found.n_recompute_closed is not None:
        closed = f"; closed form at constant rates: {found.n_recompute_closed:,.0f} tokens"
    gain = f"{100 * (found.recompute_gain - 1):.1f} %"
    if found.load_everything:
        return f"a decode step gains {gain} at most: load everything{closed}"
    share = found.n_recompute / found.n_ctx
    return (
        f"a decode step gains {gain} at most, with {found.n_recompute:,} tokens a sequence "
        f"({100 * share:.0f} % of the cache){closed}"
    )


def _cannot_win(found: BreakEven) -> Iterator[str]:
    if found.fits_on_gpu:
        advice = "policy.placement=auto keeps the weights of all layers there"
        if not found.prefill.weights_s:
            advice = "the weights of all layers are there already"
        yield (
            f"offloading cannot win: weights and KV fit in GPU memory "
            f"({gib(found.resident_bytes)} of {gib(found.gpu_usable_bytes)}); {advice}"
        )
    if found.cpu_wins and found.decode and found.cpu_step_s is not None:
        sizes = "however many sequences run at once"
        if found.offload_wins_seqs is not None:
            sizes = f"up to {count(found.offload_wins_seqs - 1, 'sequence')} at once"
        yield (
            f"offloading may not win: the CPU could read weights and KV in "
            f"{duration(found.cpu_step_s)} a decode step, sooner than the "
            f"{duration(found.decode.bound_s)} above ({sizes}; its arithmetic not counted)"
        )


# ---- one run -------------------------------------------------------------------------------------


def sweep_line(label: str, overrides: Sequence[str], record: RunRecord) -> str:
    """One line for a run of a sweep."""
    cell = [text for text in overrides if not text.startswith("+experiment=")]
    what = " ".join(cell) or f"{record.policy} {record.model} {record.hardware}"
    if record.status != "ok":
        return f"#{label} {what}: {record.status}: {record.reason}"
    speed = f"prefill {record.prefill_tokens_per_s:,.1f} tokens/s"
    if record.decode_tokens_per_s is not None:
        speed += f", decode {record.decode_tokens_per_s:,.2f} tokens/s"
    return f"#{label} {what}: {speed}"


def run_table(
    spec: RunSpec, record: RunRecord, console: Console, overrides: Sequence[str]
) -> Table:
    """All that a run found out, grouped."""
    bars = _Bars(console)
    table = Table(
        box=box.SIMPLE_HEAD, show_header=False, pad_edge=False, padding=(0, 1), width=None,
        title=Text(f"{record.policy}: {record.model} on {record.hardware}, {record.workload}"),
        title_justify="left", title_style="bold",
    )  # fmt: skip
    table.add_column(no_wrap=True, style="dim", min_width=13)
    table.add_column(overflow="fold")
    groups = [_what_ran(spec, record)]
    if record.status == "ok":
        groups += [
            _speed(record),
            _shares(record, _LANES, "lanes busy", bars),
            _shares(record, _WAITS, "waits on", bars),
            _memory(spec.hardware, record, bars),
            _decided(spec.model, record),
        ]
    else:
        groups.append(_failure(record))
    groups.append(_flags(spec, record, overrides))
    for group in groups:
        for label, value in group:
            table.add_row(label, Text(value) if isinstance(value, str) else value)
        if group:
            table.add_section()
    return table


def _what_ran(spec: RunSpec, record: RunRecord) -> list[Row]:
    model, hardware = spec.model, spec.hardware
    layers = f"{count(model.n_layers, 'layer')}, {parameters(model.n_params)} parameters"
    machine = f"{gib(hardware.gpu_bytes)} GPU, {gib(hardware.host_bytes)} host"
    rows: list[Row] = [
        ("model", f"{model.name}: {layers}, weights {gib(model.weight_bytes)}"),
        ("machine", f"{hardware.name}: {machine}, H2D {rate(hardware.h2d.bytes_per_s)}"),
        ("workload", _workload(record)),
    ]
    if record.n_blocks is not None:
        rows.append(("blocks", _blocks(record)))
    if record.weights_gpu is not None:
        rows.append(("weights", placement(record, "weights")))
        rows.append(("KV", placement(record, "kv")))
    return rows


def _workload(record: RunRecord) -> str:
    parts = [record.workload]
    if record.n_requests is not None:
        parts.append(count(record.n_requests, "request"))
    if record.workload != "fixed":
        parts.append(f"limit {record.limit:,}" if record.limit else "no limit")
        parts.append(f"max_new {record.max_new:,}" if record.max_new else "max_new none")
    if record.n_cut:
        parts.append(f"{record.n_cut:,} responses cut")
    if record.padding_waste:
        parts.append(f"padding {100 * record.padding_waste:.1f} % of prompt tokens")
    return ", ".join(parts)


def _blocks(record: RunRecord) -> str:
    sizes = f"up to {count(record.n_batches or 0, 'batch', 'batches')} of {record.batch_size:,}"
    lengths = f"prompt {record.prompt_len:,}, generated {record.gen_len:,} tokens at most"
    return f"{count(record.n_blocks or 0, 'block')} of {sizes}; {lengths}"


def _speed(record: RunRecord) -> list[Row]:
    rows: list[Row] = [
        ("prefill", f"{record.prefill_tokens_per_s:,.1f} tokens/s, TTFT {duration(record.ttft_s)}"),
    ]
    if record.decode_tokens_per_s is not None:
        tpot = duration(record.tpot_s)
        rows.append(("decode", f"{record.decode_tokens_per_s:,.2f} tokens/s, TPOT {tpot}"))
    phases = f"prefill {duration(record.prefill_s)} + decode {duration(record.decode_s)}"
    bound = f"{record.bound_ratio:.2f} x the busiest lane alone ({duration(record.lower_bound_s)})"
    rows.append(("makespan", f"{duration(record.makespan_s)} = {phases}; {bound}"))
    return rows


def _shares(
    record: RunRecord, columns: Sequence[tuple[str, str]], title: str, bars: _Bars
) -> list[Row]:
    """A bar for each share that does not round to zero, the title before the first."""
    held = [(name, getattr(record, column)) for name, column in columns]
    shown = [(name, share) for name, share in held if share is not None and share >= 5e-4]
    width = max(len(name) for name, _ in columns)
    return [
        (title if i == 0 else "", Text(f"{name:<{width}} ") + bars.share(share))
        for i, (name, share) in enumerate(shown)
    ]


def _memory(hardware: HardwareProfile, record: RunRecord, bars: _Bars) -> list[Row]:
    rows: list[Row] = []
    for tier in ("gpu", "host", "disk"):
        peak, have = getattr(record, f"peak_{tier}_bytes"), hardware.usable_bytes(tier)
        if not peak:
            continue
        line = Text(f"{tier.upper() if tier == 'gpu' else tier:<11} ") + bars.share(peak / have)
        rows.append(("" if rows else "memory peak", line + f"  {gib(peak)} of {gib(have)}"))
    return rows


def _decided(model: ModelSpec, record: RunRecord) -> list[Row]:
    rows: list[Row] = []
    if record.solver:
        rows.append(("solver", f"{record.solver}, {duration(record.solve_s)} in all"))
    if record.solver and record.n_recompute_mean is not None:
        mean = f"{record.n_recompute_mean:,.1f} tokens per batch and decode step, on average"
        rows.append(("recompute", mean))
    if record.feedback:
        changes = count(record.feedback_belief_changes or 0, "time")
        rows.append(("feedback", f"the belief changed {changes}"))
    if record.n_load_mean is not None and (record.n_project_mean or not record.solver):
        rows.append(("cached tokens", sources_text(record)))
    n_ctx = (record.prompt_len or 0) + (record.gen_len or 0) // 2
    exact, paper = (f(model, 1, n_ctx, 1) for f in (exact_recompute_flops, paper_recompute_flops))
    counts = f"{exact / 1e9:.3f} GFLOP exact, {paper / 1e9:.3f} GFLOP by the paper's count"
    rows.append(("recompute cost", f"{counts} (one token, one layer, context {n_ctx:,})"))
    return rows


def _failure(record: RunRecord) -> list[Row]:
    if record.status != "oom":
        return [(record.status, Text(record.reason, style="bold red"))]
    tier, need, have = record.oom_tier, record.need_bytes or 0, record.have_bytes or 0
    where = "GPU" if tier == "gpu" else tier
    text = f"{where} memory: need {gib(need)}, have {gib(have)}, {gib(need - have)} short"
    what, _, helps = record.reason.partition(WOULD_HELP)
    largest = what.partition("(largest: ")[2].removesuffix(")")
    rows: list[Row] = [("out of memory", Text(text, style="bold red"))]
    if largest:
        rows.append(("largest pool", largest))
    return [*rows, ("would help", helps)] if helps else rows


def _flags(spec: RunSpec, record: RunRecord, overrides: Sequence[str]) -> list[Row]:
    rows: list[Row] = []
    if record.n_too_long:
        fate = f"{record.n_rejected:,} rejected" if record.n_rejected else "run all the same"
        beyond = f"beyond the model's {spec.model.max_positions:,} positions, {fate}"
        rows.append(("too long", f"{count(record.n_too_long, 'request')} {beyond}"))
    if spec.belief is not None:
        rows.append(("belief", "the policy reasons with other hardware numbers (belief)"))
    if record.extrapolated:
        rates = record.extrapolated.replace(" ", ", ")
        rows.append(("extrapolated", f"{rates}: beyond the last measured point, its rate holds"))
    changed = overridden(overrides)
    guesses = [
        name
        for name, source in spec.hardware.provenance.items()
        if source.kind == "guess" and name not in changed and matters(name, record)
    ]
    if guesses:
        rows.append(("guesses", f"{', '.join(guesses)} (see the hardware profile)"))
    if changed:
        rows.append(("overridden", ", ".join(changed)))
    if record.trace == "first steps":
        rows.append(("trace", "the first prefill and two decode steps (trace=full keeps all)"))
    return rows


def overridden(overrides: Sequence[str]) -> list[str]:
    """Hardware fields that the command line sets, so that their stated source no longer holds."""
    names = (text.partition("=")[0].lstrip("+~") for text in overrides)
    return sorted({name.split(".")[1] for name in names if name.startswith("hardware.")})


def matters(name: str, record: RunRecord) -> bool:
    """Whether a hardware number can have moved this row's times."""
    if name.endswith(("_watts", "_reserve_bytes")):
        return False
    lanes = {"disk": "disk_busy", "cpu": "cpu_busy", "host_copy": "cpu_busy"}
    for prefix, column in lanes.items():
        if name.startswith(prefix):
            return bool(getattr(record, column))
    return True


# ---- numbers and units ---------------------------------------------------------------------------


class _Bars:
    """Bars of shares, in characters that the terminal's encoding has."""

    def __init__(self, console: Console) -> None:
        utf8 = console.encoding.lower().replace("-", "").startswith("utf")
        self.full, self.empty = ("█", "░") if utf8 else ("#", ".")
        self.width = _BAR_WIDTH if console.width >= _WIDE else _NARROW_BAR_WIDTH

    def share(self, value: float) -> Text:
        """A bar and its per cent."""
        n = min(self.width, round(value * self.width))
        bar = Text(self.full * n, style="cyan") + Text(self.empty * (self.width - n), style="dim")
        return bar + Text(f" {100 * value:5.1f} %")


def placement(record: RunRecord, what: str) -> str:
    """Effective shares over the tiers: ``64.0 % host, 36.0 % disk``."""
    shares = [(tier, getattr(record, f"{what}_{tier}") or 0.0) for tier in ("gpu", "host", "disk")]
    named = {"gpu": "GPU", "host": "host", "disk": "disk"}
    return ", ".join(f"{100 * share:.1f} % {named[tier]}" for tier, share in shares if share > 0)


def count(n: int, noun: str, plural: str = "") -> str:
    """``1 block``, ``2 blocks``."""
    return f"{n:,} {noun if n == 1 else plural or noun + 's'}"


def parameters(n: int) -> str:
    """``8.0 B`` (10**9), ``125.0 M`` or ``33.4 K``."""
    for scale, unit in ((1e9, "B"), (1e6, "M")):
        if n >= scale:
            return f"{n / scale:,.1f} {unit}"
    return f"{n / 1e3:,.1f} K"


def gib(nbytes: float) -> str:
    """Bytes as GiB (2**30), MiB below one, KiB where those would round to none."""
    if 0 < abs(nbytes) < 2**20 / 10:
        return f"{nbytes / 2**10:,.1f} KiB"
    if abs(nbytes) < 2**30:
        return f"{nbytes / 2**20:,.1f} MiB"
    return f"{nbytes / 2**30:,.1f} GiB"


def rate(bytes_per_s: float) -> str:
    """Bytes per second as GB/s (10**9), as link rates are quoted."""
    return f"{bytes_per_s / 1e9:,.1f} GB/s"


def duration(seconds: float | None) -> str:
    """Seconds as µs, ms, s or min, three digits."""
    if seconds is None:
        return "-"
    for limit, factor, unit in ((1e-3, 1e6, "µs"), (1.0, 1e3, "ms"), (600.0, 1.0, "s")):
        if seconds < limit:
            value = seconds * factor
            return f"{value:.{2 if value < 10 else 1 if value < 100 else 0}f} {unit}"
    return f"{seconds / 60:,.1f} min"
