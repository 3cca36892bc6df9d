"""What an answer of what_if() says of itself: whether it fits, and what the replay left out."""

from __future__ import annotations

import math

import matplotlib
import pytest
from small_models import mixtral
from test_whatif import C2, S, as_measured, by_hand

import moegen as mg
from moegen.errors import Infeasible
from moegen.graph.run_memory import run_ledger
from moegen.graph.shape import Shape
from moegen.sim.cost import CostModel

matplotlib.use("agg")
LENGTHS = [5 + 7 * (i % 5) for i in range(24)]
ROOF = CostModel.roofline(C2)


def run_on(cost: CostModel = ROOF, phase: str = "decode"):
    g = mg.build(mixtral(), S, phase, lengths=LENGTHS)
    return as_measured(mg.simulate(g, cost, steps=3))


def test_rows_count_at_the_longest_that_they_were():
    g = mg.build(mixtral(), S, "decode", lengths=LENGTHS)
    shapes = [Shape(tuple(n + k for n in LENGTHS), (1,) * 24) for k in range(3)]
    rows = tuple((n + 2, 1, LENGTHS.count(n)) for n in sorted(set(LENGTHS)))
    for given, work in (
        (shapes, mg.Workload(rows)),
        ([], mg.Workload(tuple((n - 2, 1, count) for n, _, count in rows))),
    ):
        ledger = run_ledger(g, given, C2)
        assert ledger is not None
        assert ledger.to_dict() == mg.memory(mixtral(), C2, S, work).to_dict()
    (store,) = (line for line in ledger.host.lines if line.name == "KV store")
    assert store.bytes == (sum(LENGTHS) + 24) * mixtral().kv_bytes_per_token


def test_of_a_prompt_every_token_is_one():
    g = mg.build(mixtral(), S, "prefill", lengths=LENGTHS)
    work = mg.Workload(tuple((n, 1, LENGTHS.count(n)) for n in set(LENGTHS)))
    ledger = run_ledger(g, [], C2)
    assert ledger is not None
    assert ledger.to_dict() == mg.memory(mixtral(), C2, S, work, phase="prefill").to_dict()


def test_slots_that_cut_micro_batches_hold_no_more():
    g = mg.build(mixtral(), S.with_(b_a=24), "decode", lengths=[9] * 24, kv_slot_tokens=60)
    ledger = run_ledger(g, [], C2)
    assert ledger is not None
    alike = mg.memory(mixtral(), C2, S.with_(b_a=6), mg.Workload.uniform(24, 9, 1))
    assert ledger.to_dict() == alike.to_dict()


def tight(spare: int = 2**14) -> CostModel:
    """A machine with so many bytes to spare of each memory beside the run at omega 0.5."""
    ledger = mg.what_if(run_on(), ROOF, omega=0.5).ledger
    assert ledger is not None and ledger.fits
    sizes = {
        "host_memory_bytes": ledger.host.total_bytes + spare,
        "gpu_memory_bytes": ledger.gpu.total_bytes + spare,
    }
    return CostModel.roofline(C2.with_(**sizes))


@pytest.mark.parametrize(
    ("change", "where"), [({"B": "x20"}, "host"), ({"s_params": "100kB"}, "gpu")]
)
def test_a_change_that_does_not_fit_says_so(change, where):
    fits = mg.what_if(run_on(), tight(), omega=0.5)
    assert fits.misfit == "" and "fit" not in str(fits)
    told = mg.what_if(run_on(), tight(), **change)
    with pytest.raises(Infeasible) as refused:
        told.ledger.require()
    assert refused.value.line == where
    assert told.misfit == str(refused.value).partition(";")[0]
    assert told.misfit.startswith(f"does not fit {where} memory: needs ")
    assert str(told).endswith(f"; {told.misfit}")
    assert told.period_s > 0  # it is answered all the same


def test_where_the_run_itself_does_not_fit_that_is_said_too():
    small = CostModel.roofline(C2.with_(host_memory_bytes=2**17))
    told = mg.what_if(run_on(), small, omega="+0.25")
    assert "of 128.00 KiB" in told.misfit
    assert told.misfit.endswith("(by c2's memory the run as it was does not fit either)")


def test_memory_that_nobody_knows_is_not_spoken_of():
    fixed = CostModel.fixed({t.id.op: 1e-3 for t in run_on().graph})
    told = mg.what_if(run_on(fixed), fixed, B="x20")
    assert told.ledger is None and told.misfit == ""
    # Rates and ops change nothing in memory.
    assert mg.what_if(run_on(), ROOF, link="x2").ledger is None


def slow_between_tasks():
    """Copies of 2 s with 1 s of nothing before each: 3 s a step, of which a replay explains 2."""
    run = by_hand([2.0] * 5, [1.0] * 5)
    late = [float(i.step) for i in run.ids]
    return mg.Timeline(run.graph, run.ids, run.start_s + late, run.end_s + late, source="measured")


