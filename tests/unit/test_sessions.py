"""Turns out of traces, and how they arrive."""

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from sim.arrivals import Arrivals
from sim.sessions import load_sessions
from tests.serving_table import backlog, conversations, singles

CHAT = """conversation_id,turn_index,prompt_tokens,response_tokens,cached_prefix_tokens
0,0,10,20,0
0,1,5,0,30
1,0,7,9,0
0,2,1,50,35
"""


@pytest.fixture
def chat(tmp_path):
    path = tmp_path / "chat.csv"
    path.write_text(CHAT)
    return str(path)


def test_conversations_are_chained(chat):
    sessions = load_sessions("path", path=chat)
    assert [t.index for t in sessions.heads] == [0, 2]
    chain = [t.next_turn.index if t.next_turn else None for t in sessions.turns]
    assert chain == [1, 3, None, None]
    assert [t.n_prompt for t in sessions.turns] == [11, 6, 8, 2]  # the BOS token
    assert [t.n_response for t in sessions.turns] == [20, 1, 9, 50]  # none of 0
    assert [t.n_history for t in sessions.turns] == [0, 30, 0, 35]
    assert not sessions.timed
    assert sessions.turns_per_head == 2.0


def test_seedfit_counts_earlier_responses_more(chat):
    turns = load_sessions("path", path=chat, history="seedfit").turns
    assert [t.n_history for t in turns] == [0, 54, 0, 59]  # + 1.2 * 20
    assert [t.n_response for t in turns] == [44, 2, 20, 110]


def test_documents_need_no_seedfit():
    plain, fitted = (load_sessions("finqa", limit=9, history=h) for h in ("trace", "seedfit"))
    assert [t.n_history for t in plain.turns] == [t.n_history for t in fitted.turns]


def test_cut_limit_and_groups(chat):
    sessions = load_sessions("path", path=chat, max_new=15, limit=3, n_groups=2)
    assert (sessions.n_cut, len(sessions.turns)) == (1, 3)
    assert [t.group for t in sessions.turns] == [0, 0, 1]
    assert sessions.turns[1].next_turn is None


def test_documents_stand_alone_and_share_their_key():
    sessions = load_sessions("narrativeqa", limit=60)
    assert len(sessions.heads) == 60
    first, second = sessions.turns[:2]
    assert first.key == second.key
    assert first.is_document
    assert len({t.key for t in sessions.turns}) > 1


def test_hashes_fix_the_block_size(tmp_path):
    path = tmp_path / "m.parquet"
    pq.write_table(
        pa.table({
            "arrival_ms": [0, 1500],
            "prompt_tokens": [1100, 600],
            "response_tokens": [5, 5],
            "cached_prefix_tokens": [0, 512],
            "hash_ids": [[1, 2, 3], [1, 9, 10]],
        }),
        path,
    )  # fmt: skip
    sessions = load_sessions("path", path=str(path))
    assert (sessions.block_tokens, sessions.timed) == (512, True)
    assert sessions.turns[1].arrival_s == 1.5
    assert sessions.turns[0].blocks(1100, 512) == ((1, 1), (2, 1))
    run = backlog(sessions, source="lru", mode="trace", budget_tokens=8192)
    assert run.requests.column("n_cached").tolist() == [0.0, 512.0]
    with pytest.raises(ValueError, match="block_tokens: 256 must be 512"):
        backlog(sessions, source="lru", mode="trace", block_tokens=256)


def test_unknown_reuse_is_counted(tmp_path):
    path = tmp_path / "a.csv"
    path.write_text("prompt_tokens,response_tokens,cached_prefix_tokens\n5,5,\n6,6,\n")
    sessions = load_sessions("path", path=str(path))
    assert sessions.n_unknown_prefix == 2
    assert [t.n_history for t in sessions.turns] == [0, 0]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"source": "nothing"}, "workload.source: 'nothing'"),
        ({"source": "sharegpt", "history": "guess"}, "serve.history: 'guess'"),
        ({"source": "translation", "history": "seedfit"}, "no column conversation_id"),
        ({"source": "sharegpt", "limit": 0}, "serve.limit: 0"),
        ({"source": "sharegpt", "n_groups": 0}, "serve.n_groups: 0"),
        ({"source": "path", "path": "missing.csv"}, "does not exist"),
    ],
)
def test_bad_input_is_named(arguments, message):
    with pytest.raises(ValueError, match=message):
        load_sessions(**arguments)


# ---- arrivals ----------------------------------------------------------------------------


def arrivals_of(run):
    order = np.argsort(run.requests.column("request"))
    return run.requests.column("arrival_s")[order]


def test_poisson_rate_is_of_requests():
    rows = [[(5, 2)] * 4 for _ in range(400)]
    run = backlog(conversations(rows), mode="poisson", max_seqs=64)
    starts = np.sort(arrivals_of(run)[::4])
    assert np.mean(np.diff(starts)) == pytest.approx(4 / 50.0, rel=0.15)  # 50 requests/s, 4 turns


def test_open_arrivals_do_not_wait_for_earlier_turns():
    rows = [[(5, 60)] * 10 for _ in range(40)]
    run = backlog(conversations(rows), mode="open", max_seqs=1)
    assert np.mean(np.diff(arrivals_of(run))) == pytest.approx(1 / 50.0, rel=0.15)
    assert (np.diff(arrivals_of(run)) > 0).all()


def test_trace_times_are_kept_whatever_happens():
    run = backlog(singles([(0, 900, 60)] * 5), mode="trace", max_seqs=1)
    assert arrivals_of(run).tolist() == pytest.approx([0.0, 0.1, 0.2, 0.3, 0.4])


def test_closed_loop_keeps_its_clients():
    run = backlog(conversations([[(50, 5)] * 3 for _ in range(9)]), mode="closed")
    starts, ends = run.requests.column("arrival_s"), run.requests.column("end_s")
    at_once = [((starts <= t) & (t < ends)).sum() for t in starts]
    assert max(at_once) <= 3
    assert run.requests.n_rows == 27


def test_trace_arrivals_need_times(chat):
    with pytest.raises(ValueError, match="arrival_ms"):
        backlog(load_sessions("path", path=chat), mode="trace")


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"mode": "never"}, "serve.arrivals: 'never'"),
        ({"rate": 0.0}, "serve.rate: 0"),
        ({"think_s": -1.0}, "serve.think_s: -1"),
        ({"n_clients": 0}, "serve.n_clients: 0"),
    ],
)
def test_bad_arrivals_are_named(values, message):
    with pytest.raises(ValueError, match=message):
        Arrivals(**values)
