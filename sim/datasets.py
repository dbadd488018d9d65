"""Entry module of length data: ``python -m sim.datasets convert | describe | tabulate``.

``convert`` turns a public raw file into a trace of token counts, ``describe`` prints the statistics
of a trace or a named workload, ``tabulate`` makes the quantile table that a generator draws from.
What users get wrong: counts depend on the tokenizer, so a text format needs one and a format that
holds counts refuses one.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path

import numpy as np
from numpy.typing import NDArray
from rich.box import SIMPLE
from rich.console import Console
from rich.markup import escape
from rich.table import Table

from policies.errors import error_text
from sim.columns import MAX_VALUE, check_extension, read_columns, write_atomically
from sim.conversion import Conversion, CountTokens
from sim.convert_arrivals import convert_azure, convert_mooncake
from sim.convert_documents import convert_finqa, convert_narrativeqa
from sim.convert_sharegpt import convert_sharegpt
from sim.lengths import TASKS, LengthTrace, read_trace
from sim.quantiles import LengthTable
from sim.sessions import HASH_BLOCK_TOKENS
from sim.workloads import GENERATED, SHIPPED, generate, shipped

_TEXT: dict[str, Callable[[Path, CountTokens], Conversion]] = {
    "sharegpt": convert_sharegpt,
    "narrativeqa": convert_narrativeqa,
    "finqa": convert_finqa,
}
_COUNTS: dict[str, Callable[[Path], Conversion]] = {
    "mooncake": convert_mooncake,
    "azure": convert_azure,
}

_TRACE = f"""\
columns of a trace (.csv or .parquet, one row a request, whole numbers from 0 to {MAX_VALUE:,};
columns of other names are ignored):
  prompt_tokens                 tokens  new in this request, neither cached nor BOS
  response_tokens               tokens  generated; an offline run generates at least 1
optional, an empty field is unknown:
  cached_prefix_tokens          tokens  K, before the prompt, which a cache may hold (else 0)
  cached_prefix_tokens_seedfit  tokens  the same, for serve.history=seedfit
  conversation_id               number  turns of one conversation, in the order of the file
  document_id                   number  questions on one document
  task                          0 to {len(TASKS) - 1}  {", ".join(TASKS)}
  arrival_ms                    ms      arrival, from the first request of the trace
  hash_ids                      list    one number a block of {HASH_BLOCK_TOKENS} tokens, in Parquet
convert also writes, and nothing reads: turn_index, question_index (numbers from 0), request_id,
parent_request_id (row numbers), shared_blocks (blocks of {HASH_BLOCK_TOKENS} tokens seen before)
"""


def load_tokenizer(path: Path) -> CountTokens:
    """Token counter from a ``tokenizer.json``; no special tokens, no truncation, no padding."""
    from tokenizers import Tokenizer  # here: only a conversion of text needs it

    if not path.is_file():
        raise ValueError(f"--tokenizer: {path} does not exist")
    try:
        tokenizer = Tokenizer.from_file(str(path))
    except Exception as error:  # the library raises nothing narrower
        raise ValueError(f"--tokenizer: {path} is not a tokenizer JSON file ({error})") from error
    tokenizer.no_truncation()
    tokenizer.no_padding()

    def count(text: str) -> int:
        text.encode()  # the library's own error for a lone surrogate does not say so
        return len(tokenizer.encode(text, add_special_tokens=False).ids)

    return count


def convert(name: str, raw: Path, tokenizer: Path | None, out: Path) -> Conversion:
    """Convert a raw data set and write the trace; nothing is written if anything is wrong."""
    check_extension(out)
    if name in _TEXT:
        if tokenizer is None:
            raise ValueError(f"--tokenizer: {name} holds text, give a tokenizer JSON file")
        result = _TEXT[name](raw, load_tokenizer(tokenizer))
    else:
        if tokenizer is not None:
            raise ValueError(f"--tokenizer: {name} holds token counts, a tokenizer is not used")
        result = _COUNTS[name](raw)
    result.write(out, raw)
    return result


def load(source: str, task: str | None, n: int | None, seed: int | None) -> LengthTrace:
    """A trace by the name of a workload or by path; refuses options that do not apply."""
    if source in GENERATED and task is None:
        return generate(source, n, seed or 0)
    given = {"-n": n, "--seed": seed, **({"--task": task} if source in SHIPPED + GENERATED else {})}
    for option, value in given.items():
        if value is not None:
            raise ValueError(f"{option}: {value} does not apply to {source}")
    if source in SHIPPED:
        return shipped(source)
    if not Path(source).suffix:
        names = ", ".join(SHIPPED + GENERATED)
        raise ValueError(f"source: {source!r} must be a path (.csv, .parquet) or one of {names}")
    return read_trace(source, task)


def statistics(trace: LengthTrace) -> Table:
    """Mean and quantiles of every length of a trace."""
    table = Table(
        title=escape(f"{trace.source}: {len(trace):,} requests"),
        caption="tokens; offline prompt = K + prompt + 1, kappa_ratio = K / (prompt + 1)",
        box=SIMPLE,
    )
    table.add_column("length", no_wrap=True)
    for column in ("mean", "p5", "p25", "p50", "p75", "p95", "max"):
        table.add_column(column, justify="right", no_wrap=True)
    rows: dict[str, NDArray[np.int64] | NDArray[np.float64]] = {
        "prompt": trace.prompt_tokens,
        "cached prefix": trace.cached_prefix_tokens,
        "response": trace.response_tokens,
        "offline prompt": trace.offline_prompt_tokens,
        "kappa_ratio": trace.kappa_ratio,
    }
    for name, values in rows.items():
        quantiles = np.quantile(values, [0.05, 0.25, 0.5, 0.75, 0.95, 1.0])
        table.add_row(name, *(_short(v) for v in (np.mean(values), *quantiles)))
    return table


def _short(value: float) -> str:
    """No decimals from 100 on, at most one below."""
    return f"{value:.0f}" if value >= 100.0 else f"{value:.1f}".removesuffix(".0")


def tabulate(path: Path, task: str | None, source: str | None, out: Path) -> LengthTable:
    """Write the quantile table of a trace as JSON; ``document_id`` groups questions if present."""
    if out.suffix.lower() != ".json":
        raise ValueError(f"{out}: extension {out.suffix!r} must be .json")
    trace = read_trace(path, task)
    ids = None
    if task is None:
        ids = read_columns(path, ("prompt_tokens",), ("document_id",)).get("document_id")
    table = LengthTable.of(replace(trace, source=source or trace.source), ids)

    def write(part: Path) -> None:
        part.write_text(table.to_json(), encoding="utf-8")

    write_atomically(out, write)
    return table


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command; returns the exit status, 1 for bad input."""
    arguments = _parser().parse_args(argv)
    try:
        _run(arguments, Console(soft_wrap=True))
    except (ValueError, OSError) as error:
        message = f"[red]error:[/red] {escape(error_text(error))}"
        Console(stderr=True, soft_wrap=True).print(message, highlight=False)
        return 1
    return 0


