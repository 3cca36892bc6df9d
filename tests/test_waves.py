"""Dealing prompts out to waves: every row once, balanced, and never more than was planned for."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from moegen.graph.build import lay_out
from moegen.graph.shape import Shape
from moegen.graph.sizes import Capacity
from moegen.graph.strategy import Strategy
from moegen.graph.waves import deal, even, room
from moegen.graph.workload import Workload

LENGTHS = st.lists(
    st.one_of(st.integers(1, 40), st.sampled_from([1, 500, 8192])), min_size=1, max_size=40
)


def capacity(s: Strategy, prompts, most) -> Capacity:
    """What the waves of a batch ask for, as the executor lays them out."""
    waves = deal(prompts, most)
    s = s.with_(b_a=waves.part_rows)
    lengths = waves.lengths(prompts).tolist()
    layout = lay_out(s, "prefill", Shape((0,) * len(lengths[0]), tuple(lengths[0])))
    return Capacity.most(Capacity.of("prefill", layout, new, new) for new in lengths)


@settings(max_examples=400, deadline=None)
@given(lengths=LENGTHS, B=st.integers(1, 12), b_a=st.integers(1, 12), batch=st.integers(1, 45))
def test_every_row_has_one_place_and_the_limits_on_rows_hold(lengths, B, b_a, batch):
    s = Strategy(B=B, b_a=b_a, b_e=8)
    most = room(s, Workload.from_lengths(lengths, [1] * len(lengths)), batch)
    for i in range(0, len(lengths), batch):
        rows = lengths[i : i + batch]
        waves = deal(rows, most)
        assert sorted(waves.rows[waves.rows >= 0].tolist()) == list(range(len(rows)))
        assert waves.rows.shape[1] <= B and waves.part_rows <= b_a
        assert (waves.rows[0] >= 0).all() and (waves.rows >= 0).any(axis=1).all()
        # Waves have as many rows but for one.
        assert set((waves.rows < 0).sum(1).tolist()) <= {0, 1}


@settings(max_examples=600, deadline=None)
@given(
    lengths=LENGTHS,
    B=st.integers(1, 12),
    b_a=st.integers(1, 12),
    batch=st.integers(1, 45),
    data=st.data(),
)
def test_no_order_of_rows_asks_for_more_than_the_worst(lengths, B, b_a, batch, data):
    s, work = Strategy(B=B, b_a=b_a, b_e=8), Workload.from_lengths(lengths, [1] * len(lengths))
    worst, most = Capacity.worst(s, work, "prefill", batch), room(s, work, batch)
    order = data.draw(st.permutations(lengths))
    for i in range(0, len(order), batch):
        asked = capacity(s, order[i : i + batch], most)
        assert all(a <= b for a, b in zip(vars(asked).values(), vars(worst).values(), strict=True))
    # With the longest rows in one batch it is just that.
    assert capacity(s, sorted(lengths)[-batch:], most) == worst
    # And a wave of rows that nobody dealt is no less.
    alone = Capacity.worst(s, work, "prefill")
    assert worst.tokens <= alone.tokens and worst.longest == alone.longest


def test_a_batch_by_hand():
    lengths = [1, 100, 7, 30, 50, 9, 60, 3, 2]
    work = Workload.from_lengths(lengths, [1] * 9)
    most = room(Strategy(B=5, b_a=3, b_e=8), work, 9)
    # To waves by rank 100 60 / 30 50 / 9 7 / 2 3 / 1, and those of the first to 100 30 / 2 9 / 1.
    assert deal(lengths, most).lengths(lengths).tolist() == [[100, 2, 1, 30, 9], [60, 3, 0, 50, 7]]
    assert (most.rows, most.tokens, most.part_rows, most.part_tokens) == (5, 142, 3, 103)


def test_rows_that_are_alike_are_dealt_as_they_come():
    most = room(Strategy(B=64, b_a=16, b_e=8), Workload.uniform(1000, 512, 1), 100)
    assert (most.rows, most.tokens) == (50, 50 * 512)
    assert (most.part_rows, most.part_tokens) == (13, 13 * 512)
    assert deal([512] * 100, most).rows.shape == (2, 50)
    assert deal([512] * 30, most).rows.shape == (1, 30)


def test_waves_and_micro_batches_are_near_the_mean():
    random = np.random.default_rng(0)
    lengths = np.exp(random.uniform(np.log(16), np.log(8192), 1000)).astype(int)
    work = Workload.from_lengths(lengths.tolist(), [1] * 1000)
    most = room(Strategy(B=50, b_a=9, b_e=8), work, 1000)
    dealt = deal(lengths, most).lengths(lengths)
    tokens, squares = dealt.sum(1), (dealt.astype(float) ** 2).sum(1)
    assert tokens.max() < 1.01 * tokens.mean()
    assert squares.max() < 1.05 * squares.mean()
    assert most.part_tokens < 1.25 * tokens.mean() / 6
    # In the order they came some waves have half as much again.
    came = lengths.reshape(20, 50).sum(1)
    assert came.max() > 1.3 * came.mean()


def test_the_longest_rows_alone_have_fewer_a_wave():
    lengths = [1000] * 10 + [10] * 90
    most = room(Strategy(B=20, b_a=10, b_e=8), Workload.from_lengths(lengths, [1] * 100), 90)
    assert most.tokens < 3000
    waves = deal([1000] * 10, most)
    assert waves.lengths([1000] * 10).sum(1).max() <= most.tokens
    assert waves.rows.shape[0] == 5


@pytest.mark.parametrize(("n", "parts", "rows"), [(10, 3, [4, 3, 3]), (4, 4, [1] * 4), (5, 1, [5])])
def test_even(n, parts, rows):
    assert even(n, parts) == rows


def test_micro_batches_of_prefill_are_even():
    s = Strategy(B=10, b_a=4, b_e=8)
    assert lay_out(s, "prefill", Shape((0,) * 10, (5,) * 10)).micro_batches == (4, 3, 3)
