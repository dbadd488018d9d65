"""Mixed beside its corners and rivals: decode throughput, and where cached tokens come from.

All policies run the same blocks. What readers get wrong: shares are of tokens, not of bytes or of
time. A token that is projected moves half of the bytes of its KV with multi-head attention, and one
that is recomputed none.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pandas as pd
from matplotlib.axes import Axes
from matplotlib.patches import Patch

from experiments import style

FULL, OTHER = "mixed", "tightllm"
SOURCES = {  # column: colour, words
    "n_load_mean": ("#56B4E9", "KV loaded"),
    "n_project_mean": ("#0072B2", "projected from layer inputs"),
    "n_recompute_mean": ("#E69F00", "recomputed"),
    "n_cpu_mean": ("#CC79A7", "attended on the CPU"),
    "n_resident_mean": ("#BBBBBB", "KV on the GPU"),
}
_KEY = ["model", "hardware", "prompt_len"]


def throughput(results: pd.DataFrame, folder: Path | None = None) -> pd.DataFrame:  # noqa: ARG001
    """Decode tokens/s: a row a cell, a column a policy; empty where a policy did not run."""
    table = style.pivot(results, _KEY, "policy", "decode_tokens_per_s", dropna=False)
    table = table.dropna(how="all")
    table = table[[name for name in results["policy"].unique() if name in table]]
    table.columns = [str(name).replace("-", "_") for name in table.columns]
    return _plain(table)


def mixes(results: pd.DataFrame, folder: Path) -> pd.DataFrame:  # noqa: ARG001
    """What ``mixed`` gains in decode, over ``tightllm`` and over its best rival, and its shares.

    ``ValueError`` if there is no run of ``mixed`` or of ``tightllm``.
    """
    table = style.pivot(results, _KEY, "policy", "decode_tokens_per_s")
    for name in (FULL, OTHER):
        if name not in table:
            raise ValueError(f"results: no run of policy {name} to compare with")
    rivals = table.drop(columns=FULL)
    found = pd.DataFrame({f"over_{OTHER}": table[FULL] / table[OTHER]})
    found["over_best_rival"] = table[FULL] / rivals.max(axis=1)
    found["best_rival"] = rivals.fillna(0.0).idxmax(axis=1)
    mine = style.ok(results[results["policy"] == FULL]).set_index(_KEY)
    shares = _shares(mine)
    for column in ("n_load_mean", "n_project_mean", "n_recompute_mean"):
        found[column.removeprefix("n_").replace("_mean", "_share")] = shares[column]
    return _plain(found)


def decode(results: pd.DataFrame, folder: Path, path: Path) -> None:  # noqa: ARG001
    """A panel a model on a machine: a group a prompt length, a bar a policy, in tokens/s of
    TightLLM's; the number above the last bar is what ``mixed`` gains.
    """
    style.require(results, "policy", "decode_tokens_per_s", *_KEY)
    policies = [str(name) for name in results["policy"].unique()]
    models, machines = results["model"].unique(), results["hardware"].unique()
    title = "Decode throughput over TightLLM's, the same blocks for all"
    with style.panels(path, title, (len(models), len(machines)), (6.4, 2.8)) as out:
        for axes, rows in _cells(results, out):
            _throughputs(axes, rows, policies)
        for row in out.axes:
            row[0].set_ylabel("decode tokens/s\n(TightLLM = 1)")
        for axes in out.axes[-1]:
            axes.set_xlabel("prompt length (tokens)")
        handles = [Patch(facecolor=style.colour(p, policies), label=p) for p in policies]
        style.legend_below(out.figure, handles, n_columns=8)


def sources(results: pd.DataFrame, folder: Path, path: Path) -> None:  # noqa: ARG001
    """A panel a model on a machine: a group a policy, a stacked bar a prompt length."""
    style.require(results, "policy", *_KEY, *SOURCES)
    models, machines = results["model"].unique(), results["hardware"].unique()
    lengths = sorted(results["prompt_len"].dropna().unique())
    said = ", ".join(style.tokens(n) for n in lengths)
    title = f"Where cached tokens come from in a decode step; prompts of {said} from left to right"
    shape = len(models), len(machines)
    with style.panels(path, title, shape, (6.4, 2.8), sharex=True, sharey=True) as out:
        for axes, rows in _cells(results, out):
            _shares_of_policies(axes, rows, list(results["policy"].unique()), lengths)
        for row in out.axes:
            row[0].set_ylabel("share of cached tokens")
        handles = [Patch(facecolor=shade, label=words) for shade, words in SOURCES.values()]
        style.legend_below(out.figure, handles, n_columns=5)


def _cells(results: pd.DataFrame, out: style.Panels) -> Iterator[tuple[Axes, pd.DataFrame]]:
    """Axes and rows of each model (a row of panels) on each machine (a column)."""
    for i, model in enumerate(results["model"].unique()):
        for j, machine in enumerate(results["hardware"].unique()):
            rows = results[(results["model"] == model) & (results["hardware"] == machine)]
            axes = out.axes[i][j]
            axes.set_title(f"{model} on {style.machine_title(machine, _unmerged(rows))}")
            axes.grid(visible=False, axis="x")
            yield axes, rows


def _unmerged(rows: pd.DataFrame) -> pd.DataFrame:
    """Rows of policies that leave a block's batches as they are."""
    return rows[rows["n_batches"] == rows["n_batches"].max()]


