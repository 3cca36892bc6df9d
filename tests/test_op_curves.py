"""From ops timed one by one to curves, against hand-made times."""

from __future__ import annotations

import pytest

torch = pytest.importorskip("torch")

from moegen.exec import op_curves  # noqa: E402
from moegen.exec.host_code import Handed  # noqa: E402
from moegen.exec.op_bench import Timed, timed  # noqa: E402
from moegen.graph.ops import OPS  # noqa: E402
from moegen.graph.task import Lane, Task, TaskId, Work  # noqa: E402

pytestmark = pytest.mark.cpu
SOURCE = "measured: by hand"


BESIDE = ("beside_copies_s", "crowded_s")


def at(op, seconds, spread=0.1, issue_s=0.0, phase="decode", turn_s=0.0, times=1, **more):
    """What was timed, and what it took of the issuing thread, if it was seen handed over."""
    beside = {name: more.pop(name) for name in BESIDE if name in more}
    task = Task(TaskId(op, phase), OPS[op].lane, work=Work(**more))
    handed = [Handed(task, issue_s, turn_s, times, late=False)] if issue_s or turn_s else []
    return Timed(task, seconds, spread, **beside), handed


def curves(some, source):
    return op_curves.curves([t for t, _ in some], [h for _, of in some for h in of], source)


def copy(nbytes, seconds, **more):
    return at("copy_dense", seconds, h2d_bytes=nbytes, **more)


def product(tokens, seconds, width=10.0, op="pre_attn", launches=1, **more):
    flops = tokens * width
    return at(op, seconds, tokens=tokens, flops=flops, launches=launches, **more)


def attention(rows, context, seconds, **more):
    nbytes = rows * context
    work = {"rows": rows, "tokens": rows, "gpu_bytes": nbytes, "flops": 4.0 * nbytes}
    return at("attn_gpu", seconds, **work, **more)


def only(found):
    (curve,) = found
    return curve


def test_copies_by_size_whatever_the_order():
    found = only(curves([copy(300, 3e-3, spread=0.3), copy(100, 1e-3), copy(200, 2e-3)], SOURCE))
    assert found.ops == ("copy_dense",) and found.source == SOURCE and found.phase is None
    assert found.axes == {"h2d_bytes": (100.0, 200.0, 300.0)}
    assert found.seconds == (1e-3, 2e-3, 3e-3) and found.spread == (0.1, 0.1, 0.3)


def test_what_was_timed_twice_counts_as_its_mean():
    found = only(curves([copy(8, 2.0, spread=0.2), copy(8, 4.0, spread=0.4)], SOURCE))
    assert found.seconds == (3.0,) and found.spread == pytest.approx((0.3,))


def test_noise_that_makes_more_take_less_is_turned_round():
    found = only(curves([copy(1, 3.0), copy(2, 2.0), copy(3, 5.0), copy(4, 4.0)], SOURCE))
    assert found.seconds == (2.5, 2.5, 4.5, 4.5)


def test_all_points_tell_together_what_handing_over_takes():
    some = [product(n, n, issue_s=s, turn_s=s / 4) for n, s in ((1, 3.0), (2, 9.0), (3, 4.0))]
    found = only(curves(some, SOURCE))
    assert found.issue_s == ((4.0,),) * 3 and found.turn_s == ((1.0,),) * 3


def test_a_copy_of_weights_is_handed_over_as_the_quickest_was():
    """The others waited for room in a queue; and copies of sizes that no weights have are in no
    run."""
    some = [copy(n, n, issue_s=s) for n, s in ((1, 0.0), (2, 3e-6), (3, 5e-6), (4, 90e-6))]
    assert only(curves(some, SOURCE)).issue_s == pytest.approx((3e-6,) * 4)
    assert only(curves([copy(1, 1.0), copy(2, 2.0)], SOURCE)).issue_s == (0.0, 0.0)
    # Of a group it is that of each copy, and of one alone where there was one.
    group = at("copy_expert", 6.0, h2d_bytes=4, launches=4, issue_s=8e-6)
    alone = at("copy_expert", 3.0, h2d_bytes=3, issue_s=5e-6)
    assert only(curves([group], SOURCE)).issue_s == pytest.approx((2e-6,))
    assert only(curves([group, alone], SOURCE)).issue_s == pytest.approx((5e-6, 5e-6))


