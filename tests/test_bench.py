"""``moegen bench``: two phases measured on a small model, and the arithmetic around it."""

from __future__ import annotations

import json

import pytest
from small_models import MIXTRAL

import moegen as mg
from moegen.cli import main

SMALL = "--prompt-len 12 --gen-len 8 --n 6 --steps 3 --gpu-memory 2MiB"


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
    assert decode["tokens_per_s"] == pytest.approx(6 / timeline.period_s)
    assert prefill["tokens"] == 12 * found["plan"]["prefill"]["B"]
    for phase in (prefill, decode):
        assert 0 < phase["share_of_bound"] == phase["bound_s"] / phase["measured_s"]
        assert phase["error"] == pytest.approx(phase["predicted_s"] / phase["measured_s"] - 1)
    frame = timeline.to_frame()
    attention = decode["reached"]["CPU attention"]
    cpu = frame[(frame.lane == "CPU") & (frame.step == 1)]  # of three, the one that counts
    assert attention["per_step"] == pytest.approx(cpu.host_bytes.sum())
    assert attention["busy_per_s"] == pytest.approx(cpu.host_bytes.sum() / cpu.duration_s.sum())
    for phase in (prefill, decode):
        for r in phase["reached"].values():
            assert r["per_s"] == pytest.approx(r["busy_share"] * r["busy_per_s"])
            assert 0 < r["busy_share"] <= 1
            assert r["per_s"] == pytest.approx(r["per_step"] / phase["measured_s"])
    assert "CPU attention" not in prefill["reached"]

    code, out, err = _main(capsys, line)
    assert code == 0 and "% of it reached" in out and "4 of 4 layers, random weights" in err


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
    assert 0 < share < 0.9
    assert kept("--layers 2", 2) == pytest.approx(share, rel=0.15)
    assert kept("--layers 2 --s-params 64KiB", 2) * 2 < share  # what is given stays


@pytest.mark.parametrize(
    ("flags", "reason"),
    [
        ("mixtral-8x7b", "mixtral-8x7b is no folder with a checkpoint: give one, or --load-format"),
        ("mixtral-8x7b --layers 2", "--layers needs --load-format dummy"),
        ("mixtral-8x7b --load-format dummy --gpu-memory much", "--gpu-memory: 'much'"),
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
        ("mixtral-8x7b --layers 33", 2, "1..32"),
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
