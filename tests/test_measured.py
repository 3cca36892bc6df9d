"""Measured tables: exact at points, linear between, the roofline beyond; refused if wrong."""

from __future__ import annotations

import copy
import dataclasses
import json
import math
from pathlib import Path

import pytest
from handmade import task
from hypothesis import given
from hypothesis import strategies as st

import moegen as mg
from moegen.errors import GraphError, InvalidInput
from moegen.graph import profile_table
from moegen.graph.company import Company
from moegen.graph.curve import Curve
from moegen.graph.features import FEATURES, FEATURES_OF
from moegen.graph.hardware import HardwareSpec
from moegen.graph.latencies import Latencies
from moegen.graph.ops import OPS
from moegen.graph.profile_table import ProfileTable, profiles
from moegen.graph.task import NO_WORK, Work
from moegen.plot.labels import provenance_caption
from moegen.sim.cost import CostModel, Provenance
from moegen.sim.measured import Measured

RESULTS = Path(__file__).parents[1] / "benchmarks" / "h200" / "results"
H200 = HardwareSpec.from_name("h200")
HW = H200.with_(
    gpu_flops=1000.0,
    gpu_efficiency=((1, 0.25), (101, 0.75)),
    gpu_bytes_per_s=200.0,
    launch_s=0.5,
    h2d_bytes_per_s=10.0,
    d2h_bytes_per_s=8.0,
    zero_copy_bytes_per_s=5.0,
    duplex_bytes_per_s=6.0,
    copy_latency_s=2.0,
    cpu_attn_bytes_per_s=20.0,
    cpu_attn_flops=40.0,
)
COPY = Curve(("copy_dense", "copy_expert"), {"h2d_bytes": (10, 30, 100)}, (4, 5, 12), "made up")
EXPERT = Curve(
    ("expert",),
    {"tokens": (4, 8), "flops_per_token": (10, 20), "launches": (1, 4)},
    (((1, 3), (2, 6)), ((1, 4), (3, 6))),
    "made up",
)
ATTEND = Curve(
    ("attn_cpu",),
    {"rows": (10,), "bytes_per_row": (4, 8), "flops_per_byte": (2,)},
    (((3,), (5,)),),
    "made up",
)


COMPANY = (
    Company("h2d", "host_memory", 0.85, "made up"),
    Company("host_memory", "h2d", 0.9, "made up"),
)


def table(*curves: Curve, hw: HardwareSpec = HW, peaks=None, company=()) -> ProfileTable:
    curves = curves or (COPY, EXPERT, ATTEND)
    versions = {"torch": "2.11.0"}
    return ProfileTable(hw, "2026-11-30", versions, "bfloat16", curves, peaks or {}, company)


def copied(nbytes: float, launches: int = 1):
    return task("copy_expert", "BULK", Work(h2d_bytes=nbytes, launches=launches))


def product(tokens: float, width: float, launches: int = 1):
    work = Work(flops=tokens * width, gpu_bytes=width, tokens=tokens, launches=launches)
    return task("expert", "GPU", work)


def attended(rows: int, bytes_per_row: float, flops_per_byte: float = 2, calls: int = 1):
    n = rows * bytes_per_row
    work = Work(flops=n * flops_per_byte, host_bytes=n, tokens=rows, rows=rows, calls=calls)
    return task("attn_cpu", "CPU", work)


COST = Measured(table())


def asked(t, cost: Measured = COST) -> tuple[float, str]:
    estimate = cost.estimate(t)
    return estimate.seconds, estimate.provenance


# -- inside the grid -----------------------------------------------------------------


def test_a_measured_point_takes_what_was_measured():
    for seconds, nbytes in zip((4, 5, 12), (10, 30, 100), strict=True):
        assert asked(copied(nbytes)) == (seconds, "measured")
    for i, tokens in enumerate((4, 8)):
        for j, width in enumerate((10, 20)):
            for k, n in enumerate((1, 4)):
                t = product(n * tokens, width, launches=n)
                assert asked(t) == (EXPERT.seconds[i][j][k], "measured")
    assert asked(attended(10, 4)) == (3, "measured")


def test_between_points_it_is_linear_along_each_feature():
    assert asked(copied(20)) == (4.5, "interpolated")
    assert asked(copied(65)) == (8.5, "interpolated")
    assert asked(product(4, 15)) == (1.5, "interpolated")
    assert asked(product(6, 15)) == ((1.5 + 2) / 2, "interpolated")
    assert asked(attended(10, 7)) == (4.5, "interpolated")


def test_several_kernels_take_as_often_what_one_takes():
    assert asked(copied(60, launches=2)) == (10, "measured")
    # Beyond the experts of a task that were measured too.
    assert asked(product(32, 10, launches=8)) == (pytest.approx(6), "extrapolated")


def test_experts_of_one_task_take_what_was_measured_of_so_many():
    assert asked(product(8, 10, launches=2)) == (pytest.approx(1 + 2 / 3), "interpolated")
    assert asked(product(12, 15, launches=2)) == (
        pytest.approx(((1 + 2 / 3 + 2 + 4 / 3) + (1 + 1 + 3 + 1)) / 4), "interpolated",
    )  # fmt: skip


@given(st.floats(10, 100), st.floats(10, 100))
def test_more_bytes_never_take_less_time(a, b):
    less, more = sorted((a, b))
    assert COST.seconds(copied(less)) <= COST.seconds(copied(more))


@given(st.floats(1, 40), st.floats(1, 40))
def test_nor_do_they_outside(a, b):
    less, more = sorted((a * 5, b * 5))
    assert COST.seconds(copied(less)) <= COST.seconds(copied(more)) * (1 + 1e-12)


RISING = st.lists(st.floats(0, 10), min_size=12, max_size=12)