def test_a_step_of_more_rows_takes_longer_to_bind():
    some = [
        at("copy_rows", 1.0, h2d_bytes=n, turn_s=t, issue_s=t / 2)
        for n, t in ((1, 2.0), (2, 0.0), (3, 6.0))
    ]
    found = only(curves(some, SOURCE))
    assert found.turn_s == (2.0, 4.0, 6.0) and found.issue_s == (1.0, 2.0, 3.0)


def test_waits_before_issuing_are_the_tasks_and_not_of_each_kernel():
    some = [
        at("fetch_kv", n, turn_s=t, h2d_bytes=4 * n, launches=4) for n, t in ((1, 2.0), (2, 6.0))
    ]
    assert only(curves(some, SOURCE)).turn_s == (4.0, 4.0)


def test_seconds_of_several_copies_are_those_of_one():
    some = at("fetch_kv", 6.0, issue_s=3e-6, h2d_bytes=300, launches=3)
    found = only(curves([some], SOURCE))
    assert found.axes == {"h2d_bytes": (100.0,)}
    assert found.seconds == (2.0,) and found.issue_s == pytest.approx((1e-6,))


def test_further_kernels_of_a_task_take_what_they_add():
    some = [
        at("route", float(n), issue_s=s, tokens=n * k, flops=10.0 * n * k, launches=k)
        for n, k, s in ((1, 1, 3.0), (2, 1, 5.0), (3, 1, 4.0), (4, 5, 6.0), (5, 11, 9.0))
    ]
    found = only(curves(some, SOURCE))
    # Four of the first, and half a second for each of four or ten more.
    assert found.more_s == 0.5
    assert [x for (x,) in found.issue_s] == [4.0] * 5
    assert only(curves(some[:3], SOURCE)).more_s is None
    assert only(curves(some[3:4], SOURCE)).issue_s == ((6.0 / 5,),)


def gates(tokens, seconds, launches=1, **more):
    """Of ``tokens`` in each of the products."""
    of_all = tokens * launches
    return at("route", seconds, tokens=of_all, flops=10.0 * of_all, launches=launches, **more)


def test_several_kernels_tell_what_a_task_does_once():
    # Four seconds once, and one for each token.
    some = [gates(1, 5.0), gates(3, 7.0), gates(2, 4.0 + 2 * 5, 5, crowded_s=15.0)]
    found = only(curves(some, SOURCE))
    assert found.once_s == pytest.approx(4.0)
    assert [x for (x,) in found.seconds] == pytest.approx([5.0, 6.0, 7.0])
    assert found.crowded[1][0] == pytest.approx(7.0)
    # Where nothing was timed alone, or several are no faster, it is none.
    assert only(curves([gates(1, 5.0), gates(2, 14.0, 5)], SOURCE)).once_s is None
    assert only(curves([gates(1, 5.0), gates(3, 7.0), gates(2, 40.0, 5)], SOURCE)).once_s == 0.0
    # It is no more than all of it, nor than all of them take.
    assert only(curves([gates(1, 1.0), gates(3, 9.0), gates(2, 4.0, 5)], SOURCE)).once_s == 1.0
    few = only(curves([gates(1, 1.0), gates(3, 9.0), gates(2, 0.5, 5)], SOURCE))
    assert few.once_s == 0.5 and [x for (x,) in few.seconds] == pytest.approx([0.75, 0.75, 9.0])


