"""Traces for Perfetto and chrome://tracing: a track a lane, a bar an op.

The format counts in *microseconds*; everything else here is in seconds. A bar carries the op's
key, bytes and FLOPs. Bars are named by kind, step, layer and batch; viewers colour by name without
its digits, so a kind keeps one colour.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any

from policies.plan.op import Lane
from policies.trace.span import Span, parse_key

_PID = 0
_THREAD_OF = {lane: thread for thread, lane in enumerate(Lane)}


def chrome_events(
    spans: Iterable[Span], keep: Callable[[Span], bool] | None = None, process: str = "offload"
) -> Iterator[dict[str, Any]]:
    """Events in a stable order: names of the process and of all lanes, then spans as given."""
    yield _named("process_name", 0, process)
    for lane, thread in _THREAD_OF.items():
        yield _named("thread_name", thread, lane.value)
        yield _metadata("thread_sort_index", thread, {"sort_index": thread})
    for span in spans:
        if keep is None or keep(span):
            parts = parse_key(span.key)
            yield {
                "ph": "X",
                "pid": _PID,
                "tid": _THREAD_OF[span.lane],
                "name": f"{parts.kind} s{parts.step} l{parts.layer} b{parts.batch}",
                "cat": span.kind.value,
                "ts": span.start_s * 1e6,
                "dur": (span.end_s - span.start_s) * 1e6,
                "args": {"key": span.key, "bytes": span.nbytes, "flops": span.flops},
            }


def write_chrome(
    spans: Iterable[Span],
    path: Path,
    keep: Callable[[Span], bool] | None = None,
    process: str = "offload",
) -> None:
    """Write the spans for which ``keep`` holds (default: all) as one JSON document.

    ``ValueError`` if a number is not finite: JSON has no word for it.
    """
    with path.open("w", encoding="utf-8", newline="\n") as file:
        file.write('{"displayTimeUnit":"ms","traceEvents":[')
        separator = "\n"
        for event in chrome_events(spans, keep, process):
            file.write(separator + json.dumps(event, allow_nan=False, separators=(",", ":")))
            separator = ",\n"
        file.write("\n]}\n")


def _metadata(name: str, thread: int, args: dict[str, Any]) -> dict[str, Any]:
    return {"ph": "M", "pid": _PID, "tid": thread, "name": name, "args": args}


def _named(event: str, thread: int, name: str) -> dict[str, Any]:
    return _metadata(event, thread, {"name": name})
