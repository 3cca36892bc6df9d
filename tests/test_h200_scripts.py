"""The scripts that measure on the GPU machine, each run here at a tiny size on CPU lanes."""

from __future__ import annotations

import importlib
import json
import stat
import sys
from pathlib import Path

import pytest

pytestmark = pytest.mark.cpu
torch = pytest.importorskip("torch")

FOLDER = Path(__file__).parents[1] / "benchmarks" / "h200"


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    """Runs a script in this process and gives its results; all go into one folder."""
    folder = tmp_path_factory.mktemp("results")
    sys.path.insert(0, str(FOLDER))

    def run(script: str, *flags: object, name: str | None = None, model: str = "tiny"):
        out = folder / f"{name or script}.json"
        common = [out, "--device", "cpu", "--model", model, "--layers", 2]
        importlib.import_module(script).main([str(x) for x in (*common, *flags)])
        # What a script writes is what the report is made of.
        report = importlib.import_module("report")
        run.report = report.report(folder)
        assert out.stem in {name for name, _ in report.SECTIONS}
        return json.loads(out.read_text(encoding="utf-8"))

    run.folder = folder
    yield run
    sys.path.remove(str(FOLDER))


def test_decode_bound(run):
    points = ("8:0.5:2:none", "8:1:4:whole", "8:0:2:none")
    sizes = ("--context", 20, "--prompt-len", 16, "--gen-len", 8, "--probe-rows", 8)
    for name in ("decode_bound", "decode_bound_whole"):
        d = run(
            "decode_bound", *sizes, "--steps", 3, "--each-s", 0, "--points", *points,
            "--timelines", points[0], name=name,
        )  # fmt: skip
    assert d["complete"] and len(d["points"]) == len(points)
    assert (run.folder / "timeline_omega0.5.json").exists()
    for p, point in zip(d["points"], points, strict=True):
        assert p["share_of_bound"] == pytest.approx(
            max(p["bound_parts_s"].values()) / p["period_s"]
        )
        assert p["bound_at_rates_alone_s"] > 0 and p["gpu_planned_bytes"] > 0
        # The period is over all but the first and the last step.
        assert p["period_s"] == pytest.approx(sum(p["steps_s"][:-1]) / 3)
        assert (p["strategy"]["s_params"] > 0) == point.endswith("whole")
    assert "## Decode of the whole model" in run.report and "## Memory of the points" in run.report


def test_largest_batch_is_what_host_memory_holds(run):
    from argparse import Namespace

    import decode_bound
    from harness import engine_of, model_of

    from moegen.graph.host_memory import held_bytes
    from moegen.graph.memory import memory
    from moegen.graph.workload import Workload

    flags = {"device": "cpu", "model": "tiny", "layers": 2, "gpu_memory": 2**22}
    args = Namespace(**flags, host_memory=held_bytes() + 2**26, prompt_len=400, gen_len=100)
    model, whole = model_of(args)
    with engine_of(args, model) as engine:
        hw = engine.prepared.capacities
        s = decode_bound.strategy_of(engine, whole, "max:0.5:2:none", args)
        for B, fits in ((s.B, True), (s.B + 1, False)):
            work = Workload.uniform(B, 400, 100)
            assert memory(model, hw, s.with_(B=B), work).host.fits == fits


def test_the_least_time_of_a_step_mixes_what_runs_side_by_side():
    sys.path.insert(0, str(FOLDER))
    import together

    from moegen.graph.task import Lane, Task, TaskId, Work

    rates = {
        "weights": {"weights": 5.0},
        "gather": {"gather": 4.0},
        "attention": {"attention": 10.0},
        "weights+gather": {"weights": 3.0, "gather": 2.0},
        "weights+attention": {"weights": 4.0, "attention": 8.0},
    }

    def least(weights, gather=0.0, attention=0.0):
        work = {"weights": weights, "gather": gather, "attention": attention}
        return pytest.approx(together.least_s(work, rates))

    assert least(100) == 20
    # 10 s of gathering beside copies, in which 30 of the 100 bytes cross; the rest at full speed.
    assert least(100, gather=20) == 10 + 70 / 5
    # 5 s of attention beside copies, then the copies that are left.
    assert least(100, attention=40) == 5 + 80 / 5
    # So little to copy that attention ends alone.
    assert least(8, attention=40) == 2 + 24 / 10

    def task(op, lane, **work):
        return Task(TaskId(op, "decode", 0, -1, -1, -1), lane, (), (), Work(**work))

    tasks = [
        task("copy_dense", Lane.BULK, h2d_bytes=100),
        task("recv_attn", Lane.ACT, h2d_bytes=3),
        task("fetch_kv", Lane.KV, h2d_bytes=20),
        task("attn_cpu", Lane.CPU, host_bytes=40),
    ]
    assert together.work_of(tasks) == {"weights": 103, "gather": 20, "attention": 40}


