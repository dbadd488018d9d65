"""Bytes of an op: pieces add up, and each kind moves its own share."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from policies.cost.size import act_elems, nbytes, piece
from policies.placement import Placement, Shares
from policies.plan.op import Kind, Op, Scope
from tests.policies_table import GQA, MLA, OPT

WEIGHTS = Shares(0.25, 0.5, 0.25)
KV = Shares(0.5, 0.25, 0.25)
PLACEMENT = Placement(((WEIGHTS, WEIGHTS),) * 3, (KV,), Shares(0.0, 1.0, 0.0))


@given(st.integers(0, 10**12), st.integers(1, 50))
def test_pieces_add_up(total, n_parts):
    parts = [piece(total, i, n_parts) for i in range(n_parts)]
    assert sum(parts) == total
    assert max(parts) - min(parts) <= 1
    assert piece(total, n_parts, n_parts) == parts[0]  # part numbers of the MLP start there


def test_weights():
    layer = OPT.layer_bytes(1)
    load, read = (Op(kind, 0, 0, 1) for kind in (Kind.LOAD_WEIGHT, Kind.READ_WEIGHT))
    assert nbytes(load, OPT, PLACEMENT) == pytest.approx(0.75 * layer, abs=1)
    assert nbytes(read, OPT, PLACEMENT) == pytest.approx(0.25 * layer, abs=1)
    mlp = replace(load, scope=Scope.MLP)
    assert nbytes(mlp, OPT, PLACEMENT) == pytest.approx(0.75 * OPT.layer_bytes(1, Scope.MLP), abs=1)


@pytest.mark.parametrize(
    ("model", "elems"), [(OPT, 2 * 2048), (GQA, 2 * 2 * 128), (MLA, 512 + 64)], ids=str
)
def test_kv(model, elems):
    def moved(kind: Kind, **fields: int) -> int:
        return nbytes(Op(kind, 0, 1, n_seqs=6, start=10, stop=50, **fields), model, PLACEMENT)

    tokens = 6 * 40
    for kind in (Kind.LOAD_KV, Kind.STORE_KV, Kind.HOST_COPY):
        assert moved(kind) == tokens * elems * 2 * 0.5
        halves = [moved(kind, part=part, n_parts=2) for part in (0, 1)]
        assert sum(halves) == moved(kind)
    for kind in (Kind.READ_KV, Kind.WRITE_KV):
        assert moved(kind) == tokens * elems * 2 * 0.25


def test_activations():
    op = Op(Kind.LOAD_ACT, 0, 1, n_seqs=6, stop=10)
    assert nbytes(op, OPT, PLACEMENT) == 60 * OPT.d_model * 2
    # What crosses for attention on the CPU does so wherever hidden states live.
    here = replace(PLACEMENT, act=Shares(1.0, 0.0, 0.0))
    assert nbytes(op, OPT, here) == 0
    queries = replace(op, kind=Kind.STORE_ACT, scope=Scope.QKV, stop=1)
    assert nbytes(queries, GQA, here) == 6 * 2 * (2048 + 2 * 2 * 128)
    assert act_elems(GQA, Scope.OUTPUT) == 2048


@pytest.mark.parametrize("kind", [Kind.FORWARD, Kind.FENCE])
def test_compute_moves_nothing_over_a_link(kind):
    assert nbytes(Op(kind, 0, 0, 1, n_seqs=4, n_new=9), OPT, PLACEMENT) == 0