@given(RISING, st.floats(1, 9), st.floats(1, 9), st.floats(2, 5), st.floats(2, 5))
def test_any_grid_is_monotone_and_exact(steps, a, b, c, d):
    axes = {"tokens": (1.0, 2.0, 5.0, 9.0), "flops_per_token": (2.0, 3.0, 5.0)}
    axes_all = axes | {"launches": (1.0,)}
    grid = [[0.0] * 3 for _ in range(4)]
    for i in range(4):
        for j in range(3):
            below = max(grid[i - 1][j] if i else 0.0, grid[i][j - 1] if j else 0.0)
            grid[i][j] = below + steps[3 * i + j] + 1e-3
    each = tuple(tuple((seconds,) for seconds in row) for row in grid)
    curve = Curve(("expert",), axes_all, each, "made up")
    cost = Measured(table(curve, hw=HW.with_(gpu_flops=1e9)))
    for i, tokens in enumerate(axes["tokens"]):
        for j, width in enumerate(axes["flops_per_token"]):
            assert asked(product(tokens, width), cost) == (grid[i][j], "measured")
    less, more = product(min(a, b), min(c, d)), product(max(a, b), max(c, d))
    assert cost.seconds(less) <= cost.seconds(more) * (1 + 1e-12)
    assert grid[0][0] <= cost.seconds(less) * (1 + 1e-12)
    assert cost.seconds(more) <= grid[3][2] * (1 + 1e-12)


# -- beyond it, and without it ---------------------------------------------------------


def test_beyond_the_grid_it_goes_on_as_the_roofline_does():
    """A copy of 100 bytes takes 2 + 10 s by the rates, one of 200 2 + 20, one of 5 2 + 0.5."""
    assert asked(copied(200)) == (12 * 22 / 12, "extrapolated")
    assert asked(copied(5)) == (pytest.approx(4 * 2.5 / 3), "extrapolated")
    # Latent attention: the same bytes with 40 times the FLOPs are bound by arithmetic. 80 bytes
    # are read in 4 s, and 6400 FLOPs take 160.
    assert asked(attended(10, 8, 80)) == (5 * 160 / 4, "extrapolated")


@pytest.mark.parametrize(
    ("make", "edge"),
    [
        (copied, 10),
        (copied, 100),
        (lambda tokens: product(tokens, 10), 4),
        (lambda tokens: product(tokens, 20), 8),
        (lambda width: product(8, width), 10),
        (lambda width: product(6, width), 20),
        (lambda nbytes: attended(10, nbytes), 8),
        (lambda kind: attended(10, 4, kind), 2),
    ],
)
def test_there_is_no_jump_at_the_edge(make, edge):
    at = COST.seconds(make(edge))
    for side in (1 - 1e-9, 1 + 1e-9):
        assert COST.seconds(make(edge * side)) == pytest.approx(at, rel=1e-6)


def test_where_one_size_was_measured_more_adds_what_the_roofline_says():
    """Of a small one most is what a call takes: it says nothing of how much a larger one takes."""
    axes = {"rows": (10,), "bytes_per_row": (4, 8), "flops_per_byte": (2,)}
    cost = Measured(table(Curve(("attn_cpu",), axes, (((30,), (32,)),), "made up")))
    # By the rates 10 rows of 4 bytes take 2 s, each further one 0.2.
    assert asked(attended(10, 4), cost) == (30, "measured")
    assert asked(attended(100, 4), cost) == (pytest.approx(30 + 18), "extrapolated")
    assert asked(attended(1, 4), cost) == (pytest.approx(30 - 1.8), "extrapolated")
    # Along what has several sizes it goes on by the ratio first.
    assert asked(attended(100, 16), cost)[0] == pytest.approx(32 * 8 / 4 + 80 - 8)
    # What was faster than by the rates is so beyond it, and never less than nothing.
    fast = Measured(table(Curve(("attn_cpu",), axes, (((1,), (2,)),), "made up")))
    assert fast.seconds(attended(100, 4)) == pytest.approx(10)
    assert fast.seconds(attended(1, 4)) == pytest.approx(0.1)
    # What is launched again takes as long again.
    one = {"tokens": (4, 8), "flops_per_token": (10,), "launches": (2,)}
    twice = Measured(table(Curve(("expert",), one, (((90,),), ((99,),)), "made up")))
    whole, half = (CostModel.roofline(HW).seconds(product(4 * n, 10, n)) for n in (2, 1))
    assert twice.seconds(product(4, 10, 1)) == pytest.approx(90 * half / whole)


def test_an_op_that_was_not_measured_takes_the_roofline():
    roofline = CostModel.roofline(HW)
    t = task("fetch_kv", "KV", Work(h2d_bytes=100))
    assert COST.estimate(t) == roofline.estimate(t)
    assert asked(t) == (20.5, "roofline")
    assert asked(task("expert", "GPU", NO_WORK))[0] == 0


def test_demands_and_capacities_are_the_machines():
    roofline = CostModel.roofline(HW)
    both = {"h2d": (1.0,), "d2h": (1.0,)}
    assert COST.capacities(both) == roofline.capacities(both)
    assert COST.estimate(copied(30)).demands == roofline.estimate(copied(30)).demands
    assert COST.estimate(product(4, 10)).demands == {"gpu": 1.0}
    # 20 bytes a second were measured of a link that is said to give 10: it cannot ask for more.
    fast = Measured(table(Curve(("copy_dense",), {"h2d_bytes": (100,)}, (5,), "made up")))
    t = task("copy_dense", "BULK", Work(h2d_bytes=100))
    assert fast.loads(fast.estimate(t))["h2d"] == 10.0


def test_rows_of_other_lengths_cost_a_call_each():
    cost = Measured(table(hw=HW.with_(cpu_call_s=0.25)))
    assert asked(attended(10, 4, calls=1), cost) == (3, "measured")
    assert asked(attended(10, 4, calls=5), cost) == (4, "interpolated")
    # Twice the rows take 0.25 s and 8 s by the rates, where the only ones measured take 0.25 and 4.
    beyond = asked(attended(20, 8, calls=3), cost)
    assert beyond == (pytest.approx(5 + 4 + 0.5), "extrapolated")


def test_host_code_is_not_the_machines():
    slow = Measured(table(hw=HW.with_(task_s=50.0)))
    assert slow.seconds(copied(30)) == 50.0
    assert slow.physical().seconds(copied(30)) == 5.0
    assert slow.physical().estimate(copied(30)).provenance == "measured"
    assert COST.physical() is COST


def test_work_without_what_was_measured_is_an_error():
    with pytest.raises(
        GraphError, match="expert was measured by tokens, flops_per_token, launches"
    ):
        COST.seconds(task("expert", "GPU", Work(flops=5)))