@pytest.mark.parametrize(
    "crowded_s, expected",
    [
        # On a line: a wait of 1, and each second alone takes one and a half.
        ((2.5, None, 7.0, 13.0), (2.5, 4.0, 7.0, 13.0)),
        ((2.5, 4.0, None, None), (2.5, 4.0, 7.0, 13.0)),
        # What is longer alone waits no less: of 2 and 1 the mean.
        ((3.0, 3.0, None, None), (3.0, 3.0, 5.5, 9.5)),
        # Nor can what takes no time wait for less than nothing: one and a half times all of it.
        ((1.0, None, None, 20.0), (1.0, 4.95, 9.91, 20.0)),
        # One point tells what each waits for. Noise is smoothed, and nothing takes less than alone.
        ((None, 6.0, None, None), (5.0, 6.0, 8.0, 12.0)),
        ((None, 6.0, None, 4.0), (1.0, 5.0, 5.0, 8.0)),
    ],
)
def test_seconds_beside_zero_copy_are_of_all_points_where_some_tell(crowded_s, expected):
    some = [product(n, n, crowded_s=c) for n, c in zip((1, 2, 4, 8), crowded_s, strict=True)]
    found = only(curves(some, SOURCE)).crowded
    assert [x for (x,) in found] == pytest.approx(expected, abs=0.01)
    assert only(curves([product(1, 1.0)], SOURCE)).crowded is None


@pytest.mark.parametrize("noise", [1e-12, 1e-3, 0.01, -0.01, 0.5])
def test_what_is_as_long_alone_but_for_noise_makes_no_slope(noise):
    """They wait for 2 and 4: all for 3, and not as many times as long as noise has it."""
    some = [
        product(1, 1.0, crowded_s=3.0),
        product(2, 1.0 + noise, crowded_s=5.0 + noise),
        product(4, 10.0),
        product(8, 100.0),
    ]
    found = only(curves(some, SOURCE)).crowded
    assert [x for (x,) in found[2:]] == pytest.approx([13.0, 103.0])


@pytest.mark.parametrize("phase, issue_s, turn_s", [("prefill", 3.0, 2.0), ("decode", 7.0, 5.0)])
def test_of_waves_host_code_is_that_of_most_micro_batches(phase, issue_s, turn_s):
    """A small wave has but one, which finds the thread rested."""
    some = [
        product(n, n, issue_s=i, turn_s=t, times=k, phase=phase)
        for n, i, t, k in ((1, 9.0, 6.0, 2), (2, 7.0, 5.0, 2), (4, 3.0, 2.0, 16))
    ]
    found = only(curves(some, SOURCE))
    assert set(found.issue_s) == {(issue_s,)} and set(found.turn_s) == {(turn_s,)}


def test_what_further_kernels_of_an_expert_take_is_told_by_those_of_one_too():
    """Each number of them has a curve of its own."""
    some = [
        product(n, n, op="expert", launches=k, issue_s=i)
        for n, k, i in ((8, 1, 4.0), (16, 1, 5.0), (24, 1, 9.0), (32, 4, 8.0))
    ]
    one, four = sorted(curves(some, SOURCE), key=lambda c: c.axes["launches"])
    assert one.axes["launches"] == (1.0,) and four.axes["launches"] == (4.0,)
    assert one.more_s == four.more_s == 1.0
    assert set(one.issue_s) == {((5.0,),)} and four.issue_s == (((8.0,),),)


def test_what_is_slower_beside_others_is_so_at_each_point():
    some = [
        at("recv_attn", 1.0 * n, beside_copies_s=c, crowded_s=z, h2d_bytes=n)
        for n, c, z in ((1, 2.0, 5.0), (2, 4.0, 1.0), (4, None, None))
    ]
    found = only(curves(some, SOURCE))
    assert found.seconds == (1.0, 2.0, 4.0)
    assert found.beside_copies == pytest.approx((2.0, 4.0, 8.0))
    # The second was noise; each waits for 1.5 in the mean.
    assert found.crowded == (3.5, 3.5, 5.5)


@pytest.mark.parametrize("op, feature", [("copy_rows", "h2d_bytes"), ("embed", "gpu_bytes")])
def test_what_binds_a_step_takes_the_thread_no_less_of_more_rows(op, feature):
    some = [
        at(op, 1.0 * n, issue_s=i, turn_s=t, **{feature: n})
        for n, i, t in ((1, 5.0, 10.0), (2, 3.0, 20.0), (4, 0.0, 0.0), (8, 9.0, 40.0))
    ]
    found = only(curves(some, SOURCE))
    # Between its neighbours where it was not seen.
    assert found.issue_s == pytest.approx((4.0, 4.0, 4.0 + 5.0 / 3, 9.0))
    assert found.turn_s == pytest.approx((10.0, 20.0, 20.0 + 20.0 / 3, 40.0))


