"""`mg.profile` as a whole, on CPU lanes and tiny models: the table, its time, what is refused."""

from __future__ import annotations

import json
import re
from math import inf
from pathlib import Path

import pytest

torch = pytest.importorskip("torch")
pytest.importorskip("transformers")

from quick_profile import here, quicken  # noqa: E402
from small_models import MIXTRAL, deepseek, mixtral  # noqa: E402

import moegen as mg  # noqa: E402
from moegen.errors import Infeasible, InvalidInput, MachineError  # noqa: E402
from moegen.exec import company as company_module  # noqa: E402
from moegen.exec import op_points  # noqa: E402
from moegen.exec import table as table_module  # noqa: E402
from moegen.exec.company import PAIRS  # noqa: E402
from moegen.exec.neighbours import Neighbours  # noqa: E402
from moegen.exec.op_bench import OpBench  # noqa: E402
from moegen.exec.table import _as_fast_as_seen, _unsure  # noqa: E402
from moegen.exec.told import Told  # noqa: E402
from moegen.graph import host_memory  # noqa: E402
from moegen.graph.curve import Curve  # noqa: E402
from moegen.graph.features import FEATURES_OF  # noqa: E402
from moegen.graph.latencies import Latencies  # noqa: E402
from moegen.graph.profile_table import ProfileTable  # noqa: E402
from moegen.sim.measured import Measured  # noqa: E402

pytestmark = pytest.mark.cpu
GIB = 1 << 30


@pytest.fixture
def quick(monkeypatch):
    quicken(monkeypatch)


@pytest.fixture(scope="module")
def profiled():
    """A profile of two families, all of it real but the machine's rates, and what was said."""
    notes, said = [], []
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(table_module, "machine_profile", here)
        patch.setattr(table_module, "_REST_S", 0.0)
        patch.setattr(company_module, "_SPAN_S", 0.02)
        patch.setattr(company_module.rates, "LINK_BYTES", 64 << 20)
        table = mg.profile(
            [mixtral(), deepseek()],
            device="cpu",
            budget_s=2.0,
            on_progress=said.append,
            notes=notes,
        )
    return table, notes, said


def test_it_says_what_it_measures_and_what_it_left_out(profiled):
    _, notes, said = profiled
    assert said == [
        "rates of the machine",
        "copies by size",
        "mixtral, 2 layers",
        "deepseek, 3 layers",
        "lanes beside one another",
    ]
    # Two seconds are not enough for prompts of 16,384 tokens.
    late = [n for n in notes if "there was no time left for" in n]
    assert [n.split(":")[0] for n in late] == ["mixtral", "deepseek"]
    assert all("prefill" in n and "the roofline goes on" in n for n in late)


def test_it_loads_back_equal(profiled, tmp_path):
    table, *_ = profiled
    table.save(tmp_path / "here.json")
    assert ProfileTable.load(tmp_path / "here.json") == table
    assert table.dtype == "float32" and table.machine.gpu_name == "none (CPU lanes)"
    assert table.versions["torch"] == str(torch.__version__)
    assert table.machine.task_s is None  # each op's own host code is in its curve


@pytest.mark.parametrize("model", [mixtral(), deepseek()], ids=["mixtral", "deepseek"])
@pytest.mark.parametrize("phase", ["decode", "prefill"])
def test_every_task_of_a_step_rests_on_what_was_measured(profiled, model, phase):
    """At whatever size, for both families: no op is left to rates alone."""
    cost = Measured(profiled[0])
    s = mg.Strategy(B=24, b_a=5, b_e=16, omega=0.25 * (phase == "decode"))
    length = {"kv_len": 100} if phase == "decode" else {"prompt_len": 20}
    g = mg.build(model, s, phase, **length)
    for t in g:
        if not t.work.empty:
            estimate = cost.estimate(t)
            assert estimate.provenance.value in ("measured", "interpolated", "extrapolated"), t.id
            assert 0 < estimate.seconds < inf
            assert estimate.issue_s > 0
    assert mg.simulate(g, cost, steps=3).period_s > 0


def test_curves_say_of_which_model_and_where_they_hold(profiled):
    table, *_ = profiled
    assert {op for c in table.curves for op in c.ops} == set(FEATURES_OF)
    for c in table.curves:
        of = [name for name in ("mixtral", "deepseek") if f"widths of {name}," in c.source]
        alike = c.source.endswith("copies, of weights and tables of mixtral, deepseek")
        assert alike == (c.ops[0] in ("copy_dense", "copy_expert", "copy_rows", "copy_tokens"))
        assert alike or (len(of) == 1 and c.source.startswith("measured: "))


