"""Packing: every request once, every token counted, the largest batch that fits."""

from __future__ import annotations

import logging
from collections import Counter

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from policies.errors import Infeasible
from policies.spec.workload import Batch, Block, Lengths
from sim.pack import Job, fixed, pack

requests = st.lists(
    st.builds(Lengths, st.integers(1, 300), st.integers(1, 60)), min_size=1, max_size=60
)
caps = st.none() | st.integers(1, 70)


def always(block: Block) -> bool:
    return True


def held_tokens(block: Block) -> int:
    """What a block keeps in memory: every sequence padded, grown to its last token."""
    return sum(b.n_seqs * (b.prompt_len + block.max_new) for b in block.batches)


def run(lengths, n_batches=2, batch_size=None, max_new=None, fits=always, long=10**6, reject=False):
    return pack(lengths, n_batches, batch_size, max_new, fits, long, reject)


def members(job: Job) -> list[Lengths]:
    return [r for block in job.members for batch in block for r in batch]


@given(requests, st.integers(1, 5), st.none() | st.integers(1, 9), caps)
@settings(max_examples=60, deadline=None)
def test_conserves_requests_and_tokens(lengths, n_batches, batch_size, max_new) -> None:
    job = run(lengths, n_batches, batch_size, max_new)
    assert Counter(members(job)) == Counter(lengths)
    assert job.n_requests == len(lengths)
    assert job.prompt_tokens == sum(r.prompt_tokens for r in lengths)
    cap = max_new or 10**9
    assert job.decode_tokens == sum(min(r.response_tokens, cap) - 1 for r in lengths)
    assert job.n_cut == sum(r.response_tokens > cap for r in lengths)
    padding = [
        batch.prompt_len - r.prompt_tokens
        for block, packed in zip(job.blocks, job.members, strict=True)
        for batch, rs in zip(block.batches, packed, strict=True)
        for r in rs
    ]
    assert min(padding) >= 0
    assert job.padded_prompt_tokens == job.prompt_tokens + sum(padding)
    assert 0.0 <= job.padding_waste < 1.0
    assert (job.padding_waste == 0.0) == (sum(padding) == 0)


@given(requests, st.integers(1, 4), caps, st.randoms(use_true_random=False))
@settings(max_examples=40, deadline=None)
def test_order_of_requests_does_not_matter(lengths, n_batches, max_new, shuffler) -> None:
    shuffled = list(lengths)
    shuffler.shuffle(shuffled)
    assert run(lengths, n_batches, None, max_new) == run(shuffled, n_batches, None, max_new)


@given(requests, st.integers(1, 4), st.none() | st.integers(1, 9), caps)
@settings(max_examples=40, deadline=None)
def test_blocks_reveal_padded_lengths_and_max_new_only(lengths, n_batches, size, max_new) -> None:
    job = run(lengths, n_batches, size, max_new)
    for index, (block, packed) in enumerate(zip(job.blocks, job.members, strict=True)):
        longest = max(r.response_tokens for batch in packed for r in batch)
        shape = tuple(Batch(len(b), max(r.prompt_tokens for r in b)) for b in packed)
        assert block == Block(index, shape, min(longest, max_new or longest))
        assert len(block.batches) <= n_batches
    prompts = [b.prompt_len for block in job.blocks for b in block.batches]
    assert prompts == sorted(prompts, reverse=True)
    if size is not None:  # only the last batch may be partial, and only the last block smaller
        sizes = [b.n_seqs for block in job.blocks for b in block.batches]
        assert all(n == size for n in sizes[:-1])
        assert all(len(block.batches) == n_batches for block in job.blocks[:-1])


@given(requests, st.integers(1, 4), caps, st.integers(1, 20_000))
@settings(max_examples=80, deadline=None)
def test_auto_batch_size_is_the_largest_power_of_two_that_fits(
    lengths, n_batches, max_new, capacity
) -> None:
    def fits(block: Block) -> bool:
        return held_tokens(block) <= capacity

    job = run(lengths, n_batches, None, max_new, fits)
    pending = sorted(lengths, key=lambda r: (r.prompt_tokens, r.response_tokens), reverse=True)
    for block in job.blocks:
        powers = [1]
        while n_batches * powers[-1] < len(pending):
            powers.append(2 * powers[-1])
        # Each candidate built by packing just its requests at that size.
        blocks = {p: run(pending[: n_batches * p], n_batches, p, max_new).blocks[0] for p in powers}
        best = max((p for p in powers if fits(blocks[p])), default=1)
        assert block.batches == blocks[best].batches
        pending = pending[block.n_seqs :]
    assert not pending


