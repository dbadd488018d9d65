"""Arena, disk file, sizes and layouts of the engine."""

from __future__ import annotations

import itertools
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from policies.cost.size import piece
from policies.errors import OutOfMemory
from policies.flexgen import FlexGen
from policies.placement import ON_GPU, ON_HOST, Placement, Shares
from policies.plan.op import Scope, Tier
from real.arena import HostArena
from real.disk import PAGE_BYTES, DiskStore, staging_bytes
from real.geometry import Blob, padded
from real.layout import layout_of
from real.memory import Need, check_free
from real.transfers import cut, pair
from tests.lossless.engine import FAMILIES, OPT, UNIFORM, run

# ---- arena ------------------------------------------------------------------------------------


def test_an_arena_books_whole_pages_and_no_more() -> None:
    arena = HostArena(pinned=False)
    tensors = arena.allocate({"a": 1, "b": 3 * PAGE_BYTES, "none": 0})
    assert {name: t.numel() for name, t in tensors.items()} == {"a": 1, "b": 3 * PAGE_BYTES}
    assert arena.booked_bytes == arena.locked_bytes == 4 * PAGE_BYTES
    assert all(t.data_ptr() % PAGE_BYTES == 0 for t in tensors.values())
    tensors["a"].fill_(7)
    assert int(tensors["b"].sum()) == 0
    arena.close()
    assert arena.locked_bytes == 0


def test_memory_that_is_large_enough_is_used_again() -> None:
    arena = HostArena(pinned=False)
    first = arena.allocate({"a": 5 * PAGE_BYTES, "b": PAGE_BYTES})
    addresses = {t.data_ptr() for t in first.values()}
    second = arena.allocate({"c": PAGE_BYTES, "d": 5 * PAGE_BYTES})
    assert {t.data_ptr() for t in second.values()} == addresses
    arena.allocate({"e": 7 * PAGE_BYTES})
    assert arena.locked_bytes == 7 * PAGE_BYTES


# ---- disk -------------------------------------------------------------------------------------


def test_ranges_that_start_anywhere_survive_the_disk(tmp_path: Path) -> None:
    store = DiskStore(tmp_path, "file")
    store.create({"first": 100, "data": 5 * PAGE_BYTES})
    truth = torch.zeros(5 * PAGE_BYTES, dtype=torch.uint8)
    draw = torch.Generator().manual_seed(0)
    arena = HostArena(pinned=False)
    for start, length in [(0, 5 * PAGE_BYTES), (10, 20), (4090, 12), (4095, 4098), (1, 12000)]:
        memory = arena.allocate({"staging": staging_bytes(length)})["staging"]
        data = torch.randint(0, 256, (length,), dtype=torch.uint8, generator=draw)
        store.staged("data", start, length, memory).copy_(data)
        store.writer("data", start, length, memory)()
        truth[start : start + length] = data
    for start, length in itertools.product((0, 1, 4095, 4096, 8000), (1, 4096, 9000)):
        memory = arena.allocate({"staging": staging_bytes(length)})["staging"]
        store.reader("data", start, length, memory)()
        read = store.staged("data", start, length, memory)
        assert torch.equal(read, truth[start : start + length])
    store.close()
    assert list(tmp_path.iterdir()) == []


def test_a_folder_that_is_none_is_named(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"disk folder .*nowhere"):
        DiskStore(tmp_path / "nowhere", "file").create({"a": 1})


# ---- sizes ------------------------------------------------------------------------------------


@pytest.mark.parametrize(("total", "disk"), [(1000, 0), (1000, 1000), (1003, 17), (997, 501)])
@pytest.mark.parametrize("n_parts", [1, 2, 7, 16])
def test_pieces_cover_a_blob_and_have_the_plans_bytes(total: int, disk: int, n_parts: int) -> None:
    blob = Blob(total, disk)
    covered: list[int] = []
    for part in range(n_parts):
        on_disk, on_host = blob.pieces(part, n_parts)
        assert on_disk[1] - on_disk[0] == piece(disk, part, n_parts)
        both = on_disk[1] - on_disk[0] + on_host[1] - on_host[0]
        assert both == piece(total, part, n_parts)
        covered += [*range(*on_disk), *range(*on_host)]
    assert sorted(covered) == list(range(total))


