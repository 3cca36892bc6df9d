"""The quick machine profile: what it measures, when it trusts its file, what it does without."""

from __future__ import annotations

import itertools
import json
import subprocess
import sys
import textwrap
import time
from contextlib import closing
from pathlib import Path

import pytest

torch = pytest.importorskip("torch")
pytest.importorskip("transformers")

from small_models import mixtral  # noqa: E402

import moegen.exec.profile as profile  # noqa: E402
from moegen.cache import cache_folder  # noqa: E402
from moegen.exec import rates  # noqa: E402
from moegen.exec.attention import DecodeShape  # noqa: E402
from moegen.exec.decode_attention import cpu_decode  # noqa: E402
from moegen.exec.lanes import peak_gpu_memory  # noqa: E402
from moegen.exec.profile import RATES, machine_profile  # noqa: E402
from moegen.exec.timing import Bench, undisturbed  # noqa: E402
from moegen.graph.build import build  # noqa: E402
from moegen.graph.detect import detect  # noqa: E402
from moegen.graph.sound import sound_plan  # noqa: E402
from moegen.graph.strategy import Strategy  # noqa: E402
from moegen.graph.task import Lane  # noqa: E402
from moegen.graph.workload import Workload  # noqa: E402
from moegen.sim.cost import CostModel  # noqa: E402
from moegen.sim.engine import simulate  # noqa: E402

pytestmark = pytest.mark.cpu
CPU, F32 = torch.device("cpu"), torch.float32
MEASURED = [name for name in RATES if name != "duplex_bytes_per_s"]


@pytest.fixture
def cache(tmp_path, monkeypatch) -> Path:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    return tmp_path / "moegen" / "profiles"


@pytest.fixture
def measured(monkeypatch) -> list[float]:
    """Measuring takes no time and gives another link each time; the links it gave."""
    given: list[float] = []

    def measure(device, dtype, here):
        given.append(1e9 * (len(given) + 1))
        found = {k: (getattr(here, k), "measured: made up on 2026-01-01") for k in MEASURED}
        return found | {"h2d_bytes_per_s": (given[-1], "measured: counted on 2026-01-01")}

    monkeypatch.setattr(profile, "_measure", measure)
    return given


@pytest.fixture(scope="module")
def real(tmp_path_factory):
    """A profile of this very machine, and its file."""
    with pytest.MonkeyPatch.context() as patch:
        home = tmp_path_factory.mktemp("cache")
        patch.setenv("XDG_CACHE_HOME", str(home))
        hw = machine_profile(CPU, F32)
        (file,) = (home / "moegen" / "profiles").iterdir()
    return hw, file


# -- measuring -----------------------------------------------------------------------


def test_every_rate_is_measured_and_says_how_and_when(real):
    hw, _ = real
    today = time.strftime("%Y-%m-%d")
    for name in MEASURED:
        assert hw.kind(name) == "measured", name
        assert today[:7] in hw.source[name]
    assert hw.kind("host_memory_bytes") == detect().kind("host_memory_bytes") != "measured"
    assert hw.gpu_name == "none (CPU lanes)"


def test_the_curve_rises_to_the_peak(real):
    curve = real[0].gpu_efficiency
    tokens, shares = zip(*curve, strict=True)
    assert tokens[0] == 1 and list(tokens) == sorted(set(tokens))
    assert list(shares) == sorted(shares) and shares[-1] == 1


def test_rates_are_those_of_a_computer(real):
    hw, _ = real
    for name in ("h2d_bytes_per_s", "d2h_bytes_per_s", "zero_copy_bytes_per_s"):
        assert 1e8 < getattr(hw, name) < 1e12, name
    for name in ("gpu_bytes_per_s", "cpu_attn_bytes_per_s", "host_bytes_per_s"):
        assert 5e7 < getattr(hw, name) < 2e12, name
    for name in ("gpu_flops", "cpu_attn_flops"):
        assert 1e9 < getattr(hw, name) < 1e14, name
    for name in ("copy_latency_s", "launch_s", "task_s"):
        assert getattr(hw, name) > 1e-7, name