def test_auto_needs_few_calls_of_fits() -> None:
    calls = 0

    def fits(block: Block) -> bool:
        nonlocal calls
        calls += 1
        return held_tokens(block) <= 4_000

    lengths = [Lengths(1 + 37 * i % 400, 1 + 11 * i % 40) for i in range(2_000)]
    job = run(lengths, 4, None, 32, fits)
    assert len(job.blocks) > 50
    assert calls <= 2.2 * len(job.blocks) + 10


def test_auto_spreads_the_rest_over_the_batches() -> None:
    job = run([Lengths(10, 4)] * 10, n_batches=4)
    assert [b.n_seqs for b in job.blocks[0].batches] == [4, 4, 2]
    assert len(job.blocks) == 1


def test_auto_falls_back_to_one_where_nothing_fits() -> None:
    job = run([Lengths(10, 4)] * 5, n_batches=2, fits=lambda block: False)
    assert [[b.n_seqs for b in block.batches] for block in job.blocks] == [[1, 1], [1, 1], [1]]


def test_cap_and_cut_by_hand() -> None:
    lengths = [Lengths(8, 1), Lengths(5, 40), Lengths(9, 33), Lengths(2, 7)]
    job = run(lengths, n_batches=1, batch_size=2, max_new=32)
    assert [(b.batches, b.max_new) for b in job.blocks] == [
        ((Batch(2, 9),), 32),  # 9 and 8; 33 is cut
        ((Batch(2, 5),), 32),  # 5 and 2; 40 is cut
    ]
    assert (job.cap, job.n_cut) == (32, 2)
    assert job.decode_tokens == 0 + 31 + 31 + 6
    assert (job.prompt_tokens, job.padded_prompt_tokens) == (24, 28)
    assert job.padding_waste == pytest.approx(4 / 28)


def test_long_requests_are_counted_logged_once_and_kept(caplog: pytest.LogCaptureFixture) -> None:
    # 90 + 11 - 1 = 100 positions fit exactly: the last token is never fed back.
    lengths = [Lengths(90, 11), Lengths(90, 12), Lengths(101, 1), Lengths(5, 500)]
    with caplog.at_level(logging.WARNING):
        job = run(lengths, max_new=20, long=100)
    assert (job.n_too_long, job.n_rejected, job.n_requests) == (2, 0, 4)
    assert [r.levelname for r in caplog.records] == ["WARNING"]
    assert "2 of 4 requests exceed the model's 100 positions" in caplog.text


def test_long_requests_are_rejected_on_request() -> None:
    lengths = [Lengths(90, 11), Lengths(90, 12), Lengths(101, 1)]
    job = run(lengths, long=100, reject=True)
    assert (job.n_too_long, job.n_rejected) == (2, 2)
    assert members(job) == [Lengths(90, 11)]


def test_all_rejected_is_infeasible() -> None:
    with pytest.raises(Infeasible, match=r"all 2 requests exceed the model's 8 positions .* 10"):
        run([Lengths(10, 1), Lengths(20, 4)], long=8, reject=True)


def test_fixed() -> None:
    job = fixed(n_batches=3, batch_size=4, prompt_len=128, gen_len=32)
    assert job.blocks == (Block(0, (Batch(4, 128),) * 3, 32),)
    assert (job.n_requests, job.n_cut, job.n_rejected, job.cap) == (12, 0, 0, None)
    assert (job.prompt_tokens, job.decode_tokens) == (12 * 128, 12 * 31)
    assert job.padding_waste == 0.0


@pytest.mark.parametrize("name", ["n_batches", "batch_size", "prompt_len", "gen_len"])
def test_fixed_names_the_bad_field(name: str) -> None:
    values = {"n_batches": 1, "batch_size": 1, "prompt_len": 1, "gen_len": 1, name: 0}
    with pytest.raises(ValueError, match=f"^{name}: 0 must be >= 1"):
        fixed(**values)


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"n_batches": 0}, "n_batches: 0"),
        ({"batch_size": 0}, "batch_size: 0"),
        ({"max_new": 0}, "max_new: 0"),
        ({"long": 0}, "max_positions: 0"),
    ],
)
def test_pack_names_the_bad_field(values, message) -> None:
    with pytest.raises(ValueError, match=message):
        run([Lengths(1, 1)], **values)


def test_no_requests() -> None:
    with pytest.raises(ValueError, match="lengths: is empty"):
        run([])


def test_job_refuses_members_that_do_not_make_its_batches() -> None:
    block = Block(0, (Batch(1, 9),), 4)
    with pytest.raises(ValueError, match="do not make"):
        Job((block,), (((Lengths(8, 4),),),), None)
