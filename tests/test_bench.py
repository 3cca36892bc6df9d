"""``moegen bench``: two phases measured on a small model, and the arithmetic around it."""

from __future__ import annotations

import json
from types import SimpleNamespace

import pytest
from handmade import task, tid
from small_models import MIXTRAL

import moegen as mg
from moegen.bench import Phase, _reached, mixed_prompts, mixed_wave, plan_for_layers
from moegen.cli import main, words
from moegen.cli.words import benched
from moegen.graph.sound import sound_plan
from moegen.graph.task import Lane, TaskGraph, Work
from moegen.sim.bounds import Bound, bound

SMALL = "--prompt-len 12 --gen-len 8 --n 6 --steps 3 --gpu-memory 1800KiB"


@pytest.fixture
def folder(tmp_path):
    """A folder with a configuration alone."""
    path = tmp_path / "small"
    path.mkdir()
    (path / "config.json").write_text(json.dumps(MIXTRAL | {"num_hidden_layers": 4}))
    return path


def _main(capsys, line):
    with pytest.raises(SystemExit) as exit_:
        main(line.split())
    said = capsys.readouterr()
    return int(exit_.value.code or 0), said.out, said.err


@pytest.mark.cpu
def test_both_phases_are_measured_and_held_to_the_bound(folder, tmp_path, capsys):
    pytest.importorskip("torch")
    saved = tmp_path / "t.json"
    line = f"bench {folder} --load-format dummy {SMALL} --device cpu --omega 0.5"
    code, out, err = _main(capsys, f"{line} --json --timeline {saved}")
    assert code == 0, err
    found = json.loads(out)
    assert (found["layers"], found["of_layers"], found["dtype"]) == (4, 4, "float32")
    assert found["plan"]["decode"]["omega"] == 0.5 and found["plan"]["decode"]["B"] == 6
    timeline = mg.Timeline.load(saved)
    decode, prefill = found["decode"], found["prefill"]
    assert decode["measured_s"] == pytest.approx(timeline.period_s)
    assert prefill["tokens"] == 12 * found["plan"]["prefill"]["B"]
    frame = timeline.to_frame()
    attention = decode["reached"]["CPU attention"]
    cpu = frame[(frame.lane == "CPU") & (frame.step == 1)]  # of three, the one that counts
    assert attention["per_step"] == pytest.approx(cpu.host_bytes.sum())
    assert attention["busy_per_s"] == pytest.approx(cpu.host_bytes.sum() / cpu.duration_s.sum())
    assert "CPU attention" not in prefill["reached"]

    code, out, err = _main(capsys, line)
    assert code == 0 and "% of it reached" in out and "4 of 4 layers, random weights" in err
    lines = [line for line in err.splitlines() if line.startswith("Measuring ")]
    rows = found["plan"]["prefill"]["B"]
    wave = f"Measuring prefill: 3 steps of {12 * rows} prompt tokens, {rows} prompts of 12, about "
    assert lines[0].startswith(wave) and lines[0].endswith(" predicted ...")
    assert lines[1].startswith("Measuring decode: 3 steps of 6 rows, about ")
    assert len(lines) == 2


@pytest.mark.cpu
@pytest.mark.parametrize(("share", "said"), [(0.98, False), (1.01, False), (1.3, True)])
def test_a_bound_that_is_exceeded_was_made_of_slow_rates(share, said, monkeypatch):
    phase = SimpleNamespace(
        graph=None,
        measured=SimpleNamespace(period_s=1.0),
        tokens_per_s=1.0,
        bound=SimpleNamespace(seconds=share, binds="lane BULK"),
        share_of_bound=share,
        predicted=SimpleNamespace(period_s=1.0),
        error=0.0,
        reached=(),
    )
    monkeypatch.setattr(words, "_brought", lambda *_: "a token")
    told = "\n".join(benched({"decode": phase, "prefill": phase}))
    assert ("the rates were measured too low" in told) == said


def test_prompts_of_mixed_lengths_are_measured_beside_those_of_one(folder, capsys):
    pytest.importorskip("torch")
    line = f"bench {folder} --load-format dummy {SMALL} --device cpu --omega 0.5 --mixed 1:30"
    code, out, err = _main(capsys, f"{line} --json")
    assert code == 0, err
    found = json.loads(out)
    mixed, uniform = found["mixed_prefill"], found["prefill"]
    assert mixed["tokens"] == uniform["tokens"] == 72
    assert mixed["tokens_per_s"] == pytest.approx(72 / mixed["measured_s"])
    code, out, err = _main(capsys, line)
    assert code == 0 and "Mixed prefill: " in out and "% against prompts of one length" in out
    assert "72 prompt tokens, 6 prompts of 12\n" in out