def _throughputs(axes: Axes, rows: pd.DataFrame, policies: list[str]) -> None:
    table = style.pivot(rows, ("prompt_len",), "policy", "decode_tokens_per_s")
    table = table.reindex(columns=policies).sort_index()
    over = table.div(table[OTHER], axis=0) if OTHER in table else table
    width = 0.86 / len(policies)
    top = float(over.max().max())
    for i, policy in enumerate(policies):
        for at, value in enumerate(over[policy]):
            x = at + (i - (len(policies) - 1) / 2) * width
            if pd.isna(value):
                axes.text(x, 0.0, " oom", rotation=90, fontsize=7, ha="center", va="bottom",
                          color=style.colour(policy, policies))  # fmt: skip
                continue
            axes.bar(x, value, width, color=style.colour(policy, policies))
            if policy == FULL:
                axes.text(x, value, f"{value:.2f}", fontsize=7.5, ha="center", va="bottom")
    axes.axhline(1.0, color="#333333", lw=0.8, ls=":")
    axes.set_ylim(0.0, 1.1 * top)
    axes.set_xticks(range(len(over)), [style.tokens(n) for n in over.index])


def _shares_of_policies(
    axes: Axes, rows: pd.DataFrame, policies: list[str], lengths: list[float]
) -> None:
    keys = ["policy", "prompt_len"]
    shares = _shares(style.single(style.ok(rows), keys).set_index(keys))
    width = 0.84 / len(lengths)
    for at, policy in enumerate(policies):
        for i, length in enumerate(lengths):
            x = at + (i - (len(lengths) - 1) / 2) * width
            if (policy, length) not in shares.index:
                axes.text(x, 0.0, " oom", rotation=90, fontsize=7, ha="center", va="bottom")
                continue
            bottom = 0.0
            for column, (shade, _) in SOURCES.items():
                height = shares.at[(policy, length), column]
                axes.bar(x, height, 0.92 * width, bottom=bottom, color=shade)
                bottom += height
    axes.set_xticks(range(len(policies)), policies, rotation=25, ha="right",
                    rotation_mode="anchor")  # fmt: skip
    axes.set_ylim(0.0, 1.0)


def _shares(rows: pd.DataFrame) -> pd.DataFrame:
    """Means of tokens over their sum: shares of the context."""
    tokens = rows[list(SOURCES)].astype(float)
    return tokens.div(tokens.sum(axis=1), axis=0)


def _plain(table: pd.DataFrame) -> pd.DataFrame:
    """Keys as columns again, whole numbers as such, others to four digits."""
    plain: pd.DataFrame = table.reset_index().astype({"prompt_len": int})
    for name in plain.select_dtypes("float"):
        plain[name] = [float(f"{value:.4g}") for value in plain[name]]
    return plain