def test_experts_computed_together_are_of_all_that_is_launched():
    some = product(8, 6.0, op="expert", launches=4, issue_s=6.0)
    found = only(curves([some], SOURCE))
    assert found.axes == {"tokens": (2.0,), "flops_per_token": (10.0,), "launches": (4.0,)}
    assert found.seconds == found.issue_s == (((6.0,),),)


def test_groups_of_experts_have_a_curve_of_their_own():
    some = [product(n, n, op="expert", launches=k) for k in (1, 4) for n in (8, 16)]
    one, four = sorted(curves(some, SOURCE), key=lambda c: c.axes["launches"])
    assert one.axes["launches"] == (1.0,) and one.axes["tokens"] == (8.0, 16.0)
    assert four.axes["launches"] == (4.0,) and four.axes["tokens"] == (2.0, 4.0)


def test_computed_apart_in_each_phase_and_copied_alike():
    some = [
        *(product(8, s, phase=p) for p, s in (("decode", 1.0), ("prefill", 2.0))),
        *(copy(n, n, phase=p) for p, n in (("decode", 1), ("prefill", 2))),
    ]
    some += [product(8, s, op="lm_head", phase=p) for p, s in (("decode", 1.0), ("prefill", 1.2))]
    some += [
        at("sample", s, gpu_bytes=64, tokens=8, phase=p)
        for p, s in (("decode", 1.0), ("prefill", 1.2))
    ]
    found = {(c.ops, c.phase): c for c in curves(some, SOURCE)}
    assert len(found) == 7
    for op in ("lm_head", "sample"):  # a GPU is hot after a wave
        assert found[(op,), "decode"].seconds == ((1.0,),)
        assert found[(op,), "prefill"].seconds == ((1.2,),)
    assert found[("pre_attn",), "decode"].seconds == ((1.0,),)
    assert found[("pre_attn",), "prefill"].seconds == ((2.0,),)
    assert found[("copy_dense",), None].seconds == (1, 2)


def test_each_width_of_matrices_has_a_curve_of_its_own():
    """As many tokens of each: a grid, if it were one of widths."""
    some = [product(n, n * w, width=w) for n in (1, 2) for w in (10.0, 30.0)]
    narrow, wide = curves(some, SOURCE)
    assert narrow.axes == {"tokens": (1.0, 2.0), "flops_per_token": (10.0,)}
    assert wide.axes["flops_per_token"] == (30.0,) and wide.seconds == ((30.0,), (60.0,))