@pytest.mark.parametrize(
    ("lengths", "longest", "said"),
    [
        ((5,), 5, "5 prompt tokens, 1 prompt of 5"),
        ((1,), None, "1 prompt token, 1 prompt of 1"),
        ((2, 9), 11, "11 prompt tokens, 2 prompts of 2 to 9"),
        (
            (2, 9),
            1200,
            "11 prompt tokens, 2 prompts of 2 to 9: a wave of 11 tokens has no room for one of "
            "1,200",
        ),
    ],
)
def test_a_mixed_wave_says_why_its_prompts_are_short(lengths, longest, said):
    model = mg.ModelSpec.from_pretrained("mixtral-8x7b").with_(n_layers=1)
    hw = mg.HardwareSpec.from_name("c2")
    s = mg.Strategy(B=len(lengths), b_a=1, b_e=4)
    graph = mg.build(model, s, "prefill", lengths=lengths)
    cost = mg.CostModel.roofline(hw)
    ran = mg.simulate(graph, cost)
    phase = Phase(graph, sum(lengths), ran, ran, bound(graph, cost), ())
    out = "\n".join(benched({"prefill": phase, "mixed prefill": phase}, longest))
    assert f" for {said}\n" in out.partition("Mixed prefill")[2]
    assert "no room" not in out.partition("Mixed prefill")[0]


def test_a_mixed_wave_is_like_the_others_of_its_job_and_as_large_as_one_of_one_length():
    model, hw = mg.ModelSpec.from_pretrained("mixtral-8x7b"), mg.HardwareSpec.from_name("h200")
    hw = hw.with_(gpu_memory_bytes=24 * 2**30, host_memory_bytes=256 * 2**30)
    plan = sound_plan(model, hw, mg.Workload.uniform(1600, 512, 256), {"omega": 1.0})
    uniform = plan.prefill.B * 512
    wave = mixed_wave(model, hw, plan, 512, (16, 8192))
    shape, layout, s = wave.shape, wave.layout, wave.strategy
    assert shape is not None and layout is not None and s is not None
    assert shape.tokens == pytest.approx(uniform, rel=0.02)
    assert max(shape.new) > 7000 and min(shape.new) < 50
    parts = [sum(shape.new[p.start : p.stop]) for p in layout.parts]
    assert max(parts) < 2 * sum(parts) / len(parts)
    # There is room for it.
    work = mg.Workload.from_lengths(shape.new, [1] * shape.rows)
    ledger = mg.memory(model, hw, s.with_(B=shape.rows), work, phase="prefill")
    assert ledger.gpu.fits


@pytest.mark.parametrize(("shortest", "longest"), [(16, 8192), (1, 7), (5, 5)])
def test_mixed_prompts(shortest, longest):
    prompts = mixed_prompts(shortest, longest, 100_000)
    assert sum(prompts) == 100_000 and prompts == mixed_prompts(shortest, longest, 100_000)
    assert all(shortest <= n <= longest for n in prompts[:-1]) and prompts[-1] <= longest
    # Half of them are shorter than the geometric mean.
    middle = (shortest * longest) ** 0.5
    short = sum(n < middle for n in prompts) / len(prompts)
    assert short == pytest.approx(0.5, abs=0.15) or shortest == longest


@pytest.mark.parametrize("lengths", [(0, 5), (6, 5), (1.5, 3)])
def test_mixed_prompts_that_are_none_are_refused(lengths):
    with pytest.raises(mg.InvalidInput, match="prompt"):
        mixed_prompts(*lengths, tokens=10)


# The second of the three steps counts: the ten seconds from the end of the first to its own.
RUN = {
    "a": ("GPU", Work(flops=30, gpu_bytes=20), [(0, 4), (12, 14), (20, 22)]),
    "b": ("BULK", Work(h2d_bytes=60), [(0, 2), (8, 13), (17, 21)]),
    "c": ("CPU", Work(host_bytes=12), [(1, 3), (12, 16), (20, 24)]),
    "d": ("GPU", Work(flops=10), [(4, 10), (18, 20), (22, 26)]),
}
# Work of a step, seconds of the ten in which a task with such work ran.
REACHED = {
    "GPU arithmetic": (40, 4),
    "GPU memory": (20, 2),
    "link to the GPU": (60, 6),  # 10 to 13 and 17 to 20
    "CPU attention": (12, 4),
    "host memory": (72, 9),  # 10 to 16 and 17 to 20
}


def _timeline(steps, source, scale=1.0):
    graph = TaskGraph(tuple(task(op, lane, work) for op, (lane, work, _) in RUN.items()), ())
    rows = [(tid(op, k), *RUN[op][2][k]) for k in range(steps) for op in RUN]
    ids, start, end = zip(*rows, strict=True)
    return mg.Timeline(
        graph, ids, [scale * t for t in start], [scale * t for t in end], source=source
    )