def test_domain_tells_what_was_measured():
    frame = COST.domain()
    assert list(frame.columns) == ["op", "feature", "low", "high", "points"]
    rows = {(r.op, r.feature): (r.low, r.high, r.points) for r in frame.itertuples()}
    assert rows == {
        ("copy_dense", "h2d_bytes"): (10, 100, 3),
        ("copy_expert", "h2d_bytes"): (10, 100, 3),
        ("expert", "tokens"): (4, 8, 2),
        ("expert", "flops_per_token"): (10, 20, 2),
        ("expert", "launches"): (1, 4, 2),
        ("attn_cpu", "rows"): (10, 10, 1),
        ("attn_cpu", "bytes_per_row"): (4, 8, 2),
        ("attn_cpu", "flops_per_byte"): (2, 2, 1),
    }
    none = CostModel.roofline(HW).domain()
    assert list(none.columns) == list(frame.columns) and none.empty


# -- several curves of one op ------------------------------------------------------------


def narrow(ops=("post_attn",), width=10, seconds=1.0, phase=None, spread=None) -> Curve:
    axes = {"tokens": (4, 8), "flops_per_token": (width,)}
    spread = spread and tuple((s,) for s in spread)
    return Curve(ops, axes, ((seconds,), (2 * seconds,)), "made up", phase, spread)


def projected(tokens: float, width: float, phase="decode", op="post_attn"):
    t = product(tokens, width)
    return dataclasses.replace(t, id=t.id._replace(op=op, phase=phase))


def test_a_task_takes_the_curve_of_its_own_width():
    cost = Measured(table(narrow(width=10, seconds=1), narrow(width=40, seconds=3)))
    assert asked(projected(4, 10), cost) == (1, "measured")
    assert asked(projected(6, 40), cost) == (4.5, "interpolated")
    # Width 19 is nearer to 10 than to 40, in times, and 21 is not; as the rates go from there.
    roofline = CostModel.roofline(HW).seconds
    for width, nearest, seconds in ((19, 10, 1), (21, 40, 3)):
        ratio = roofline(projected(4, width)) / roofline(projected(4, nearest))
        assert asked(projected(4, width), cost) == (
            pytest.approx(seconds * ratio), "extrapolated",
        )  # fmt: skip
    # However far beyond its tokens, its own width says more than another's.
    far = Curve(
        ("post_attn",), {"tokens": (32, 64), "flops_per_token": (20,)}, ((7,), (9,)), "made up"
    )
    for curves in ((narrow(), far), (far, narrow())):
        assert asked(projected(32, 10), Measured(table(*curves)))[0] == pytest.approx(
            2 * roofline(projected(32, 10)) / roofline(projected(8, 10))
        )
    # Of curves of one width the nearest in tokens.
    more = Curve(
        ("post_attn",), {"tokens": (32, 64), "flops_per_token": (10,)}, ((7,), (9,)), "made up"
    )
    assert asked(projected(32, 10), Measured(table(narrow(), more))) == (7, "measured")


OF_ROWS = {
    "append_kv": ("KV", "d2h_bytes"),
    "combine": ("GPU", "gpu_bytes"),
    "sample": ("GPU", "gpu_bytes"),
}


def of_rows(op: str, nbytes: float, width: float):
    lane, what = OF_ROWS[op]
    return task(op, lane, Work(tokens=nbytes / width, **{what: nbytes}))


@pytest.mark.parametrize("op", OF_ROWS)
def test_as_many_bytes_in_longer_rows_are_another_models(op):
    """Of bytes alone both models' tasks would take what the first in the table takes."""
    what = OF_ROWS[op][1]

    def of_width(width, seconds):
        axes = {what: (80, 160), f"{what}_per_token": (width,)}
        return Curve((op,), axes, ((seconds,), (2 * seconds,)), "made up")

    for curves in ((of_width(4, 100), of_width(16, 300)), (of_width(16, 300), of_width(4, 100))):
        cost = Measured(table(*curves))
        for width, seconds in ((4, 100), (16, 300)):
            assert asked(of_rows(op, 80, width), cost) == (seconds, "measured")
            assert asked(of_rows(op, 120, width), cost) == (1.5 * seconds, "interpolated")
        # No model's width: the nearest one's, in times, for as many bytes.
        for width, seconds in ((1, 100), (7, 100), (9, 300), (20, 300)):
            assert asked(of_rows(op, 80, width), cost) == (seconds, "extrapolated")
        # More bytes than were measured go on as the rates do, whatever the width.
        roofline = CostModel.roofline(HW).seconds
        ratio = roofline(of_rows(op, 1600, 4)) / roofline(of_rows(op, 160, 4))
        for width, seconds in ((4, 200), (7, 200), (16, 600)):
            assert asked(of_rows(op, 1600, width), cost) == (
                pytest.approx(seconds * ratio), "extrapolated",
            )  # fmt: skip


@pytest.mark.parametrize("op", OF_ROWS)
def test_a_model_keeps_its_own_curve_however_much_there_is_to_do(op):
    """Both were measured with as many tokens: of bytes the wider one's reach 16 times as far."""
    what = OF_ROWS[op][1]

    def of_width(width, seconds):
        axes = {what: (10 * width, 20 * width), f"{what}_per_token": (width,)}
        return Curve((op,), axes, ((seconds,), (2 * seconds,)), "made up")

    own, other = of_width(4, 100), of_width(64, 30)
    alone = Measured(table(own))
    for curves in ((own, other), (other, own)):
        cost = Measured(table(*curves))
        before = 0.0
        for tokens in (10, 20, 50, 300, 319, 320, 321, 1000, 5000):
            seconds, provenance = asked(of_rows(op, tokens * 4, 4), cost)
            assert (seconds, provenance) == asked(of_rows(op, tokens * 4, 4), alone)
            assert seconds > before
            before = seconds


def tokens_of(values, seconds):
    axes = {"tokens": values, "flops_per_token": (10,)}
    return Curve(("post_attn",), axes, tuple((s,) for s in seconds), "made up")