def test_shares_are_those_of_all_pairs_that_meet(profiled):
    table, *_ = profiled
    assert [(c.resource, c.beside) for c in table.company] == [*PAIRS["cpu"], ("h2d", "zero_copy")]
    assert all(0 < c.share <= 1 and c.source.startswith("measured: ") for c in table.company)


def test_waiting_was_measured_too(profiled):
    assert all(0 <= s < 0.1 for s in vars(profiled[0].latencies).values())
    assert profiled[0].latencies.gpu_to_host_s > 0


# -- parts ---------------------------------------------------------------------------


def test_time_is_respected_and_each_op_measured_all_the_same(quick, monkeypatch):
    """Without any time at all each op is measured at its smallest size, no op at any other."""
    monkeypatch.setattr(table_module, "_OVER_S", 0.1)
    monkeypatch.setattr(table_module, "_unsure", lambda found: None)  # others may be at work here
    monkeypatch.setattr(Neighbours, "note", lambda self: "others used all cores")
    notes: list[str] = []
    table = mg.profile(mixtral(), device="cpu", budget_s=0.01, notes=notes)
    assert len(notes) == 3 and "prompts" in notes[0] and notes[2] == "others used all cores"
    assert re.fullmatch(
        r"it took \d+ s, not 0.01 s: rates, lanes .* are measured whatever .*", notes[1]
    )
    ops = {
        t.id.op for t in mg.build(mixtral(), mg.Strategy(B=4, b_a=2, b_e=8, omega=0.5), kv_len=8)
    }
    assert {op for c in table.curves for op in c.ops} == ops | {"attn_prefill"}
    prefill = next(c for c in table.curves if c.ops == ("pre_attn",) and c.phase == "prefill")
    assert prefill.axes["tokens"] == (64.0,)


def test_what_rests_cost_is_taken_off_by_what_the_same_steps_tell(quick, monkeypatch):
    """Else the simulated thread, which pays for rests, would pay twice."""
    law, asked = Latencies(gpu_to_host_s=1e-5, rested_issue=4.0, rested_turn=0.5), []
    all_of = Told.handed_over

    def handed_over(self, of):
        asked.append(of)
        return all_of(self, of)

    monkeypatch.setattr(table_module, "latencies_of", lambda told, on_gpu: law)
    monkeypatch.setattr(Told, "handed_over", handed_over)
    notes: list[str] = []
    found = mg.profile([mixtral(), deepseek()], device="cpu", budget_s=0.01, notes=notes)
    assert found.latencies == law and asked == [law, law]
    # Four times is the most that is tried: it may be more.
    assert any("more than was tried, 4 times" in note for note in notes)


def test_ops_of_a_crowd_are_timed_in_one_and_no_others(quick, monkeypatch):
    crowded, time = set(), OpBench.time

    def timed(self, op, span_s, crowd=False):
        crowded.add((self.graph.phase, self.graph.shape.rows, op, crowd))
        return time(self, op, span_s, crowd)

    monkeypatch.setattr(OpBench, "time", timed)
    monkeypatch.setattr(
        table_module,
        "decode_points",
        lambda model, on_gpu: (
            p._replace(crowd=p.graph.shape.rows == 16)
            for p in op_points.decode_points(model, on_gpu=on_gpu)
        ),
    )
    mg.profile([mixtral()], device="cpu", budget_s=4.0)
    ops = {op for phase, rows, op, _ in crowded if (phase, rows) == ("decode", 16)}
    assert op_points.CROWDED_OPS & ops and ops - op_points.CROWDED_OPS
    for phase, rows, op, crowd in crowded:
        assert crowd == ((phase, rows) == ("decode", 16) and op in op_points.CROWDED_OPS)


def test_models_that_share_a_width_have_one_curve_of_it(quick):
    model = mixtral(num_hidden_layers=1)
    table = mg.profile([model, model], device="cpu", budget_s=0.01)
    computed = [c for c in table.curves if not c.ops[0].startswith("copy_")]
    assert len({(c.ops, c.phase) for c in computed}) == len(computed)


def test_a_model_may_be_named_by_its_folder(quick, tmp_path):
    (tmp_path / "config.json").write_text(json.dumps(MIXTRAL | {"num_hidden_layers": 1}))
    for name in (tmp_path, str(tmp_path)):
        said: list[str] = []
        mg.profile(name, device="cpu", budget_s=0.01, on_progress=said.append)
        assert said[2] == f"{tmp_path.name}, 1 layer"


