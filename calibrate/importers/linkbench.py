"""Records out of a ``linkbench.json``: one machine measured by a stand-alone script.

Its numbers are rates or times of a mean, so a point has a single repeat and no spread. What readers
get wrong: its CPU attention is only the conversion of half to single precision, and its CPU read is
a copy; both say so in ``how``. It holds nothing out.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from calibrate.grid import Case, attention_x
from calibrate.predict import work
from calibrate.presets import GIB, MIB, Heads
from calibrate.record import Machine, Point

_HEADS: Mapping[str, Heads] = {"opt30": (56, 56, 128), "ll70": (64, 8, 128)}
_HALF = 2  # bytes of an element
_WINDOW_BATCH = 16
Timed = tuple[str, Mapping[str, float], float, str]  # group, amounts, seconds, how


def read_linkbench(path: Path) -> tuple[Point, ...]:
    """Points of a linkbench file; ``ValueError`` naming the file and the section that is missing.

    The file has no date: that of its last change stands in.
    """
    try:
        data = json.loads(path.read_text(encoding="utf-8"))
        machine = _machine(data["sys"])
        time = datetime.fromtimestamp(path.stat().st_mtime, UTC).isoformat(timespec="seconds")
        points = [
            Point(
                group, Case(group, x).name, x, (seconds,), True, machine, time,
                how=f"linkbench: {how}",
            )
            for group, x, seconds, how in _timed(data)
        ]  # fmt: skip
        return (*points, *_readings(data, machine, time))
    except json.JSONDecodeError as error:
        raise ValueError(f"{path}: is not valid JSON ({error})") from error
    except (KeyError, TypeError, IndexError) as error:
        raise ValueError(f"{path}: is not a complete linkbench file, lacks {error}") from error


def _machine(system: Mapping[str, Any]) -> Machine:
    device, driver = system["smi"].split(", ")[:2]
    return Machine(device, driver, system["torch"], f"{system['cpu']}, {system['cpus']} CPUs")


def _readings(data: Mapping[str, Any], machine: Machine, time: str) -> Iterator[Point]:
    system = data["sys"]
    memory = {
        "gpu_bytes": system["gpu_gib"] * GIB,
        "gpu_used_bytes": 0.0,
        "host_bytes": system["MemTotal"] * GIB,
        "host_used_bytes": (system["MemTotal"] - system["MemAvailable"]) * GIB,
        "disk_bytes": data["disk"]["free_gib"] * GIB,
    }
    limit = {"limit_watts": float(system["smi"].rsplit(", ", 1)[1].removesuffix(" W"))}
    for case, readings in ((Case("memory", {}), memory), (Case("power", {"load": 0.0}), limit)):
        yield Point(case.group, case.name, case.x, (), True, machine, time, readings,
                    how="linkbench")  # fmt: skip


def _timed(data: Mapping[str, Any]) -> Iterator[Timed]:
    yield from _links(data["link"])
    yield from _host_and_disk(data["host"], data["disk"])
    yield from _gemms(data["gemm"])
    yield from _attention(data["attn"])
    us = 1e-6
    yield "launch", {}, data["launch"]["linear_issue_us"] * us, "linear_issue_us"
    yield "sync", {}, data["launch"]["add_plus_sync_us"] * us, "add_plus_sync_us"


def _links(link: Mapping[str, Any]) -> Iterator[Timed]:
    for i, size in enumerate(link["size"]):
        x = {"nbytes": size}
        for way in ("h2d", "d2h"):
            yield way, x, link[f"{way}_lat_us"][i] * 1e-6, f"{way}_lat_us, one pinned copy alone"
            pageable_s = size / (link[f"pageable_{way}"][i] * 1e9)
            yield f"{way}_pageable", x, pageable_s, f"pageable_{way}, blocking copies"
            if size >= 16 * MIB:
                both_s = size / (link[f"bidir_{way}"][i] * 1e9)
                yield f"duplex_{way}", x, both_s, "bidir_h2d and bidir_d2h, streams of copies"
    yield "hbm", {"nbytes": GIB}, 2 * GIB / (link["d2d_rw"] * 1e9), "d2d_rw, read plus write"


def _host_and_disk(host: Mapping[str, Any], disk: Mapping[str, Any]) -> Iterator[Timed]:
    n = host["bytes"]
    yield "host_copy", {"nbytes": n}, n / (host["to_pinned"] * 1e9), "to_pinned"
    most = max(host["threads"], key=int)
    copied_s = n / (host["threads"][most] * 1e9)
    how = f"memcpy by {most} threads, read plus write"
    yield "cpu_read", {"nbytes": 2 * n}, copied_s, how
    keys = n // 4 // (2 * _HALF * 128)  # of one head of 128: as many bytes as were converted
    x = attention_x(1, 1, keys, (1, 1, 128), _HALF)
    seconds = work("cpu_attention", x) / (host["half_to_float"] * 1e9)
    yield "cpu_attention", x, seconds, "half_to_float, conversion alone: an upper bound"
    for size, key in ((MIB, "direct_1t_1M"), (16 * MIB, "direct_1t_16M")):
        seconds = size / (disk[key] * 1e9)
        yield "disk_read", {"nbytes": size}, seconds, "direct_1t_1M and direct_1t_16M, O_DIRECT"
    how = "write_gbs, O_DIRECT and fsync"
    yield "disk_write", {"nbytes": 16 * MIB}, 16 * MIB / (disk["write_gbs"] * 1e9), how


def _gemms(gemm: Mapping[str, Any]) -> Iterator[Timed]:
    for label, rates in gemm["float16"].items():
        k, n = map(int, label.split()[1].split("x"))
        for rows, rate in zip(gemm["tokens"], rates, strict=True):
            x = {"rows": rows, "k": k, "n": n, "elem_bytes": _HALF}
            yield "gemm", x, work("gemm", x) / (rate * 1e12), "gemm, float16"


def _attention(attention: Mapping[str, Any]) -> Iterator[Timed]:
    contexts: Sequence[int] = attention["ctx"]
    for name, heads in _HEADS.items():
        times = attention[name]
        for i, keys in enumerate(contexts):
            x = attention_x(times["decode_batch"][i], 1, keys, heads, _HALF)
            yield "attention_decode", x, times["decode_ms"][i] * 1e-3, "decode_ms, SDPA"
            x = attention_x(times["prefill_batch"][i], keys, keys, heads, _HALF)
            yield "attention_prefill", x, times["prefill_ms"][i] * 1e-3, "prefill_ms, SDPA"
    for label, times in attention["recompute_b16_opt30"].items():
        keys, queries = (int(text.lstrip("ctxnr")) for text in label.split("_"))
        x = attention_x(_WINDOW_BATCH, queries, keys, _HEADS["opt30"], _HALF)
        yield "attention_window", x, times["lower_right_ms"] * 1e-3, "recompute, lower right"