def test_the_file_can_be_read_by_a_person(real):
    hw, file = real
    data = json.loads(file.read_text())
    assert len(file.read_text().splitlines()) > 30
    assert data["key"]["torch"] == str(torch.__version__)
    assert data["rates"]["h2d_bytes_per_s"] == {
        "value": hw.h2d_bytes_per_s,
        "source": hw.source["h2d_bytes_per_s"],
    }


def test_plans_and_predictions_take_it(real):
    hw, model = real[0], mixtral()
    plan = sound_plan(model, hw, Workload.uniform(n=8, prompt_len=16, gen_len=8))
    g = build(model, plan.decode, "decode", kv_len=16)
    assert simulate(g, CostModel.roofline(hw)).makespan_s > 10 * hw.task_s


def test_a_step_of_nothing_lasts_what_the_executors_did():
    """Host code is one thread's for all lanes: the tasks of a small step follow one another."""
    found = profile.host_code(CPU, F32, detect())
    task_s, how = found["task_s"]
    hw = detect().with_(task_s=task_s, launch_s=1e-7, copy_latency_s=1e-7)
    model = mixtral()
    s = Strategy(B=4, b_a=1, b_e=64, s_expert=4 * model.expert_bytes, omega=0.5)
    g = build(model, s, "decode", kv_len=16)
    assert f"over its {len(g)} tasks" in how
    predicted = simulate(g, CostModel.roofline(hw), steps=4).period_s
    assert predicted == pytest.approx(task_s * len(g), rel=0.1)


def test_work_beside_goes_on_as_long_as_it_is_measured_and_no_longer():
    done = itertools.count()
    with Bench(CPU) as bench:
        seconds = bench.seconds(
            Lane.GPU, lambda: time.sleep(0.005), beside=(Lane.BULK, lambda: next(done))
        )
        during = next(done)
        time.sleep(0.01)
        assert next(done) == during + 1
    assert seconds >= 0.005
    assert during > 1


@pytest.mark.parametrize("side", ["work", "company"])
def test_work_that_fails_is_no_measurement(side):
    def fail() -> None:
        raise ValueError("as asked")

    work, company = (fail, int) if side == "work" else (int, fail)
    with pytest.raises(ValueError, match="as asked"), Bench(CPU) as bench:
        bench.seconds(Lane.GPU, work, beside=(Lane.BULK, company))


def test_a_product_too_slow_ends_the_curve(monkeypatch):
    class Slow(Bench):
        def seconds(self, lane, work, **_):
            return next(times)

    times = itertools.cycle([0.01, 0.08])
    products = rates.Products(F32, CPU, 8, 8)
    with Slow(CPU) as bench:
        found = rates.product_curve(bench, products, (1, 8, 64))
    # 64 tokens would take 0.64 s
    assert found["gpu_efficiency"][0] == ((1, 1.0), (8, 1.0))
    assert found["gpu_flops"][0] == pytest.approx(6 * 64 / 0.01)


def test_other_processes_do_not_count():
    assert undisturbed([5.0, 1.0, 1.1, 9.0]) == 1.0
    assert undisturbed([3.0]) == 3.0


def test_a_gpu_without_memory_is_said_with_the_remedy(cache, monkeypatch):
    def fail(dtype):
        raise torch.OutOfMemoryError("CUDA out of memory")

    monkeypatch.setattr(rates, "cpu_lanes", fail)
    with pytest.raises(profile.MachineError, match="out of memory.*hardware=HardwareSpec"):
        machine_profile(CPU, F32)


# -- keeping -------------------------------------------------------------------------


def test_it_is_measured_once(cache, measured):
    first = machine_profile(CPU, F32)
    again = machine_profile(CPU, F32)
    assert again == first and again.source == first.source
    assert len(measured) == 1
    assert [path.suffix for path in cache.iterdir()] == [".json"]


def test_it_is_measured_anew_when_asked_and_what_was_kept_stays(cache, measured):
    """A machine may be busy when it is profiled; runs go on by what they know."""
    machine_profile(CPU, F32)
    assert machine_profile(CPU, F32, fresh=True).h2d_bytes_per_s == measured[1]
    assert machine_profile(CPU, F32).h2d_bytes_per_s == measured[0]


def test_each_kernel_of_the_cpus_attention_has_its_own(cache, measured, monkeypatch):
    machine_profile(CPU, F32)
    monkeypatch.setenv("MOEGEN_CPU_ATTENTION", "torch")
    machine_profile(CPU, F32)
    machine_profile(CPU, F32)
    assert len(measured) == 2