@pytest.mark.parametrize("turn", [1, -1])
def test_of_curves_that_reach_a_task_the_one_with_points_close_to_it_is_asked(turn):
    wide, close = tokens_of((1, 64), (1, 64)), tokens_of((4, 8, 128), (100, 200, 300))
    cost = Measured(table(*(wide, close)[::turn]))
    assert asked(projected(6, 10), cost) == (150, "interpolated")
    assert asked(projected(8, 10), cost) == (200, "measured")
    assert asked(projected(2, 10), cost) == (2, "interpolated")  # the other does not reach it
    # What was measured is what it takes, whoever's other points are close to it.
    assert asked(projected(64, 10), cost) == (64, "measured")
    # Nor does it matter how close they are where another is nearer.
    assert asked(projected(100, 10), cost)[1] == "interpolated"
    assert asked(projected(200, 10), cost)[0] > 300


def test_of_curves_as_near_and_as_close_the_first_is_taken():
    first, second = tokens_of((2, 8), (1, 1)), tokens_of((2, 8, 16), (5, 5, 5))
    for tokens in (2, 4, 8):
        assert asked(projected(tokens, 10), Measured(table(first, second)))[0] == 1
        assert asked(projected(tokens, 10), Measured(table(second, first)))[0] == 5


def test_a_width_off_by_rounding_is_the_width():
    assert asked(projected(4, 10 * (1 + 1e-12)), Measured(table(narrow()))) == (1, "measured")


def test_a_task_takes_curves_of_its_phase():
    both, decode = narrow(seconds=1), narrow(seconds=2, phase="decode", width=20)
    cost = Measured(table(both, decode))
    # The curve of its phase comes first, however near the other one is.
    assert asked(projected(4, 20), cost) == (2, "measured")
    assert asked(projected(4, 10), cost)[1] == "extrapolated"
    assert asked(projected(4, 10, "prefill"), cost) == (1, "measured")
    assert asked(projected(4, 20, "prefill"), cost)[1] == "extrapolated"
    alone = Measured(table(decode))
    t = projected(4, 20, "prefill")
    assert alone.estimate(t) == CostModel.roofline(HW).estimate(t)


def test_phases_of_one_graph_are_not_mixed():
    cost = Measured(table(narrow(phase="prefill"), narrow(phase="decode", seconds=3)))
    tasks = (projected(4, 10, "prefill"), projected(4, 10, "decode"))
    assert mg.simulate(mg.TaskGraph(tasks, ()), cost).makespan_s == 4


def test_curves_that_no_task_tells_apart_are_refused():
    table(narrow(), narrow(phase="decode"), narrow(width=20), narrow(("pre_attn",)))
    with pytest.raises(InvalidInput, match="two curves are of post_attn at the same points"):
        table(narrow(), narrow(seconds=3))
    with pytest.raises(InvalidInput, match="two curves are of post_attn in decode at the same"):
        table(narrow(("pre_attn", "post_attn"), phase="decode"), narrow(phase="decode"))


def test_spread_is_read_as_seconds_are_and_changes_none():
    cost = Measured(table(narrow(spread=(0.3, 0.1)), narrow(width=20, spread=(0.0, 0.2))))
    assert cost.seconds(projected(6, 10)) == 1.5
    spread = {t: cost.spread(projected(t, 10)) for t in (1, 4, 6, 8, 90)}
    assert spread == pytest.approx({1: 0.3, 4: 0.3, 6: 0.2, 8: 0.1, 90: 0.1})
    assert cost.spread(projected(6, 20)) == pytest.approx(0.1)
    assert COST.spread(product(4, 10)) == cost.spread(copied(30)) == 0
    assert CostModel.roofline(HW).spread(copied(30)) == 0
    assert cost.spread(task("post_attn", "GPU", NO_WORK)) == 0


# -- features ----------------------------------------------------------------------------


def test_what_handing_over_takes_is_read_as_seconds_are():
    """Beyond the grid as at its end, but for what is launched more often."""
    copies = dataclasses.replace(COPY, issue_s=(1, 3, 10), turn_s=(0, 2, 2))
    experts = dataclasses.replace(
        EXPERT, issue_s=(((1, 4), (1, 4)), ((2, 8), (2, 8))), turn_s=(((5, 5), (5, 5)),) * 2
    )
    model = Measured(table(copies, experts))

    def taken(t):
        cost = model.estimate(t)
        return cost.issue_s, cost.turn_s

    assert taken(copied(20)) == (2, 1)
    assert taken(copied(5)) == (1, 0) and taken(copied(1000)) == (10, 2)
    assert taken(copied(60, launches=3)) == (6, 1)  # three of 20 bytes, handed over as one task
    assert taken(product(6, 10)) == (1.5, 5)
    assert taken(product(32, 10, launches=8)) == (8, 5)  # twice as often as four, of as many
    assert taken(attended(10, 4)) == (0, 0)  # nobody timed that


def test_each_further_kernel_of_a_task_may_take_less_of_the_thread():
    copies = dataclasses.replace(COPY, issue_s=(1, 3, 10), more_s=0.25)
    experts = dataclasses.replace(EXPERT, issue_s=(((1, 4), (1, 4)),) * 2, more_s=0.5)
    model = Measured(table(copies, experts))
    assert model.estimate(copied(30)).issue_s == 3
    assert model.estimate(copied(90, launches=3)).issue_s == 3 + 2 * 0.25
    assert model.estimate(product(32, 10, launches=8)).issue_s == 4 + 4 * 0.5


def test_beside_zero_copy_kernels_a_task_takes_what_was_measured_so():
    crowded = dataclasses.replace(COPY, crowded=(8, 10, 12))
    model = Measured(table(crowded))
    assert model.estimate(copied(10)).keeps == {"zero_copy": 0.5}
    assert model.estimate(copied(20)).keeps == {"zero_copy": 0.5}
    assert model.estimate(copied(100)).keeps == {}  # as fast
    assert Measured(table()).estimate(copied(10)).keeps == {}


def test_nothing_is_faster_for_company():
    """Such seconds were read as if there were no company at all."""
    with pytest.raises(
        InvalidInput, match=r"copy_dense at h2d_bytes=30: 4.5 s crowded, less than the 5 s alone"
    ):
        dataclasses.replace(COPY, crowded=(8, 4.5, 12))
    with pytest.raises(InvalidInput, match=r"30: 4.5 s beside copies, less than the 5 s alone"):
        dataclasses.replace(COPY, beside_copies=(8, 4.5, 12))
    # As fast, but for rounding.
    dataclasses.replace(COPY, crowded=(4, 5 * (1 - 1e-15), 12))


