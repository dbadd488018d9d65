"""Traces as files: one JSON object a line, in program order, the fields of ``Span``.

Simulated and measured traces have the same schema, so comparing them is a join on ``key``. Times
are written with all their digits: a file read back gives the same floats, and two equal traces are
the same bytes.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable
from pathlib import Path

from policies.plan.op import Kind, Lane
from policies.trace.span import Span, Trace


def dump_span(span: Span) -> str:
    """One span as a line of JSON without its end; ``ValueError`` if a number is not finite."""
    return json.dumps(span._asdict(), allow_nan=False, separators=(",", ":"))


def parse_span(line: str) -> Span:
    """A span from a line of JSON; ``ValueError`` naming the field that is missing or unknown."""
    record = json.loads(line)
    if not isinstance(record, dict) or set(record) != set(Span._fields):
        found = ", ".join(record) if isinstance(record, dict) else type(record).__name__
        raise ValueError(f"span: has fields {found}, must have {', '.join(Span._fields)}")
    for name in ("start_s", "end_s", "nbytes", "flops"):
        if isinstance(record[name], bool) or not isinstance(record[name], int | float):
            raise ValueError(f"span.{name}: {record[name]!r} is not a number")
    return Span(
        str(record["key"]),
        Kind(record["kind"]),
        Lane(record["lane"]),
        float(record["start_s"]),
        float(record["end_s"]),
        int(record["nbytes"]),
        float(record["flops"]),
    )


def write_jsonl(
    spans: Iterable[Span], path: Path, keep: Callable[[Span], bool] | None = None
) -> None:
    """Write the spans for which ``keep`` holds (default: all) to ``path``."""
    with path.open("w", encoding="utf-8", newline="\n") as file:
        for span in spans:
            if keep is None or keep(span):
                file.write(dump_span(span) + "\n")


def read_jsonl(path: Path) -> Trace:
    """The trace in a file; ``ValueError`` naming file and line of what cannot be read."""
    spans = []
    with path.open("rb") as file:
        for number, line in enumerate(file, start=1):
            try:
                spans.append(parse_span(line.decode("utf-8")))
            except ValueError as error:  # a UnicodeDecodeError is one
                raise ValueError(f"{path}:{number}: {error}") from error
    return Trace(tuple(spans))