def test_what_the_replay_leaves_out_is_said():
    real = slow_between_tasks()
    told = mg.what_if(real, ROOF, link="x2")
    assert (told.measured_s, round(told.base_s, 9)) == (3.0, 2.0)
    said = "link twice as fast: 2.00 s -> 1.00 s a step, -50% time, +100% tokens/s"
    said += "; measured 3.00 s, replayed 2.00 s, -33%"
    # So much of a step that the answer is none.
    doubt = "replayed, a step takes 33% less than it did, which no answer has in it"
    assert told.doubt == doubt
    said += f"; not to be trusted: {doubt}"
    assert str(told) == said and repr(told) == f"<WhatIf {said}>"
    assert mg.what_ifs(real, ROOF, [{"link": "x2"}])["doubt"].tolist() == [doubt]
    title = mg.plot.what_ifs(mg.what_ifs(real, ROOF, [{"link": "x2"}])).get_title("left")
    assert title == "What changes would do to a step of 2.00 s, measured 3.00 s: not to be trusted"
    same = mg.what_ifs(by_hand([2.0] * 4, [1.0] * 4), ROOF, [{"link": "x2"}])
    assert mg.plot.what_ifs(same).get_title("left").endswith("a step of 2.00 s")


def test_the_frame_and_its_picture_name_what_does_not_fit():
    df = mg.what_ifs(run_on(), tight(), [{"B": "x20"}, {"omega": "+0.25"}, {"kv_slots": -1}])
    assert list(df.columns[:2]) == ["question", "gain"] and df.columns[-1] == "answer"
    misfit = df.set_index("question")["misfit"]
    assert misfit["B 24 -> 480"].startswith("does not fit host memory: needs")
    assert misfit["ω 0.25 -> 0.5"] == "" and (df["error"] != "").sum() == 1
    ax = mg.plot.what_ifs(df)
    said = [text.get_text() for text in ax.texts]
    pale = [bar.get_alpha() < 1 for bar in ax.patches]
    assert [", does not fit" in text for text in said] == pale and sum(pale) == 1


def test_a_frame_that_a_terminal_cuts_says_what_percentages_are_of_and_whose_are_in_doubt():
    import pandas as pd

    df = mg.what_ifs(slow_between_tasks(), ROOF, [{"link": "x2"}, {"kv_slots": 4}])
    with pd.option_context("display.width", 80, "display.max_columns", 0):
        link, knob = str(df).splitlines()[1:3]
    assert link.split(maxsplit=1)[1].startswith("link twice as fast")
    assert link.endswith("-50% time, +100% tokens/s; in doubt")
    # Where there is no answer it says why.
    answers, errors = df["answer"].tolist(), df["error"].tolist()
    assert answers[1] == errors[1] != "" and "kv_slots" in knob
    (sure,) = mg.what_ifs(run_on(), tight(), [{"B": "x20"}])["answer"].tolist()
    assert sure.endswith(" tokens/s; does not fit") and "doubt" not in sure


def test_a_long_question_stays_in_the_picture():
    """Its one line was wider than the figure, and no label could be read."""
    real = by_hand([2.0] * 4, [1.0] * 4)
    rates = ("h2d_bytes_per_s", "gpu_flops", "cpu_attn_bytes_per_s", "host_bytes_per_s")
    df = mg.what_ifs(real, ROOF, [{"link": "x2"}, dict.fromkeys(rates, "x3")])
    ax = mg.plot.what_ifs(df)
    figure = ax.figure
    figure.canvas.draw()
    assert all(label.get_window_extent().x0 >= 0 for label in ax.get_yticklabels())
    assert ax.get_window_extent().width > figure.bbox.width / 3


def test_words_of_answers_have_no_minus_nothing_and_no_gain_without_a_step():
    run = run_on()
    same = mg.what_if(run, ROOF, link="x1")
    assert same.answer.startswith("+0% time, +0% tokens/s") and "-0%" not in str(same)
    cost = CostModel.fixed({"copy_expert": 2.0, "expert": 1.0})
    chain = by_hand([2, 2, 2, 2], [1, 1, 1, 1])
    gone = mg.what_if(chain, cost, op={"copy_expert": 0, "expert": 0})
    assert math.isinf(gone.gain) and gone.answer == "no time at all"


@pytest.mark.parametrize("asked", ["x-1", "x0", "xnan"])
def test_a_link_is_some_times_as_fast(asked):
    said = f'link takes a factor above 0, such as "x2", got .{asked}'
    with pytest.raises(mg.InvalidInput, match=said):
        mg.what_if(run_on(), ROOF, link=asked)