def test_what_copies_of_weights_slow_keeps_a_share_beside_them():
    received = Curve(
        ("recv_attn",), {"h2d_bytes": (10, 20)}, (4, 5), "made up",
        beside_copies=(8, 15), crowded=(10, 20),
    )  # fmt: skip
    of = task("recv_attn", "ACT", Work(h2d_bytes=20))
    told = Measured(table(COPY, received, company=COMPANY)).estimate(of)
    assert told.seconds == 5 and told.demands == {}
    assert told.keeps == {"h2d": 1 / 3, "zero_copy": 0.25}
    # Without company it shares the link with copies.
    alone = Measured(table(COPY, received)).estimate(of)
    assert alone.keeps == {"zero_copy": 0.25} and alone.demands["h2d"] == 20


def test_what_a_task_does_once_it_does_once():
    copies = dataclasses.replace(COPY, once_s=3)
    model = Measured(table(copies))
    one = Measured(table(COPY))
    assert model.seconds(copied(30)) == one.seconds(copied(30))
    assert model.seconds(copied(90, launches=3)) == one.seconds(copied(90, launches=3)) - 2 * 3
    with pytest.raises(InvalidInput, match="once_s is 5, and is part of the seconds, of which the"):
        dataclasses.replace(COPY, once_s=5)
    with pytest.raises(InvalidInput, match="once_s"):
        dataclasses.replace(COPY, once_s=-1)


def test_several_kernels_of_a_task_wait_once_for_what_crowds_them():
    gates = Curve(
        ("route",), {"tokens": (8, 16), "flops_per_token": (10,)}, ((4,), (6,)), "made up",
        crowded=((7,), (9,)),
    )  # fmt: skip
    model = Measured(table(gates))

    def kept(launches):
        work = Work(flops=160 * launches, tokens=16 * launches, launches=launches)
        return model.estimate(task("route", "GPU", work)).keeps["zero_copy"]

    assert kept(1) == pytest.approx(6 / 9) and kept(5) == pytest.approx(30 / 33)


def test_what_was_measured_beside_copies_of_weights_is_not_slowed_by_them_again():
    sent = Curve(("send_qkv",), {"d2h_bytes": (10, 20)}, (4, 5), "made up")
    task_of = task("send_qkv", "ACT", Work(d2h_bytes=20))
    assert Measured(table(COPY, sent, company=COMPANY)).estimate(task_of).demands == {}
    # Where it was not measured it follows the rates, and where company was not, all draws add up.
    assert Measured(table(COPY, company=COMPANY)).estimate(task_of).demands != {}
    assert Measured(table(COPY, sent)).estimate(task_of).demands["d2h"] == 20


def test_every_op_has_features_and_built_graphs_have_their_values():
    assert list(FEATURES_OF) == list(OPS)
    for name in ("mixtral-8x7b", "deepseek-v2-lite", "qwen1.5-moe-a2.7b"):
        model = mg.ModelSpec.from_pretrained(name)
        s = mg.Strategy(B=64, b_a=16, b_e=64, s_expert=4 * model.expert_bytes, omega=0.5)
        for phase, length in (("decode", {"kv_len": 100}), ("prefill", {"prompt_len": 100})):
            for t in mg.build(model, s, phase, **length):
                if t.work.empty:
                    continue
                for feature in FEATURES_OF[t.id.op]:
                    assert FEATURES[feature].of(t.work) > 0, (t.id, feature)


@pytest.mark.parametrize("op", FEATURES_OF)
def test_a_feature_grows_alone(op):
    work = Work(
        flops=6e6, gpu_bytes=3e3 * (op != "attn_cpu"), host_bytes=5e3 * (op == "attn_cpu"),
        h2d_bytes=700, d2h_bytes=900, tokens=24, rows=8,
    )  # fmt: skip
    for name in FEATURES_OF[op]:
        scaled = FEATURES[name].scaled(work, 3.0)
        for other in FEATURES_OF[op]:
            factor = 3.0 if other == name else 1.0
            assert FEATURES[other].of(scaled) == pytest.approx(factor * FEATURES[other].of(work))


# -- files -------------------------------------------------------------------------------


@pytest.fixture
def path(tmp_path):
    file = tmp_path / "here.json"
    table(company=COMPANY).save(file)
    return file


def changed(path, change) -> Path:
    data = json.loads(path.read_text())
    change(data)
    path.write_text(json.dumps(data))
    return path


def test_a_file_gives_back_what_was_saved(path):
    again = ProfileTable.load(path)
    assert again == table(company=COMPANY) and again.machine.source == HW.source
    assert again.curves[1] == EXPERT and again.company == COMPANY
    assert again.to_json() == path.read_text()
    odd = table(Curve(("embed",), {"gpu_bytes": (0.1, 1 / 3)}, (math.pi, 2e22 / 3), "made up"))
    waits = Latencies(gpu_to_host_s=1e-5 / 3, rested_issue=0.35, rested_turn=7 / 3)
    odd = dataclasses.replace(odd, latencies=waits)
    odd.save(path)
    assert list(json.loads(path.read_text())["latencies"]) == [
        "gpu_to_host_s", "rested_issue", "rested_turn",
    ]  # fmt: skip
    assert ProfileTable.load(path) == odd
    dataclasses.replace(odd, curves=()).save(path)  # rates alone
    assert Measured(ProfileTable.load(path)).estimate(copied(10)).provenance == "roofline"


def test_the_file_can_be_read_by_a_person(path):
    lines = path.read_text().splitlines()
    assert max(map(len, lines)) < 250
    assert '   "axes": {"h2d_bytes": [10.0, 30.0, 100.0]},' in lines
    assert '   "seconds": [[[1.0, 3.0], [2.0, 6.0]], [[1.0, 4.0], [3.0, 6.0]]],' in lines