def test_cpu_attention(run):
    sizes = ("--B", 8, "--context", 40, "--longest", 64, "--latent-rows", 2, "--error-rows", 8)
    d = run("cpu_attention", "--threads", 2, 1, *sizes, "--each-s", 0)
    assert [p["threads"] for p in d["by_threads"]] in ([2, 1], [1])
    assert d["mixed"] and d["latent"] and len(d["errors"]) == 6
    for p in d["errors"]:
        assert p["appended"]
        assert p["within"] == (p["beyond_rounding"] < 1e-5)
        # torch rounds probabilities to the dtype, the compiled kernel only its output.
        assert p["within"] or (p["kind"] == "torch" and p["dtype"] != "float32")
    for p in (*d["by_threads"], *d["mixed"]):
        assert p["share_of_read"] == pytest.approx(p["kv_bytes_per_s"] / p["read_bytes_per_s"])
    assert "Absorbed latent" in run.report


def test_prefill(run):
    d = run(
        "prefill", "--wave-tokens", 64, 128, "--prompt-len", 16, "--mixed", 2, 40,
        "--part-tokens", 32, "--steps", 2, "--each-s", 0, "--job-tokens", 128,
    )  # fmt: skip
    assert [(p["kind"], p["tokens"]) for p in d["points"]] == [
        (kind, n) for n in (64, 128) for kind in ("uniform", "mixed")
    ]
    for p in d["points"]:
        assert p["flops_per_s"] == pytest.approx(sum(p["flops"].values()) / p["period_s"])
        assert p["streamed_bytes"] > 0
    uniform, mixed = d["jobs"]
    assert uniform["tokens"] == mixed["tokens"] == 128
    assert uniform["strategy"]["s_params"] == 0
    assert "Tokens/s that mixed prompts lose" in run.report


def test_peers(run):
    pytest.importorskip("accelerate")
    sizes = ("--prompt-len", 16, "--gen-len", 8, "--first-batch", 2, "--most-batch", 3)
    d = run("peers", *sizes)
    assert d["complete"] and d["largest_batch"] == 3 and d["smallest_that_fails"] is None
    assert d["pinned"]["B"] == d["pageable"]["B"] == 3
    assert d["pinned"]["tokens_per_s"] == pytest.approx(3 / d["pinned"]["step_s"])
    assert "One-shot prefill at that batch" in run.report


@pytest.mark.parametrize("limit", [0, 1, 37, 80, 100, 150, 1000])
def test_peers_search_finds_the_largest_batch(limit):
    sys.path.insert(0, str(FOLDER))
    from argparse import Namespace

    import peers

    args = Namespace(first_batch=80, most_batch=1000, precision=0.0, search_s=60)

    class Out:
        left_s = 60.0
        said: dict = {}

        def put(self, **values):
            self.said |= values

    tried = []
    out = Out()
    found = peers.largest(lambda B: tried.append(B) or B <= limit, args, out)
    assert found == limit and len(tried) < 25
    assert out.said["smallest_that_fails"] == (limit + 1 if limit < 1000 else None)


def test_small_batch(run):
    d = run("small_batch", "--B", 1, 4, "--context", 10, "--steps", 3, "--each-s", 0)
    assert len(d["points"]) == 12
    by = {(p["strategy"]["B"], p["strategy"]["fetch"], p["resident"]): p for p in d["points"]}
    for p in d["points"]:
        assert p["bound_s"] == pytest.approx(p["h2d_bytes"] / d["link_bytes_per_s"])
    # One row goes to 2 of 8 experts: that much less crosses the link.
    routed, every = (by[1, fetch, "none"]["weights_bytes"] for fetch in ("routed", "all"))
    assert routed < every / 2
    assert "## Small batches" in run.report


def test_long_run(run):
    d = run("long_run", "--B", 4, "--steps", 12, "--prompt-len", 5, "--seeds", 1, 2)
    assert d["complete"] and [r["seed"] for r in d["runs"]] == [None, 1, 2]
    assert all(r["same_tokens"] and r["tokens"] == 4 * 13 for r in d["runs"])
    assert len({r["sha256"] for r in d["runs"]}) == 1
    assert "## A long run" in run.report


def test_growth_is_seen():
    sys.path.insert(0, str(FOLDER))
    import long_run
    import numpy as np

    held = 1e9 + 4096.0 * np.arange(1000)
    assert long_run.growth(held)["slope_bytes_per_step"] == pytest.approx(4096)
    settled = np.where(np.arange(1000) < 50, 0.0, 1e9)
    assert long_run.growth(settled)["spread_bytes"] == 0


def test_memory(run):
    d = run("memory")
    assert d["complete"] and {p["what"] for p in d["points"]} == {"decode", "prefill", "job"}
    for p in d["points"]:
        assert p["gpu_planned_bytes"] == p["ledger"]["gpu"]["total_bytes"] > 0
        assert p["gpu_reserved_bytes"] is None  # no GPU here
    assert "## Memory, predicted" in run.report