@pytest.mark.parametrize(
    "op, what", [("append_kv", "d2h_bytes"), ("combine", "gpu_bytes"), ("sample", "gpu_bytes")]
)
def test_each_width_of_rows_has_a_curve_of_its_own(op, what):
    """As many bytes of each, which are fewer tokens of the wider ones."""
    some = [at(op, n * w, tokens=n // w, **{what: n}) for n in (64, 128) for w in (8, 32)]
    narrow, wide = curves(some, SOURCE)
    assert narrow.axes == {what: (64.0, 128.0), f"{what}_per_token": (8.0,)}
    assert wide.axes == {what: (64.0, 128.0), f"{what}_per_token": (32.0,)}
    assert wide.seconds == ((2048,), (4096,))


def test_rows_and_context_are_one_grid_where_it_is_whole():
    some = [attention(n, c, n * c) for c in (64, 512) for n in (1, 8)]
    found = only(curves(some, SOURCE))
    assert found.axes == {
        "rows": (1.0, 8.0),
        "bytes_per_row": (64.0, 512.0),
        "flops_per_byte": (4.0,),
    }
    assert found.seconds == (((64,), (512,)), ((512,), (4096,)))


def test_what_lacks_a_point_of_the_grid_is_a_grid_for_itself():
    """There was no time for 8 rows of 512: one row goes as far as it was measured, beside them."""
    whole = [attention(n, c, n * c) for c in (64, 256) for n in (1, 8)]
    first, second = sorted(
        curves([*whole, attention(1, 512, 512.0)], SOURCE), key=lambda c: -len(c.axes["rows"])
    )
    assert first.axes["bytes_per_row"] == (64.0, 256.0) and first.axes["rows"] == (1.0, 8.0)
    assert second.axes["bytes_per_row"] == (64.0, 256.0, 512.0) and second.axes["rows"] == (1.0,)
    assert second.seconds == (((64,), (256,), (512,)),)


def test_what_rows_have_in_common_is_a_grid_however_far_each_goes():
    """Else nothing would lie between the lengths: of either row the other lacks a point."""
    some = [
        attention(n, c, n * c)
        for c, rows in ((64, (8, 128, 2048)), (512, (8, 512)), (1536, (8, 128, 512)))
        for n in rows
    ]
    found = {c.axes["bytes_per_row"]: c.axes["rows"] for c in curves(some, SOURCE)}
    assert found == {
        (64.0, 1536.0): (8.0, 128.0),
        (512.0, 1536.0): (8.0, 512.0),
        (64.0, 512.0, 1536.0): (8.0,),
        (64.0,): (8.0, 128.0, 2048.0),
        (1536.0,): (8.0, 128.0, 512.0),
    }


def test_the_larger_grid_comes_first():
    wide = [attention(n, c, 1.0) for n in (1, 8) for c in (64, 1536)]
    fine = [
        attention(n, c, 2.0 if c == 512 else 1.0) for n in (8, 32, 128) for c in (64, 512, 1536)
    ]
    first, second = curves([*wide, *fine], SOURCE)
    assert first.axes["bytes_per_row"] == (64.0, 512.0, 1536.0)
    assert first.axes["rows"] == (8.0, 32.0, 128.0)
    assert second.axes["bytes_per_row"] == (64.0, 1536.0) and second.axes["rows"][0] == 1.0


def test_prompts_of_several_lengths_are_one_grid():
    """FLOPs a token say how long they are; short ones may take longer for as many tokens."""
    some = [
        at("attn_prefill", s * n, tokens=n, flops=w * n, gpu_bytes=8 * n, phase="prefill")
        for w, s in ((10.0, 3.0), (30.0, 2.0))
        for n in (512, 2048)
    ]
    found = only(curves(some, SOURCE))
    assert found.phase is None and found.axes["attended_flops"] == (10.0, 30.0)
    assert found.axes["io_per_token"] == (8.0,)
    assert found.seconds == (((1536,), (1024,)), ((6144,), (4096,)))


def test_a_kind_of_attention_has_a_curve_of_its_own():
    latent = {"rows": 1, "tokens": 1, "gpu_bytes": 64, "flops": 240.0 * 64}
    found = curves([attention(1, 64, 1.0), at("attn_gpu", 2.0, **latent)], SOURCE)
    assert {c.axes["flops_per_byte"]: c.seconds for c in found} == {
        (4.0,): (((1.0,),),),
        (240.0,): (((2.0,),),),
    }


def test_a_time_is_the_mean_without_what_comes_once_in_a_while():
    task = Task(TaskId("embed", "decode"), Lane.GPU, work=Work(gpu_bytes=8))
    spans = [1.0] * 9 + [2.0] * 9 + [0.0, 100.0]
    found = timed(task, spans, crowded_s=3e-6)
    # Two of twenty at each end are out, so seven ones and, with the hundred and a two gone, eight.
    assert found.seconds == pytest.approx((8 * 1 + 8 * 2) / 16)
    assert found.spread == pytest.approx(0.5 / 1.5) and found.crowded_s == 3e-6


@pytest.mark.parametrize("n", [1, 2, 3, 9])
def test_a_few_runs_have_a_time_too(n):
    task = Task(TaskId("embed", "decode"), Lane.GPU, work=Work(gpu_bytes=8))
    found = timed(task, [0.5] * n)
    assert (found.seconds, found.spread) == (0.5, 0.0)
    assert timed(task, [0.0] * n).seconds > 0  # the clock's own grain