def _run(arguments: argparse.Namespace, out: Console) -> None:
    """Do what the command line asks and print the outcome."""
    if arguments.command == "convert":
        result = convert(arguments.format, arguments.raw, arguments.tokenizer, arguments.output)
        out.print(escape(f"{arguments.output}: {len(result):,} requests"))
        for verb, counts in (("skipped", result.skipped), ("note", result.notes)):
            for reason, n in counts.items():
                out.print(escape(f"{verb}: {n:,} {reason}"))
    elif arguments.command == "describe":
        trace = load(arguments.source, arguments.task, arguments.n, arguments.seed)
        out.print(statistics(trace))
        for label, n in (
            ("without a response (run offline as 1 token)", trace.n_zero_responses),
            ("without information on reuse (K = 0)", trace.n_unknown_prefix),
            ("of other tasks, left out", trace.n_other_tasks),
        ):
            if n:
                out.print(f"{n:,} requests {label}")
    else:
        table = tabulate(arguments.trace, arguments.task, arguments.source, arguments.output)
        out.print(escape(f"{arguments.output}: table of {table.n_requests:,} requests"))


def _parser() -> argparse.ArgumentParser:
    raw = argparse.RawDescriptionHelpFormatter  # keeps the table of columns as it is
    parser = argparse.ArgumentParser(
        prog="python -m sim.datasets", description=__doc__, epilog=_TRACE, formatter_class=raw
    )
    commands = parser.add_subparsers(dest="command", required=True)
    add = partial(commands.add_parser, epilog=_TRACE, formatter_class=raw)
    command = add("convert", help="turn a public raw file into a trace")
    command.add_argument("format", choices=(*_TEXT, *_COUNTS))
    command.add_argument("raw", type=Path, help="raw file (narrativeqa: the folder)")
    command.add_argument("--tokenizer", type=Path, help="tokenizer.json, for formats with text")
    command.add_argument("-o", "--output", type=Path, required=True, help=".parquet or .csv")
    command = add("describe", help="print the statistics of a trace")
    command.add_argument("source", help=f"path, or one of {', '.join(SHIPPED + GENERATED)}")
    command.add_argument("--task", choices=TASKS, help="rows of a trace with a task column")
    command.add_argument("-n", type=int, help="requests to generate (default: as the source)")
    command.add_argument("--seed", type=int, help="of a generated workload (default 0)")
    command = add("tabulate", help="make a quantile table from a trace")
    command.add_argument("trace", type=Path, help=".parquet or .csv")
    command.add_argument("--task", choices=TASKS, help="rows of a trace with a task column")
    command.add_argument("--source", help="what the table says of its origin (default: the path)")
    command.add_argument("-o", "--output", type=Path, required=True, help=".json")
    return parser


if __name__ == "__main__":
    sys.exit(main())
