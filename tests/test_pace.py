"""How long a run may still take, worked out by hand."""

from __future__ import annotations

from types import SimpleNamespace

import pytest

import moegen as mg
from moegen.graph.requests import Request
from moegen.jobs import Job, Pace

# Two batches of two rows; prompts of 10 tokens.
LIMITS = [5, 9, 3, 4]


@pytest.fixture
def pace():
    job = Job([Request(f"r{i}", prompt="x") for i in range(4)], [[7] * 10] * 4, LIMITS, [])
    s = mg.Strategy(B=2, b_a=1, b_e=1)
    expected = SimpleNamespace(prefill_s=8.0, decode_s=22.0, decode_steps=11)
    return Pace(job, mg.Plan(prefill=s, decode=s), expected)


def _step(phase, rows, tokens_done, prefill_s, decode_s):
    return SimpleNamespace(
        phase=phase,
        rows=rows,
        tokens_done=tokens_done,
        prefill_s=prefill_s,
        decode_s=decode_s,
    )


def _row(i, tokens):
    return {"id": f"r{i}", "text": "", "completion_tokens": tokens}


def test_before_anything_was_measured_the_estimate_stands(pace):
    # Prefill gives each row its first token: 8 and 3 steps remain, at 2 s each.
    assert pace.left_s == pytest.approx(8.0 + 11 * 2.0)
    assert (pace.rows, pace.tokens) == (4, 21)


def test_a_phase_goes_at_its_own_speed_once_it_is_measured(pace):
    pace.on_step(_step("prefill", 2, 2, 1.0, 0.0))
    assert pace.left_s == pytest.approx(1.0 + 11 * 2.0)  # half of the prompts took 1 s
    assert pace.tokens_per_s == pytest.approx(20.0)
    pace.on_step(_step("decode", 2, 4, 1.0, 0.5))
    assert pace.left_s == pytest.approx(1.0 + 10 * 0.5)
    assert pace.tokens_per_s == pytest.approx(4.0)
    assert str(pace) == "0/4 rows, 4/21 tokens, 4.0 tokens/s, 6 s left"


def test_a_row_that_ends_early_takes_its_share_out(pace):
    pace.on_step(_step("prefill", 2, 2, 1.0, 0.0))
    pace.on_step(_step("decode", 2, 4, 1.0, 1.0))
    pace.on_row(_row(1, 3))  # 6 of its 9 tokens will not come
    assert (pace.rows_done, pace.tokens) == (1, 15)
    pace.on_step(_step("decode", 2, 6, 1.0, 2.0))
    # Of the first batch r0 has 3 of 5 tokens; then 10 prompts' half and 3 steps.
    assert pace.left_s == pytest.approx(1.0 + (2 + 3) * 1.0)


def test_the_next_batch_begins_with_its_prefill(pace):
    pace.on_step(_step("prefill", 2, 2, 1.0, 0.0))
    for i in range(8):
        pace.on_step(_step("decode", 2, 4 + i, 1.0, 1.0 + i))
    pace.on_row(_row(0, 5))
    pace.on_row(_row(1, 9))
    assert pace.left_s == pytest.approx(1.0 + 3 * 1.0)
    pace.on_step(_step("prefill", 2, 16, 3.0, 8.0))
    assert pace.left_s == pytest.approx(3 * 1.0)
    for i in range(3):
        pace.on_step(_step("decode", 2 - (i == 2), 18 + i, 3.0, 9.0 + i))
    pace.on_row(_row(2, 3))
    pace.on_row(_row(3, 4))
    assert pace.left_s == 0.0 and pace.rows_done == 4


def test_a_row_that_took_part_in_no_step_counts_for_nothing(pace):
    pace.on_row({"id": "elsewhere", "error": "the prompt is empty"})
    assert (pace.rows_done, pace.tokens) == (0, 21)
    pace.on_row(_row(0, 5))
    pace.on_row(_row(0, 5))
    assert pace.rows_done == 1