def curve(**over):
    kept = {
        "ops": ("expert",),
        "axes": {"tokens": (8.0,), "flops_per_token": (1e9,), "launches": (4.0,)},
        "seconds": (((1e-3,),),),
        "source": "by hand",
    }
    return Curve(**(kept | over))


def test_points_that_something_else_disturbed_are_named():
    axes = {"tokens": (1.0, 8.0), "flops_per_token": (10.0,)}

    def of(*spread, phase="decode"):
        spreads = tuple((s,) for s in spread)
        return Curve(("route",), axes, ((1.0,), (2.0,)), "made up", phase, spreads)

    assert _unsure([of(0.4, 1.0), of(0.0, 0.9, phase="prefill")]) is None
    note = _unsure([of(0.4, 7.36), of(1.2, 0.1, phase="prefill")])
    assert note.startswith("what route at tokens=8, flops_per_token=10 in decode took differs")
    assert "7.4 times that, and so at 1 more:" in note
    assert "and so at" not in _unsure([of(0.4, 1.5)])
    # Grids share points.
    assert "and so at" not in _unsure([of(0.4, 1.5), of(0.4, 1.5)])


def test_arithmetic_is_as_fast_as_the_fastest_kernel():
    """Four experts of 8 tokens, each token a GFLOP, in a millisecond: 32 TFLOP/s."""
    slow = here().with_(gpu_flops=4e12, gpu_efficiency=((1, 0.5), (64, 1.0)))
    fast = _as_fast_as_seen(slow, [curve()])
    assert fast.gpu_flops == 32e12 and fast.kind("gpu_flops") == "measured"
    # The rates that follow are what they were.
    assert [e * fast.gpu_flops for _, e in fast.gpu_efficiency] == [2e12, 4e12]
    assert _as_fast_as_seen(fast, [curve(seconds=(((2e-3,),),))]) == fast
    # What the CPU does says nothing of it.
    attention = curve(
        ops=("attn_cpu",),
        axes={"rows": (1.0,), "bytes_per_row": (1e9,), "flops_per_byte": (1e6,)},
    )
    assert _as_fast_as_seen(slow, [attention]) == slow
    for found in ([curve()], [curve(), attention]):
        ProfileTable(_as_fast_as_seen(slow, found), "2026-11-30", {}, "float32", tuple(found), {})


# -- refused ---------------------------------------------------------------------------


@pytest.fixture
def nothing_is_measured(monkeypatch):
    def measured(*_, **__):
        raise AssertionError("it should have been refused before")

    monkeypatch.setattr(table_module, "machine_profile", measured)


@pytest.mark.parametrize(
    ("args", "says"),
    [
        ({"models": "gpt-oss-20b"}, "gpt-oss-20b: models of family 'gpt_oss' can be planned"),
        (
            {"models": ["mixtral-8x7b", "qwen3-30b-a3b"]},
            "families that run are mixtral, deepseek_v2",
        ),
        ({"models": "mixtral-9x9b"}, "'mixtral-9x9b' is no model"),
        ({"models": Path("nowhere")}, "nowhere"),
        ({"models": []}, "name at least one"),
        ({"models": 3}, "models must be models or their names, got 3"),
        ({"models": [None]}, "got None"),
        ({"dtype": "fp8"}, "dtype must be one of bfloat16, float16, float32, got 'fp8'"),
        ({"budget_s": 0}, "budget_s must be a finite number above 0, got 0"),
        ({"budget_s": float("nan")}, "budget_s must be a finite number above 0, got nan"),
        ({"budget_s": "60"}, "budget_s must be"),
        ({"on_progress": None}, "on_progress must be callable"),
        ({"notes": 5}, "notes must be a list, to which lines are added, got 5"),
        ({"device": "tpu"}, "device must be 'cpu' or 'cuda', got 'tpu'"),
    ],
)
def test_what_cannot_be_profiled_is_refused_before_anything_is_measured(
    nothing_is_measured, args, says
):
    with pytest.raises(InvalidInput) as e:
        mg.profile(**({"models": mixtral(), "device": "cpu"} | args))
    assert says in str(e.value)


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
def test_a_gpu_that_is_not_there_is_a_fault_of_the_machine(nothing_is_measured):
    with pytest.raises(MachineError, match="torch sees no CUDA device"):
        mg.profile(mixtral(), device="cuda")


def test_layers_that_host_memory_cannot_hold_are_infeasible(quick, monkeypatch):
    monkeypatch.setattr(host_memory, "free_bytes", lambda: (4 * GIB, "the test's"))
    with pytest.raises(Infeasible, match="does not fit"):
        mg.profile("mixtral-8x22b", device="cpu", budget_s=0.01)
