"""Amounts to measure at: for a GPU, for a CPU that plays one, and for a smoke test.

Grids are log-spaced: a rate changes over decades of size, not over bytes. What readers get wrong:
shapes are those of the engine's matrices (QKV in one, gate and up in one), since a rate depends on
the shape of a GEMM and not only on its FLOPs.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass

KIB, MIB, GIB = 2**10, 2**20, 2**30

Heads = tuple[int, int, int]  # query heads, KV heads, head dimension


@dataclass(frozen=True, slots=True)
class Preset:
    """Amounts per group; ``held_*`` are the held-out ones. Sizes in bytes.

    ``rotate_bytes``: operands are cycled through at least this much memory, so that no cache holds
    them. ``pageable_bytes``: copies of pageable memory come from all over this much of it, because
    their rate depends on where a page lies. Windows have no more queries than keys.
    """

    elem_bytes: int
    rotate_bytes: int
    pageable_bytes: int
    link_bytes: tuple[int, ...]
    held_link_bytes: tuple[int, ...]
    duplex_bytes: tuple[int, ...]
    disk_bytes: tuple[int, ...]
    held_disk_bytes: tuple[int, ...]
    disk_file_bytes: int
    hbm_bytes: tuple[int, ...]
    rows: tuple[int, ...]
    gemm_shapes: tuple[tuple[int, int], ...]
    held_rows: tuple[int, ...]
    held_gemm_shapes: tuple[tuple[int, int], ...]
    heads: tuple[Heads, ...]
    held_heads: Heads
    decode_contexts: tuple[int, ...]
    decode_batches: tuple[int, ...]
    held_decode: tuple[tuple[int, int], ...]  # (context, batch)
    prefill_contexts: tuple[int, ...]
    prefill_tokens: int
    held_prefill: tuple[int, ...]
    window_queries: tuple[int, ...]
    window_contexts: tuple[int, ...]
    window_batch: int
    held_window: tuple[tuple[int, int], ...]  # (queries, context)
    unfused_contexts: tuple[int, ...]
    unfused_batches: tuple[int, ...]
    unfused_tokens: int  # of a prefill
    held_unfused: tuple[tuple[int, int, int], ...]  # (batch, queries, context)
    norm_width: int
    pass_rows: tuple[int, ...]  # of norms and of keys to be rotated
    elementwise: tuple[tuple[int, int, int], ...]  # (rows, d_model, d_ffn)
    cpu_attention: tuple[tuple[int, int], ...]  # (context, batch)
    cpu_read_bytes: tuple[int, ...]


def _powers(first: int, last: int, factor: int = 2) -> tuple[int, ...]:
    return tuple(first * factor**i for i in range(round(math.log(last / first, factor)) + 1))


# Weights as the engine multiplies them: QKV in one, gate and up in one.
_OPT_30B = ((7168, 21504), (7168, 7168), (7168, 28672), (28672, 7168))
_LLAMA_70B = ((8192, 10240), (8192, 8192), (8192, 57344), (28672, 8192))
_THIRTEEN_B = ((5120, 15360), (5120, 20480), (13824, 5120))

FULL = Preset(
    elem_bytes=2,
    rotate_bytes=256 * MIB,
    pageable_bytes=16 * GIB,
    link_bytes=_powers(64 * KIB, GIB, 4),
    held_link_bytes=(3 * MIB, 48 * MIB, 400 * MIB),
    duplex_bytes=(16 * MIB, 64 * MIB, 256 * MIB),
    disk_bytes=(MIB, 16 * MIB, 64 * MIB, 256 * MIB),
    held_disk_bytes=(48 * MIB, 160 * MIB),
    disk_file_bytes=2 * GIB,
    hbm_bytes=(64 * MIB, 256 * MIB, GIB),
    rows=_powers(1, 32768),
    gemm_shapes=_OPT_30B + _LLAMA_70B,
    held_rows=(3, 48, 768, 6000),
    held_gemm_shapes=_THIRTEEN_B,
    heads=((56, 56, 128), (64, 8, 128)),
    held_heads=(40, 40, 128),
    decode_contexts=_powers(128, 16384),
    decode_batches=(1, 4, 16),
    held_decode=((384, 16), (1536, 8), (5000, 16)),
    prefill_contexts=_powers(128, 8192),
    prefill_tokens=16384,
    held_prefill=(768, 3000),
    # A kernel works on tiles of 64 or 128 queries and keys. A full tile is as fast as it gets, one
    # query more takes another tile: both are measured where it matters. No context fills its tiles.
    window_queries=(16, 64, 128, 136, 192, 256, 264, 384, 392, 512, 704, 1088, 2112, 4160),
    window_contexts=(500, 1000, 2000, 4000, 8010, 16010),
    window_batch=16,
    held_window=((100, 1500), (147, 1027), (248, 515), (300, 2050), (400, 3000), (1500, 6000)),
    unfused_contexts=_powers(128, 4096),
    unfused_batches=(4, 16),
    unfused_tokens=8192,
    held_unfused=((16, 1, 1536), (16, 1, 2050), (8, 768, 768), (2, 3000, 3000), (4, 256, 1504)),
    norm_width=7168,
    pass_rows=_powers(16, 65536, 4),
    elementwise=((64, 5120, 13824), (2048, 5120, 13824), (12288, 5120, 13824)),
    cpu_attention=((512, 4), (2048, 4), (512, 16)),
    cpu_read_bytes=(256 * MIB, GIB),
)

SMALL = Preset(
    elem_bytes=4,
    rotate_bytes=64 * MIB,
    pageable_bytes=256 * MIB,
    link_bytes=_powers(64 * KIB, 64 * MIB, 4),
    held_link_bytes=(3 * MIB, 24 * MIB),
    duplex_bytes=(4 * MIB, 16 * MIB),
    disk_bytes=(MIB, 4 * MIB, 16 * MIB),
    held_disk_bytes=(8 * MIB,),
    disk_file_bytes=64 * MIB,
    hbm_bytes=(16 * MIB, 64 * MIB),
    rows=_powers(1, 512),
    gemm_shapes=((512, 1536), (512, 512), (512, 2048), (2048, 512)),
    held_rows=(3, 48, 300),
    held_gemm_shapes=((768, 2304), (768, 768)),
    heads=((8, 8, 64), (8, 2, 64)),
    held_heads=(12, 12, 64),
    decode_contexts=_powers(64, 2048),
    decode_batches=(1, 4),
    held_decode=((96, 4), (700, 4)),
    prefill_contexts=_powers(64, 1024),
    prefill_tokens=1024,
    held_prefill=(192, 384),
    window_queries=(8, 32, 64, 256),
    window_contexts=_powers(128, 1024),
    window_batch=4,
    held_window=((24, 200), (48, 400)),
    unfused_contexts=_powers(64, 1024),
    unfused_batches=(4,),
    unfused_tokens=1024,
    held_unfused=((4, 1, 400), (2, 192, 192), (2, 64, 400)),
    norm_width=512,
    pass_rows=(16, 128, 1024),
    elementwise=((16, 768, 2048), (512, 768, 2048)),
    cpu_attention=((128, 4), (512, 4)),
    cpu_read_bytes=(64 * MIB,),
)

TINY = Preset(
    elem_bytes=4,
    rotate_bytes=MIB,
    pageable_bytes=8 * MIB,
    link_bytes=(256 * KIB, MIB, 4 * MIB),
    held_link_bytes=(3 * MIB,),
    duplex_bytes=(4 * MIB,),
    disk_bytes=(256 * KIB, MIB),
    held_disk_bytes=(512 * KIB,),
    disk_file_bytes=4 * MIB,
    hbm_bytes=(4 * MIB,),
    rows=(1, 8, 64),
    gemm_shapes=((128, 256), (256, 128)),
    held_rows=(24,),
    held_gemm_shapes=((192, 192),),
    heads=((4, 4, 32),),
    held_heads=(6, 6, 32),
    decode_contexts=(64, 256, 512),
    decode_batches=(2,),
    held_decode=((128, 2),),
    prefill_contexts=(64, 128, 256),
    prefill_tokens=256,
    held_prefill=(96,),
    window_queries=(8, 32, 128),
    window_contexts=(64, 256),
    window_batch=2,
    held_window=((16, 128),),
    unfused_contexts=(64, 256),
    unfused_batches=(2,),
    unfused_tokens=256,
    held_unfused=((2, 1, 128), (2, 32, 128)),
    norm_width=128,
    pass_rows=(8, 64),
    elementwise=((64, 128, 512),),
    cpu_attention=((64, 2),),
    cpu_read_bytes=(4 * MIB,),
)

PRESETS: Mapping[str, Preset] = {"full": FULL, "small": SMALL, "tiny": TINY}