def test_shares_and_rates_of_three_steps_by_hand():
    measured, hw = _timeline(3, "measured"), mg.HardwareSpec.from_name("c2")
    reached = {r.name: r for r in _reached(measured, hw)}
    assert reached.keys() == REACHED.keys()
    for name, (work, busy_s) in REACHED.items():
        r = reached[name]
        assert (r.per_step, r.per_s) == pytest.approx((work, work / 10)), name
        assert (r.busy_share, r.busy_per_s) == pytest.approx((busy_s / 10, work / busy_s)), name
    assert reached["link to the GPU"].rate == hw.h2d_bytes_per_s
    limit = Bound({Lane.GPU: 4.0}, {}, 2.0, ())
    predicted = _timeline(1, "simulated", 0.8)
    phase = Phase(measured.graph, 6, measured, predicted, limit, ()).to_dict()
    assert phase["tokens_per_s"] == pytest.approx(0.6)
    assert (phase["predicted_s"], phase["share_of_bound"]) == pytest.approx((8.0, 0.4))
    assert phase["error"] == pytest.approx(-0.2)


@pytest.mark.cpu
def test_a_strategy_that_is_given_is_kept_for_some_layers(folder):
    pytest.importorskip("torch")
    from moegen.exec.prepare import Prepared

    whole = mg.ModelSpec.from_pretrained(folder)
    s = mg.Strategy(B=6, b_a=2, b_e=33, s_expert=2 * whole.expert_bytes, omega=0.5)
    work = mg.Workload.uniform(n=6, prompt_len=12, gen_len=8)
    hw = mg.HardwareSpec.from_name("c2")
    for given in (s, mg.Plan(s.with_(omega=0.0), s)):
        prepared = Prepared.of_model(
            whole.with_(n_layers=2), given, device="cpu", dtype="float32", hardware=hw
        )
        assert plan_for_layers(prepared, whole, work).decode == s


@pytest.mark.cpu
def test_few_layers_keep_resident_only_the_share_that_the_whole_model_could(folder, capsys):
    pytest.importorskip("torch")
    line = f"bench {folder} --load-format dummy {SMALL} --device cpu --json"

    def kept(flags, layers):
        code, out, err = _main(capsys, f"{line} {flags}")
        assert code == 0, err
        spec = mg.ModelSpec.from_pretrained(folder).with_(n_layers=layers)
        whole = spec.weight_bytes - spec.head_bytes
        return json.loads(out)["plan"]["decode"]["s_params"] / whole

    share = kept("", 4)
    assert 0 < share < 0.95
    assert kept("--layers 2", 2) == pytest.approx(share, rel=0.15)
    assert kept("--layers 2 --s-params 64KiB", 2) * 2 < share  # what is given stays


@pytest.mark.parametrize(
    ("flags", "reason"),
    [
        ("mixtral-8x7b", "mixtral-8x7b is no folder with a checkpoint: give one, or --load-format"),
        ("mixtral-8x7b --layers 2", "--layers needs --load-format dummy"),
        ("mixtral-8x7b --load-format dummy --gpu-memory much", "--gpu-memory: 'much'"),
        ("mixtral-8x7b --mixed 5", "--mixed takes MIN:MAX, such as 16:8192, got '5'"),
        ("mixtral-8x7b --mixed 9:5", "--mixed 9:5: MIN is at least 1 and at most MAX"),
        ("mixtral-8x7b --mixed 0:5", "--mixed 0:5: MIN is at least 1 and at most MAX"),
        ("mixtral-8x7b --mixed 9:9999999999999", ": MAX is at most 1099511627776"),
        ("mixtral-8x7b --omega nan", "'nan' is no number"),
        ("mixtral-8x7b --timeline /no/such/t.json", "--timeline: /no/such is no folder"),
    ],
)
def test_wrong_flags_are_refused_before_any_work(capsys, monkeypatch, flags, reason):
    code, out, err = _main(capsys, f"bench {flags}")
    assert (code, out) == (2, "") and reason in err


@pytest.mark.cpu
@pytest.mark.parametrize(
    ("flags", "code", "reason"),
    [
        ("mixtral-8x7b --host-memory 2GiB", 3, "does not fit host memory"),
        ("gpt-oss-20b", 2, "can be planned but not run"),
        ("mixtral-8x7b --layers 33", 2, "--layers: n_layers must be in 1..32, got 33"),
        (
            "mixtral-8x7b --layers 1 --mixed 16:32769",
            2,
            "--mixed: prompts of up to 32769 tokens are longer than mixtral-8x7b's context",
        ),
    ],
)
def test_what_cannot_be_measured_is_refused_before_weights_are_made(
    capsys, monkeypatch, flags, code, reason
):
    pytest.importorskip("torch")

    def began(*_, **__):
        raise AssertionError("the machine was measured, or weights were made")

    monkeypatch.setattr("moegen.exec.profile.machine_profile", began)
    monkeypatch.setattr("moegen.exec.weights.HostWeights.random", began)
    found, out, err = _main(capsys, f"bench {flags} --load-format dummy --device cpu")
    assert (found, out) == (code, "") and reason in err and "Traceback" not in err
