"""An advice for a reader: what it waits on, a ranked table, elasticities, the command to run.

What readers get wrong: the range behind a value is where it may lie because the profile's numbers
are uncertain, all drawn at once. It says nothing about what the model leaves out.
"""

from __future__ import annotations

from collections.abc import Sequence

from rich import box
from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from sim.advise import Advice, AdviseSettings, Ranked
from sim.advise_entry import command
from sim.report import count, duration
from sim.result import RunRecord

_UNITS = {
    "decode_tokens_per_s": "decode tokens/s",
    "prefill_tokens_per_s": "prefill tokens/s",
    "requests_per_s": "requests/s",
}
WAITS = {
    "h2d_weights": "weights over H2D",
    "h2d_kv": "KV over H2D",
    "d2h": "D2H",
    "disk": "the disk",
    "compute": "GPU compute",
    "host": "host copies or CPU",
    "sync": "synchronisation",
    "idle": "nothing",
}
_WORDS = {
    "link": "host link rates",
    "compute": "GPU FLOP/s",
    "hbm": "GPU memory rate",
    "host_cpu": "CPU and host copies",
    "disk": "disk rates",
    "gpu_memory": "GPU memory",
    "host_memory": "host memory",
}
_SHOWN_NUMBERS = 3
_SHOWN_SHARE = 0.1  # of the variance; with a hundred machines a few per cent are chance


def advice_lines(
    advice: Advice, settings: AdviseSettings, record: RunRecord, line: Sequence[str]
) -> RenderableType:
    """Everything that was found, in the order in which it is asked."""
    what = f"{record.model} on {record.hardware}, {record.workload}"
    title = Text(f"Advice: {what}: most {_UNITS[settings.objective.name]}", style="bold")
    if settings.objective.max_tpot_s is not None:
        title.append(f" at up to {duration(settings.objective.max_tpot_s)} per token")
    if not advice.ranking:
        return Group(title, Text(f"none: {advice.reason}", style="bold red"))
    parts: list[RenderableType] = [title, _ranking(advice, settings), Text(_waits(record))]
    parts.append(_elasticity(advice, settings))
    if advice.spread:
        parts.append(Text(_spread(advice)))
    searched = (
        f"searched {advice.n_candidates:,} candidates with {advice.n_simulated:,} simulations; "
        f"{count(advice.n_unfit, 'candidate')} that did not fit ended a series; "
        f"{duration(sum(advice.seconds.values()))}"
    )
    parts += [Text(searched), Text("run it:"), Text(f"  {command(line)}", style="bold")]
    return Group(*parts)


def _ranking(advice: Advice, settings: AdviseSettings) -> Table:
    table = Table(box=box.SIMPLE_HEAD, padding=(0, 1, 0, 0), pad_edge=False)
    table.add_column("best of each policy\nbatches x sequences, setting", overflow="fold")
    for name in (_UNITS[settings.objective.name].replace(" ", "\n"), "80 % range", "best\nin"):
        table.add_column(name, justify="right", no_wrap=True)
    table.add_column("TPOT", justify="right", no_wrap=True)
    for ranked in advice.ranking:
        candidate = ranked.tried.candidate
        rest = [text for text in candidate.overrides if text.startswith("policy.")]
        sizes = f"  {candidate.n_batches} x {candidate.batch_size}"
        setting = ", ".join([sizes, *(text.removeprefix("policy.") for text in rest)])
        table.add_row(
            Text(candidate.name, style="bold") + Text(f"\n{setting}", style="dim"),
            f"{ranked.value:,.4g}",
            _range(ranked),
            "" if ranked.wins is None else f"{100 * ranked.wins:.0f} %",
            duration(ranked.tried.record.tpot_s),
        )
    return table


def _range(ranked: Ranked) -> str:
    if ranked.low is None or ranked.high is None:
        return ""
    return f"{ranked.low:,.4g} .. {ranked.high:,.4g}"


def _waits(record: RunRecord) -> str:
    shares = {name: getattr(record, f"wait_{name}", None) or 0.0 for name in WAITS}
    named = [
        f"{WAITS[name]} {100 * share:.0f} %"
        for name, share in sorted(shares.items(), key=lambda item: -item[1])
        if share >= 0.005
    ]
    return f"the best waits, prefill included, on: {', '.join(named)}"


def _elasticity(advice: Advice, settings: AdviseSettings) -> Table:
    table = Table(box=box.SIMPLE_HEAD, padding=(0, 1, 0, 0), pad_edge=False)
    table.add_column(f"{100 * settings.change:.0f} % more of")
    table.add_column("gains", justify="right")
    table.add_column("elasticity", justify="right")
    table.add_column("")
    best = advice.ranking[0].value
    for item in sorted(advice.elasticities, key=lambda e: -e.elasticity):
        note = "with another setting" if item.moves else ""
        gain = f"{100 * (item.value / best - 1):+.1f} %"
        table.add_row(_WORDS[item.resource], gain, f"{item.elasticity:+.2f}", note)
    return table


def _spread(advice: Advice) -> str:
    shown = [(n, s) for n, s in advice.spread.items() if s >= _SHOWN_SHARE][:_SHOWN_NUMBERS]
    named = ", ".join(f"{name} {100 * share:.0f} %" for name, share in shown) or "many of them"
    return f"the range comes from uncertain numbers of the profile, mostly: {named}"


def advice_line(label: str, record: RunRecord, advice: Advice) -> str:
    """One line for an advice that is one of many."""
    what = f"#{label} {record.model} {record.hardware} {record.workload}"
    if not advice.ranking:
        return f"{what}: {record.status}: {advice.reason}"
    best = advice.ranking[0]
    return f"{what}: {' '.join(best.tried.candidate.overrides)}: {best.value:,.4g}"