def test_copies_are_cut_where_either_side_is() -> None:
    a, b = torch.arange(10), torch.arange(100, 107)
    out = [torch.empty(4, dtype=torch.int64), torch.empty(13, dtype=torch.int64)]
    pairs = pair(out, [a, b])
    assert [t.numel() for t, _ in pairs] == [4, 6, 7]
    for target, source in pairs:
        target.copy_(source)
    assert torch.equal(torch.cat(out), torch.cat([a, b]))
    assert [s.tolist() for s in cut([a, b], 8, 12)] == [[8, 9], [100, 101]]
    with pytest.raises(ValueError, match="17 bytes do not fit a target of 4"):
        pair(out[:1], [a, b])


# ---- layouts ----------------------------------------------------------------------------------


def placed(attention: Shares, mlp: Shares) -> Placement:
    return Placement(((attention, mlp),) * OPT.n_layers, (ON_HOST,))


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("scope", [Scope.LAYER, Scope.ATTENTION, Scope.MLP])
def test_a_streamed_layer_is_its_blob(family: str, scope: Scope) -> None:
    model = FAMILIES[family]
    layout = layout_of(model, placed(ON_HOST, ON_HOST), 0, scope)
    assert layout.streamed_elems == model.layer_params(0, scope)
    assert not layout.resident
    ends = sorted((extent.offset, extent.end) for extent in layout.streamed.values())
    assert all(a[1] == b[0] for a, b in itertools.pairwise(ends))
    assert not layout_of(model, placed(ON_GPU, ON_GPU), 0, scope).streamed


def test_a_share_that_cuts_a_matrix_is_refused() -> None:
    with pytest.raises(ValueError, match=r"placement.weights\[0\]: a share 0.3 .* cuts a matrix"):
        layout_of(OPT, placed(Shares(0.3, 0.7, 0.0), ON_HOST), 0, Scope.LAYER)


# ---- what does not fit ------------------------------------------------------------------------


def test_an_overflow_names_tier_and_what_shrinks_it() -> None:
    wanted = [Need("KV", Tier.HOST, 80), Need("weights", Tier.HOST, 30), Need("KV", Tier.GPU, 5)]
    check_free(wanted, {Tier.GPU: 5, Tier.HOST: 110, Tier.DISK: 0})
    with pytest.raises(OutOfMemory, match=r"host memory: .*KV; smaller with a smaller batch_size"):
        check_free(wanted, {Tier.GPU: 5, Tier.HOST: 109, Tier.DISK: 0})
    with pytest.raises(OutOfMemory, match="gpu memory"):
        check_free(wanted, {Tier.GPU: 4, Tier.HOST: 0, Tier.DISK: 0})


def test_the_plan_of_a_run_is_what_it_allocates() -> None:
    outcome = run(OPT, UNIFORM, FlexGen(kv_pinned=True, attention="fused"), keep=True)
    backend = outcome.backend
    held = backend._buffers
    assert held is not None
    on_host = sum(n.nbytes for n in backend.wanted if n.tier is Tier.HOST)
    assert on_host == backend.arenas.pinned.booked_bytes + backend.arenas.pageable.booked_bytes
    slots = {t.data_ptr(): t.numel() for s, t in held.slots.items() if s.tier is Tier.GPU}
    slot_needs = ("weight slots", "KV slots", "hidden states")
    planned = sum(n.nbytes for n in backend.wanted if n.tier is Tier.GPU and n.name in slot_needs)
    assert planned <= sum(slots.values()) <= planned + 256 * len(slots)
    blob = OPT.layer_params(0) * 8
    assert sum(padded(t.numel()) for t in held.weights.host.values()) >= blob * OPT.n_layers
    backend.close()
    backend.arenas.close()


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"n_experts": 4, "top_k": 1, "d_expert": 8, "gated_ffn": True, "linear_bias": False},
         "model.n_experts: 4 is not supported"),
        ({"qk_norm": True}, "model.qk_norm: True is not supported"),
        ({"max_positions": 8}, "a sequence of 9 tokens exceeds model.max_positions 8"),
    ],
)  # fmt: skip
def test_models_without_a_forward_are_refused(changes: dict[str, object], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        run(replace(OPT, **changes), UNIFORM, FlexGen())  # type: ignore[arg-type]