def test_a_row_costs_more_by_torch_than_by_a_kernel():
    shape = DecodeShape(4, 2, 16, 16, False, 0.25)
    costs = []
    for kind in ("portable", "torch"):
        with closing(cpu_decode(1, kind)) as decode:
            seconds, how = rates.short_row(shape, F32, decode)
            assert kind in how
            costs.append(seconds)
    assert 0 < costs[0] < costs[1] < 1e-2


def test_capacities_are_those_of_now(cache, measured, monkeypatch):
    machine_profile(CPU, F32)
    less = detect().with_(host_memory_bytes=5e9)
    monkeypatch.setattr(profile, "detect", lambda: less)
    hw = machine_profile(CPU, F32)
    assert hw.host_memory_bytes == 5e9 and hw.kind("host_memory_bytes") == "set by the caller"
    assert len(measured) == 1


def test_each_dtype_and_number_of_threads_has_its_own(cache, measured):
    machine_profile(CPU, F32)
    machine_profile(CPU, torch.bfloat16)
    before = torch.get_num_threads()
    try:
        torch.set_num_threads(before + 1)
        machine_profile(CPU, F32)
    finally:
        torch.set_num_threads(before)
    assert len(measured) == len(list(cache.iterdir())) == 3
    assert machine_profile(CPU, F32).h2d_bytes_per_s == measured[0]


def test_each_gpu_pinned_or_not_has_its_own(cache, monkeypatch):
    device, names = torch.device("cuda", 0), set()
    for gpu in ("H200 GPU-1", "H200 GPU-2"):
        monkeypatch.setattr(profile, "gpu_identity", lambda _, gpu=gpu: gpu)
        for problem in (None, "the limit is low"):
            monkeypatch.setattr(profile, "locking_problem", lambda _, problem=problem: problem)
            key = profile._key(device, F32, detect())
            assert (key["gpu"], key["pinned"]) == (gpu, problem is None)
            names.add(profile._path(key))
    assert len(names) == 4 and {path.parent for path in names} == {cache}


def _cut(text: str) -> str:
    return text[: len(text) // 2]


def _edit(*where: str, to) -> object:
    def edit(text: str) -> str:
        data = at = json.loads(text)
        for key in where[:-1]:
            at = at[key]
        if to is None:
            del at[where[-1]]
        else:
            at[where[-1]] = to
        return json.dumps(data)

    return edit


DAMAGE = {
    "cut short": _cut,
    "empty": lambda text: "",
    "no JSON": lambda text: "profile",
    "a list": lambda text: "[1, 2]",
    "null": lambda text: "null",
    "no rates": _edit("rates", to=None),
    "rates of another kind": _edit("rates", to=[1]),
    "a rate is missing": _edit("rates", "launch_s", to=None),
    "a rate too many": _edit("rates", "gpu_name", to={"value": "x", "source": "measured: x"}),
    "a rate without value": _edit("rates", "launch_s", "value", to=None),
    "a rate of zero": _edit("rates", "gpu_flops", "value", to=0),
    "a rate without end": _edit("rates", "gpu_flops", "value", to=float("inf")),
    "a text for a rate": _edit("rates", "gpu_flops", "value", to="fast"),
    "a curve that falls": _edit("rates", "gpu_efficiency", "value", to=[[1, 0.5], [8, 0.4]]),
    "a curve above one": _edit("rates", "gpu_efficiency", "value", to=[[1, 0.5], [8, 1.5]]),
    "a rate that is assumed": _edit("rates", "launch_s", "source", to="assumed: 1 s"),
    "another torch": _edit("key", "torch", to="1.0"),
    "another moegen": _edit("key", "moegen", to="0.0"),
    "another format": _edit("key", "format", to=0),
    "another machine": _edit("key", "host", to="elsewhere"),
    "no key": _edit("key", to=None),
}


@pytest.mark.parametrize("damage", DAMAGE.values(), ids=DAMAGE.keys())
def test_a_file_that_is_damaged_or_of_others_is_replaced(cache, measured, damage):
    machine_profile(CPU, F32)
    (file,) = cache.iterdir()
    file.write_text(damage(file.read_text()))
    assert machine_profile(CPU, F32).h2d_bytes_per_s == measured[1]
    assert machine_profile(CPU, F32).h2d_bytes_per_s == measured[1]
    assert len(measured) == 2 and list(cache.iterdir()) == [file]


def test_bytes_that_are_no_text_are_replaced(cache, measured):
    machine_profile(CPU, F32)
    (file,) = cache.iterdir()
    file.write_bytes(b"\xff\xfe\x00")
    assert machine_profile(CPU, F32).h2d_bytes_per_s == measured[1]


def test_a_cache_that_cannot_be_written_is_no_error(tmp_path, monkeypatch, measured):
    (tmp_path / "file").write_text("in the way")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "file"))
    for n in (1, 2):
        notes = []
        assert machine_profile(CPU, F32, notes=notes).h2d_bytes_per_s == measured[-1]
        assert len(measured) == n
        assert len(notes) == 1 and "could not be kept" in notes[0] and "file" in notes[0]