def test_a_file_cut_short_is_refused(path):
    text = path.read_text()
    for n in (0, 1, len(text) // 2, len(text) - 3):
        path.write_text(text[:n])
        with pytest.raises(InvalidInput, match=r"here\.json"):
            CostModel.from_profile(path, hw=HW)
    with pytest.raises(InvalidInput, match="cannot read the profile"):
        CostModel.from_profile(path.parent / "none.json")


def test_a_name_that_is_none_says_which_there_are():
    there = "is no file, and none of h200, what ships with moegen."
    for name, advice in (("h100", "Make one of your machine: moegen"), ("H200", "Write h200")):
        with pytest.raises(InvalidInput, match=f"'{name}' {there} {advice}"):
            CostModel.from_profile(name)


@pytest.mark.parametrize(
    ("change", "says"),
    [
        (lambda d: d.update(colour=1), "the file has the unknown key colour; known are format"),
        (lambda d: d.pop("date"), "the file lacks the key date"),
        (lambda d: d.update(format="moegen.graph/1"), "no table of measurements"),
        (
            lambda d: d.update(format="moegen.profile/3"),
            "a profile of another format, moegen.profile/3; this version of moegen reads "
            "moegen.profile/4. Measure the machine anew: moegen profile -o",
        ),
        (lambda d: d.update(format="moegen.profile/11"), "of another format, moegen.profile/11;"),
        (lambda d: d.update(format=4), "no table of measurements"),
        (lambda d: d.update(date="yesterday"), "date must be like 2026-11-30, got 'yesterday'"),
        (lambda d: d.update(dtype="int4"), "dtype must be one of bfloat16"),
        (lambda d: d.update(versions={"torch": 2}), "versions must map packages"),
        (lambda d: d.update(machine=3), "machine must hold keys"),
        (lambda d: d["machine"].update(source=3), "machine: source must map fields to words"),
        (lambda d: d["machine"].pop("launch_s"), "hardware key launch_s is missing"),
        (lambda d: d["machine"].update(h2d_bytes_per_s=math.nan), "h2d_bytes_per_s must be finite"),
        (lambda d: d["machine"].update(d2h_bytes_per_s=-1), "d2h_bytes_per_s must be finite"),
        (lambda d: d["machine"].update(gpu_bytes_per_s=0), "gpu_bytes_per_s must be finite"),
        (lambda d: d["peaks"].update(cache=1), "peaks has the unknown key cache"),
        (lambda d: d["peaks"].update(gpu_bytes_per_s=-1), "peaks: gpu_bytes_per_s must be"),
        (
            lambda d: d["peaks"].update(gpu_bytes_per_s=150),
            "gpu_bytes_per_s is 200, above its peak",
        ),
        (lambda d: d.update(curves={}), "curves must be a list"),
        (lambda d: d["curves"].append(3), "curve 3 must hold keys"),
        (lambda d: d["curves"].append(d["curves"][1]), "two curves are of expert"),
        (lambda d: d["curves"][0].update(unit="s"), "curve 0 has the unknown key unit"),
        (lambda d: d["curves"][0].pop("seconds"), "curve 0 lacks the key seconds"),
        (lambda d: d["curves"][0].update(source=""), "copy_dense: source must say"),
        (lambda d: d["curves"][0].update(ops=[]), "must name its ops"),
        (lambda d: d["curves"][0].update(ops=["copy"]), "unknown op 'copy'; known are copy_rows"),
        (lambda d: d["curves"][0].update(ops=["copy_dense", "send_qkv"]), "cannot share a curve"),
        (lambda d: d["curves"][0].update(axes={"tokens": [1]}), "axes must be h2d_bytes"),
        (
            lambda d: d["curves"][1].update(axes=dict(reversed(d["curves"][1]["axes"].items()))),
            "expert: axes must be in the order tokens, flops_per_token, launches, .* got launches,",
        ),
        (
            lambda d: d["curves"][0]["axes"].update(h2d_bytes=[10, 100, 30]),
            r"copy_dense: h2d_bytes must rise, and \[2\] is 30 after 100",
        ),
        (
            lambda d: d["curves"][0]["axes"].update(h2d_bytes=[0, 30, 100]),
            r"h2d_bytes\[0\] must be",
        ),
        (lambda d: d["curves"][0].update(seconds=[4, 5]), "seconds must have 3 entries"),
        (lambda d: d["curves"][0].update(seconds=[4, math.nan, 12]), r"seconds\[1\] must be a fin"),
        (lambda d: d["curves"][0].update(seconds=[0, 5, 12]), r"seconds\[0\] must be a finite"),
        (lambda d: d["curves"][0].update(seconds=[-4, 5, 12]), r"seconds\[0\] must be a finite"),
        (lambda d: d["curves"][0].update(seconds=[4, "5", 12]), r"seconds\[1\] must be a finite"),
        (
            lambda d: d["curves"][0].update(seconds=[4, 3, 12]),
            "copy_dense at h2d_bytes=30: 3 s, less than the 4 s at a smaller h2d_bytes",
        ),
        (
            lambda d: d["curves"][1].update(seconds=[[[1, 3], [2, 6]], [[1, 4], [0.5, 6]]]),
            "expert at tokens=8, flops_per_token=20, launches=1: 0.5 s, less than the 2 s at a "
            "smaller tokens",
        ),
        (
            lambda d: d["curves"][1].update(seconds=[[[1, 3], [2, 6]], [[1, 4], [3, 2]]]),
            "launches=4: 2 s, less than the 6 s at a smaller tokens",
        ),
        (lambda d: d["curves"][0].update(phase="both"), "copy_dense: phase must be one of prefill"),
        (lambda d: d["curves"][0].update(spread=[0.1, 0]), "copy_dense: spread must have 3 ent"),
        (lambda d: d["curves"][0].update(spread=[0, -0.1, 0]), r"spread\[1\] must be a finite"),
        (lambda d: d["curves"][0].update(spread=[0, math.inf, 0]), r"spread\[1\] must be a fini"),
        (lambda d: d.pop("company"), "the file lacks the key company"),
        (lambda d: d.update(company={}), "company must be a list"),
        (lambda d: d["company"].append([]), "company 2 must hold keys"),
        (lambda d: d["company"][0].pop("share"), "company 0 lacks the key share"),
        (lambda d: d["company"][0].update(rate=1), "company 0 has the unknown key rate"),
        (lambda d: d["company"][0].update(share=0), "share of h2d beside host_memory must be a fi"),
        (lambda d: d["company"][0].update(share=1.1), "memory must be at most 1, got 1.1"),
        (lambda d: d["company"][0].update(share=math.nan), "the share of h2d beside host_memory"),
        (lambda d: d["company"][0].update(source=""), "h2d beside host_memory must say how"),
        (lambda d: d["company"][0].update(resource="link"), "resource must be one of gpu, h2d"),
        (lambda d: d["company"][0].update(beside=None), "beside must be one of gpu, h2d"),
        (lambda d: d["company"][0].update(beside="h2d"), "h2d cannot be beside itself"),
        (lambda d: d["company"].append(d["company"][1]), "host_memory beside h2d is there twice"),
    ],
)
def test_a_damaged_file_is_refused_by_name(path, change, says):
    with pytest.raises(InvalidInput, match=says) as e:
        CostModel.from_profile(changed(path, change), hw=HW)
    assert str(path) in str(e.value)


@pytest.mark.parametrize(
    ("curve", "peak", "says"),
    [
        (
            Curve(("copy_dense",), {"h2d_bytes": (20, 40)}, (2, 2), "made up"),
            {"link_peak_bytes_per_s": 15.0},
            "copy_dense at h2d_bytes=40: 2 s would be 2e-08 GB/s, above the peak of 1.5e-08 GB/s",
        ),
        (
            Curve(
                ("append_kv",),
                {"d2h_bytes": (40,), "d2h_bytes_per_token": (4,)},
                ((2,),),
                "made up",
            ),
            {"link_peak_bytes_per_s": 15.0},
            "append_kv at d2h_bytes=40, d2h_bytes_per_token=4: 2 s would be 2e-08 GB/s, above",
        ),
        (
            Curve(("embed",), {"gpu_bytes": (900,)}, (2,), "made up"),
            {"gpu_bytes_per_s": 400.0},
            "embed at gpu_bytes=900: 2 s would be 4.5e-07 GB/s, above the peak of 4e-07 GB/s",
        ),
        (
            Curve(
                ("attn_cpu",),
                {"rows": (10,), "bytes_per_row": (8,), "flops_per_byte": (2,)},
                (((1e-11,),),),
                "made up",
            ),
            {"host_bytes_per_s": 3e12},
            "attn_cpu at rows=10, bytes_per_row=8, flops_per_byte=2",
        ),
        (
            Curve(
                ("expert",),
                {"tokens": (5,), "flops_per_token": (50,), "launches": (10,)},
                (((2,),),),
                "made up",
            ),
            {},
            "would be 1.25e-06 GFLOP/s, above the peak of 1e-06 GFLOP/s",
        ),
        (
            Curve(
                ("attn_gpu",),
                {"rows": (10,), "bytes_per_row": (8,), "flops_per_byte": (20,)},
                (((1,),),),
                "made up",
            ),
            {},
            "would be 1.6e-06 GFLOP/s",
        ),
    ],
)
def test_nothing_is_faster_than_its_peak(curve, peak, says):
    link = {k: v for k, v in peak.items() if k == "link_peak_bytes_per_s"}
    memory = {k: v for k, v in peak.items() if k not in link}
    with pytest.raises(InvalidInput, match=says):
        table(curve, hw=HW.with_(**link), peaks=memory)
    if peak:
        table(curve)  # where no peak is known, none is exceeded


# -- whose file it is --------------------------------------------------------------------


def test_another_machine_is_refused_unless_told_otherwise(path):
    with pytest.raises(InvalidInput, match="the GPU there is 'H200' and here 'RTX A5000'.*hw="):
        CostModel.from_profile(path, hw=HardwareSpec.from_name("c2"))
    other = CostModel.from_profile(path, hw=HardwareSpec.from_name("c2"), allow_mismatch=True)
    assert other.seconds(copied(30)) == 5
    assert CostModel.from_profile(path, hw=HW).hw == HW


@pytest.mark.parametrize(
    ("there", "here", "same"),
    [
        ("H200", "NVIDIA H200", True),
        ("NVIDIA H200", "NVIDIA H200 SXM 141 GB", True),
        ("RTX A5000", "NVIDIA RTX A5000", True),
        ("NVIDIA A100-SXM4-80GB", "NVIDIA A100-SXM4-40GB", False),
        ("RTX A5000", "RTX A6000", False),
        ("L4", "L40S", False),
        ("H200", "none (CPU lanes)", False),
        ("none (CPU lanes)", "NVIDIA H200", True),  # it has no part in it
    ],
)
def test_names_of_parts_agree_if_one_has_the_words_of_the_other(path, there, here, same):
    changed(path, lambda d: d["machine"].update(gpu_name=there))
    hw = HW.with_(gpu_name=here)
    if same:
        CostModel.from_profile(path, hw=hw)
    else:
        with pytest.raises(InvalidInput, match=f"GPU there is '{there}'"):
            CostModel.from_profile(path, hw=hw)


def test_the_number_of_cores_is_part_of_a_cpus_name(path):
    with pytest.raises(InvalidInput, match="the CPU there is"):
        CostModel.from_profile(path, hw=HW.with_(cpu_name="Xeon, 32 vCPU"))
    CostModel.from_profile(path, hw=HW.with_(cpu_name="Intel(R) Xeon(R) Processor, 16 cores"))


def test_what_was_measured_does_not_know_a_rate_that_the_caller_sets(path):
    faster = HW.with_(h2d_bytes_per_s=20.0, host_memory_bytes=1e12)
    with pytest.raises(InvalidInput, match=r"h2d_bytes_per_s there is 10\.0 and was set to 20\.0"):
        CostModel.from_profile(path, hw=faster)
    CostModel.from_profile(path, hw=HW.with_(host_memory_bytes=1e12))  # no duration rests on it


def test_a_file_is_this_machines_by_default(path, monkeypatch):
    with pytest.raises(InvalidInput, match="measured on another machine"):
        CostModel.from_profile(path)
    monkeypatch.setattr(HardwareSpec, "detect", classmethod(lambda cls: HW))
    installed = {"torch": "2.11.0+cu130"}
    monkeypatch.setattr(profile_table.metadata, "version", installed.__getitem__)
    CostModel.from_profile(path)
    installed["torch"] = "2.12.0"
    with pytest.raises(InvalidInput, match=r"torch there is 2\.11\.0 and here 2\.12\.0"):
        CostModel.from_profile(path)
    CostModel.from_profile(path, versions={"torch": "2.11.0"})
    CostModel.from_profile(path, versions={"numpy": "1"})
    CostModel.from_profile(path, allow_mismatch=True)


# -- the table that ships ------------------------------------------------------------------


def test_the_h200s_table_is_by_name_and_of_the_catalogues_machine():
    assert profiles() == ["h200"]
    table, hw = ProfileTable.from_name("h200"), HardwareSpec.from_name("h200")
    for key in ("name", "gpu_memory_bytes", "host_memory_bytes", "rental_usd_per_hour"):
        assert getattr(table.machine, key) == getattr(hw, key), key
    cost = CostModel.from_profile("h200", hw=hw)
    assert repr(cost) == f"CostModel.from_profile(h200, measured {table.date})"
    assert repr(CostModel.from_profile("h200")) == repr(cost)
    with pytest.raises(InvalidInput, match="another machine"):
        CostModel.from_profile("h200", hw=HardwareSpec.from_name("c2"))
    with pytest.raises(InvalidInput, match="'c9' is no profile.*h200"):
        ProfileTable.from_name("c9")


@pytest.mark.parametrize("name", ["mixtral-8x7b", "deepseek-v2"])
@pytest.mark.parametrize("phase", ["prefill", "decode"])
def test_it_has_all_that_its_models_do(name, phase):
    """Every op of a step was measured at the model's own widths, and handing it over too."""
    model = mg.ModelSpec.from_pretrained(name).with_(n_layers=2)
    omega = 0.5 if phase == "decode" else 0
    s = mg.Strategy(B=16, b_a=8, b_e=8192, s_expert=8 * model.expert_bytes, omega=omega)
    lengths = {"kv_len": 512} if phase == "decode" else {"prompt_len": 512}
    cost = CostModel.from_profile("h200")
    assert cost.company and cost.latencies.gpu_to_host_s > 0
    for t in mg.build(model, s, phase, **lengths):
        if not t.work.empty:
            told = cost.estimate(t)
            assert told.provenance in ("measured", "interpolated"), t
            assert cost.spread(t) >= 0, t
            assert told.issue_s > 0, t


def test_it_agrees_with_what_other_scripts_measured():
    """Bytes a second of the largest copies and gathers, alone: days differ; and of the CPU's
    attention, which a profile finds beside copies of weights."""
    rates = json.loads((RESULTS / "decode_bound.json").read_text())["rates_bytes_per_s"]
    best = dict.fromkeys(("copy_expert", "fetch_kv", "attn_cpu"), 0.0)
    for curve in ProfileTable.from_name("h200").curves:
        for op in best.keys() & set(curve.ops):
            for _, at, seconds in curve.points():
                nbytes = at.get("h2d_bytes") or at["rows"] * at["bytes_per_row"]
                best[op] = max(best[op], nbytes / seconds)
    for op, lane, apart in (
        ("copy_expert", "weights", 0.15),
        ("fetch_kv", "gather", 0.15),
        ("attn_cpu", "attention", 0.15),
    ):
        assert best[op] == pytest.approx(rates[lane][lane], rel=apart), op


def test_the_catalogues_h200_gives_the_measured_rates_of_copies():
    """GB/s of pinned copies of so many KiB, one at a time, on the H200 machine."""
    roofline = CostModel.roofline(HardwareSpec.from_name("h200"))
    for kib, rate in ((256, 11.2), (1024, 31.4), (4096, 46.7), (16384, 52.9), (65536, 55.0)):
        t = copied(kib * 1024)
        assert kib * 1024 / roofline.seconds(t) / 1e9 == pytest.approx(rate, rel=0.03)
    assert roofline.seconds(copied(4096)) == pytest.approx(23e-6)


# -- where it shows --------------------------------------------------------------------------


def test_provenance_reaches_frames_shares_and_captions():
    model = mg.ModelSpec.from_pretrained("mixtral-8x7b")
    s = mg.Strategy(B=64, b_a=32, b_e=64, s_expert=8 * model.expert_bytes, omega=0.5)
    g = mg.build(model, s, "decode", kv_len=640)
    flops, row = 2.0 * model.expert_bytes / 2, 641 * model.kv_bytes_per_token / model.n_layers
    curves = (
        Curve(("copy_expert",), {"h2d_bytes": (1e6, model.expert_bytes)}, (1e-4, 7e-3), "made up"),
        Curve(
            ("expert",),
            {"tokens": (1, 64), "flops_per_token": (flops,), "launches": (1,)},
            (((1e-4,),), ((2e-4,),)),
            "made up",
        ),
        Curve(
            ("attn_cpu",),
            {"rows": (8,), "bytes_per_row": (row,), "flops_per_byte": (4,)},
            (((1e-3,),),),
            "made up",
        ),
    )
    timeline = mg.simulate(g, Measured(table(*curves, hw=H200)), shared=False)
    frame = timeline.to_frame()
    by_op = dict(zip(frame["op"], frame["provenance"], strict=True))
    assert by_op["copy_expert"] == "measured" and by_op["expert"] == "interpolated"
    assert by_op["attn_cpu"] == "extrapolated" and by_op["lm_head"] == "roofline"
    assert set(by_op.values()) <= set(Provenance)
    shares = timeline.provenance_shares()
    seconds = frame.groupby("provenance")["duration_s"].sum()
    assert shares == pytest.approx((seconds / seconds.sum()).to_dict())
    assert list(shares.values()) == sorted(shares.values(), reverse=True)
    assert provenance_caption(shares).startswith(f"{shares['measured']:.0%} of task time measured")


def test_captions():
    assert provenance_caption({"measured": 0.92, "roofline": 0.08}) == (
        "92% of task time measured, 8% roofline"
    )
    assert provenance_caption({"roofline": 1.0}) == "100% of task time roofline"
    assert provenance_caption({"measured": 0.999, "roofline": 0.001}) == (
        ">99% of task time measured, <1% roofline"
    )
    assert provenance_caption({}) == ""
    idle = mg.simulate(mg.TaskGraph((task("a", "GPU", NO_WORK),), ()), CostModel.roofline(HW))
    assert idle.provenance_shares() == {}


def test_a_table_is_not_changed_by_who_made_it():
    data = {"h2d_bytes": [10, 30]}
    curve = Curve(["copy_dense"], data, [4, 5], "made up")
    before = copy.deepcopy(curve)
    data["h2d_bytes"].append(5)
    assert curve == before