def test_sanitizer_tells_clean_from_not(run, tmp_path):
    """A stand-in for compute-sanitizer that finds something in one of the models."""
    tool = tmp_path / "compute-sanitizer"
    tool.write_text(
        "#!/bin/bash\n"
        'if [[ "$*" == *tiny-latent* ]]; then\n'
        '  echo "=========     at some_kernel(float*)+0x10 in x.cu"\n'
        '  echo "========= ERROR SUMMARY: 1 error"; exit 97\n'
        "fi\n"
        'shift 6; "$@" || exit $?\n'
        'echo "========= ERROR SUMMARY: 0 errors"\n'
    )
    tool.chmod(tool.stat().st_mode | stat.S_IXUSR)
    d = run("sanitizer", "--command", tool, "--tools", "memcheck", "--steps", 3, "--each-s", 0)
    clean, found = d["runs"]
    assert clean["clean"] and clean["summary"] == ["ERROR SUMMARY: 0 errors"]
    assert not found["clean"] and found["exit_code"] == 97
    assert list(found["kernels"]) == ["some_kernel"]
    assert "1 of 2 runs clean | **no** |" in run.report


def test_report_holds_decode_against_peers(tmp_path):
    sys.path.insert(0, str(FOLDER))
    import report

    (tmp_path / "something.json").write_text("{}")
    assert "- `results/something.json`" in report.report(tmp_path)
    theirs = {"layers": 32, "pinned": {"tokens_per_s": 30.0}, "pageable": {"tokens_per_s": 5.0}}
    point = {"tokens_per_s": 600.0, "strategy": {"B": 1500, "omega": 0.5}}
    data = {"decode_bound_whole": {"layers": 32, "points": [point, point | {"tokens_per_s": 1.0}]}}
    text = "\n".join(report.speed.against_peers(theirs, data))
    assert "| as it comes | 5.00 | 120.0 |" in text
    assert "| parameters pinned by hand | 30.00 | 20.0 |" in text
    from targets import peers

    row = peers(theirs, data)
    assert row is not None and row[2]
    row = peers(theirs | {"pinned": {"tokens_per_s": 40.0}}, data)
    assert row is not None and not row[2] and "pinned 15.0" in row[1]


def test_run_all_keeps_what_a_stopped_script_had(run, tmp_path, monkeypatch):
    import run_all

    monkeypatch.setitem(run_all.RUNS, "quick", ("quick.py --budget-s 90", 50.0))
    monkeypatch.setitem(run_all.RUNS, "slow", ("slow.py", 1.5))
    monkeypatch.setattr(run_all, "HERE", tmp_path)
    body = (
        "import sys, time\nopen(sys.argv[1], 'w').write('[1]')\nprint(sys.argv[2:], flush=True)\n"
    )
    (tmp_path / "quick.py").write_text(body)
    (tmp_path / "slow.py").write_text(body + "time.sleep(60)\n")
    out = tmp_path / "out"
    code = run_all.main(
        [
            str(out),
            "quick",
            "slow",
            "--zip",
            str(tmp_path / "all.zip"),
            "--set",
            "quick=--m 3",
            "--host-memory",
            "9GiB",
        ]
    )
    assert code == 1
    ended = json.loads((out / "run_all.json").read_text())
    assert ended["quick"]["exit_code"] == 0 and ended["slow"]["exit_code"] is None
    assert (out / "slow.json").read_text() == "[1]"
    assert (
        "['--budget-s', '35', '--host-memory', '9GiB', '--m', '3']"
        in (out / "quick.log").read_text()
    )
    import zipfile

    names = set(zipfile.ZipFile(tmp_path / "all.zip").namelist())
    assert {"quick.json", "slow.json", "quick.log", "run_all.json"} <= names


def test_planned_pinned_bytes_are_those_that_a_run_asks_for(run, monkeypatch):
    from argparse import Namespace

    from harness import engine_of, model_of
    from meters import planned_pinned

    from moegen.exec import buffers
    from moegen.graph.build import build
    from moegen.graph.memory import memory
    from moegen.graph.strategy import Strategy
    from moegen.graph.workload import Workload

    asked = []
    host_buffer = buffers.host_buffer

    def counted(nbytes):
        asked.append(host_buffer(nbytes))
        return asked[-1]

    monkeypatch.setattr(buffers, "host_buffer", counted)
    args = Namespace(device="cpu", model="tiny", layers=2, gpu_memory=2**24, host_memory=None)
    model, _ = model_of(args)
    s = Strategy(B=6, b_a=2, b_e=8, omega=0.5)
    with engine_of(args, model) as engine:
        engine.execute(build(model, s, "decode", kv_len=9), steps=1)
        ledger = memory(model, engine.prepared.capacities, s, Workload.uniform(6, 9, 1))
        kv = 6 * 10 * model.kv_bytes_per_token
        taken = engine.weights.nbytes + kv + sum(t.nbytes for t in asked)
        assert planned_pinned(ledger, kv) == taken