def test_without_a_home_it_is_measured_all_the_same(monkeypatch, measured):
    def homeless() -> Path:
        raise RuntimeError("Could not determine home directory.")

    monkeypatch.setattr(profile, "cache_folder", homeless)
    notes = []
    assert machine_profile(CPU, F32, notes=notes).h2d_bytes_per_s == measured[0]
    assert len(notes) == 1 and "home directory" in notes[0]


def test_two_processes_at_once_leave_one_whole_profile(cache, measured):
    machine_profile(CPU, F32)
    (file,) = cache.iterdir()
    code = """
        import sys
        from pathlib import Path
        from moegen.exec import profile
        found = {"launch_s": (float(sys.argv[2]), "measured: x " * 2000)}
        for _ in range(300):
            assert profile._write(Path(sys.argv[1]), {"of": sys.argv[2]}, found) is None
    """
    writers = [
        subprocess.Popen([sys.executable, "-c", textwrap.dedent(code), str(file), str(n)])
        for n in (1, 2)
    ]
    seen = set()
    while any(w.poll() is None for w in writers):
        data = json.loads(file.read_text())  # whole at any time
        if "of" in data["key"]:
            assert data["rates"]["launch_s"]["value"] == float(data["key"]["of"])
            seen.add(data["key"]["of"])
        time.sleep(1e-3)
    assert [w.returncode for w in writers] == [0, 0]
    assert seen and list(cache.iterdir()) == [file]


def test_a_relative_cache_home_is_ignored(monkeypatch, tmp_path):
    monkeypatch.setenv("XDG_CACHE_HOME", "here")
    monkeypatch.delenv("LOCALAPPDATA", raising=False)
    monkeypatch.setattr(Path, "home", lambda: tmp_path)
    assert cache_folder().is_relative_to(tmp_path)


# -- on a GPU ------------------------------------------------------------------------


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_a_gpu_is_measured(cache, dtype):
    device = torch.device("cuda", 0)
    stream = torch.cuda.current_stream()
    hw = machine_profile(device, dtype)
    assert torch.cuda.current_stream() == stream
    there = [name for name in RATES if getattr(hw, name) is not None]
    assert all(hw.kind(name) == "measured" for name in there) and len(there) > len(RATES) - 2
    assert hw.gpu_name == detect().gpu_name
    assert hw.gpu_flops > 5e12 and hw.gpu_bytes_per_s > 1e11
    assert 2e9 < hw.zero_copy_bytes_per_s < 1e12 and 2e9 < hw.h2d_bytes_per_s < 1e12
    assert hw.duplex_bytes_per_s is not None
    assert hw.duplex_bytes_per_s <= 1.1 * max(hw.h2d_bytes_per_s, hw.d2h_bytes_per_s)
    assert hw.efficiency(1) < 0.5 * hw.efficiency(4096)
    assert hw.cpu_attn_bytes_per_s > 1e8
    assert 1e-6 < hw.launch_s < 1e-4 and 1e-6 < hw.copy_latency_s < 1e-4
    assert 2e-5 < hw.task_s < 1e-2
    # What measuring took of the GPU is not the run's.
    assert peak_gpu_memory(device) < 256e6
    assert machine_profile(device, dtype) == hw
