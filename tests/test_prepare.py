"""Before weights are loaded: what fits, by what is free; and going on where pinning fails."""

from __future__ import annotations

import pytest

pytestmark = pytest.mark.cpu
torch = pytest.importorskip("torch")
pytest.importorskip("transformers")

from tiny import tiny_mixtral  # noqa: E402

from moegen.errors import Infeasible, InvalidInput  # noqa: E402
from moegen.exec import pinning, prepare  # noqa: E402
from moegen.exec.engine import Engine  # noqa: E402
from moegen.exec.kv import KVStore  # noqa: E402
from moegen.exec.transfer import StagedTransfer, transfer_for  # noqa: E402
from moegen.exec.weights import HostWeights  # noqa: E402
from moegen.graph.hardware import HardwareSpec  # noqa: E402
from moegen.graph.sizes import packed_bytes  # noqa: E402
from moegen.graph.strategy import Strategy  # noqa: E402
from moegen.graph.workload import Workload  # noqa: E402

GIB, MIB = 2**30, 2**20
C2 = HardwareSpec.from_name("c2")
S = Strategy(B=4, b_a=2, b_e=16, omega=0.5)
WORK = Workload.uniform(n=4, prompt_len=8, gen_len=4)


@pytest.fixture
def path(tmp_path):
    return tiny_mixtral(tmp_path)[0]


@pytest.fixture
def loads_nothing(monkeypatch):
    monkeypatch.setattr(HostWeights, "load", lambda *a, **k: pytest.fail("weights were loaded"))


def test_a_plan_is_refused_before_anything_loads(path, loads_nothing):
    ready = Engine.prepare(path, S, device="cpu", gpu_memory_bytes=1000)
    with pytest.raises(Infeasible, match="does not fit gpu memory: needs .* of 1000 B") as e:
        ready.resolve(WORK)
    assert e.value.line == "gpu"


def test_host_memory_counts_this_process(path, loads_nothing):
    with pytest.raises(Infeasible, match=r"this process alone .* of 10.00 MiB, .* too much"):
        Engine.prepare(path, S, device="cpu", host_memory_bytes=10 * MIB)
    ready = Engine.prepare(path, S, device="cpu")
    tight = ready.process_bytes + 20 * MIB
    ready = Engine.prepare(path, S, device="cpu", host_memory_bytes=tight)
    ledger = ready.resolve(WORK).decode
    line = next(x for x in ledger.host.lines if x.name == "this process")
    assert line.bytes == ready.process_bytes > 50 * MIB


def test_weights_that_do_not_fit_are_not_read(path, loads_nothing):
    ready = Engine.prepare(path, S, device="cpu")
    # Other tests' memory comes and goes: room for a process that is a little larger.
    few = ready.process_bytes + packed_bytes(ready.model) // 2
    ready = Engine.prepare(path, S, device="cpu", host_memory_bytes=few)
    if ready.process_bytes + packed_bytes(ready.model) <= few:
        pytest.skip("this process has just become much smaller")
    with pytest.raises(Infeasible, match="does not fit host memory: .* biggest are"):
        ready.load()


def test_what_is_free_is_what_is_planned_with(path, monkeypatch):
    monkeypatch.setattr(prepare.host_memory, "free_bytes", lambda: (3 * GIB, "a test"))
    hw = Engine.prepare(path, S, device="cpu", hardware=C2).hardware
    weights = packed_bytes(Engine.prepare(path, S, device="cpu").model)
    # On CPU lanes the GPU's buffers are in host memory too.
    assert hw.host_memory_bytes + hw.gpu_memory_bytes == 3 * GIB
    assert hw.gpu_memory_bytes == (3 * GIB - weights) // 2
    assert hw.source["host_memory_bytes"] == "a test"
    assert "CPU lanes" in hw.source["gpu_memory_bytes"]
    # Rates are the given machine's, memories are not.
    assert hw.h2d_bytes_per_s == C2.h2d_bytes_per_s
    assert hw.source["h2d_bytes_per_s"] == C2.source["h2d_bytes_per_s"]


def test_a_given_gpu_memory_is_never_more_than_host_memory_has_room_for(path, monkeypatch):
    monkeypatch.setattr(prepare.host_memory, "free_bytes", lambda: (3 * GIB, "a test"))
    small = Engine.prepare(path, S, device="cpu", gpu_memory_bytes=GIB // 2).capacities
    assert (small.gpu_memory_bytes, small.host_memory_bytes) == (GIB // 2, 3 * GIB - GIB // 2)
    large = Engine.prepare(path, S, device="cpu", gpu_memory_bytes=90 * GIB).capacities
    assert large.gpu_memory_bytes + large.host_memory_bytes == 3 * GIB
    assert large.gpu_memory_bytes < 1.5 * GIB


def test_rates_are_measured_only_where_a_plan_is_chosen_by_them(path, monkeypatch):
    measured = []

    def profile(device, dtype, *, notes):
        measured.append((device.type, dtype))
        return C2

    monkeypatch.setattr("moegen.exec.profile.machine_profile", profile)
    for given in (S, {"omega": 0.25}, {"B": 2, "omega": 1}):
        Engine.prepare(path, given, device="cpu").resolve(WORK)
    assert measured == []
    ready = Engine.prepare(path, {"B": 2}, device="cpu", dtype="bfloat16")
    ready.resolve(WORK)
    ready.resolve(WORK)
    assert measured == [("cpu", torch.bfloat16)]


def test_prepared_without_a_checkpoint_has_nothing_to_load():
    from small_models import mixtral

    with pytest.raises(InvalidInput, match="no checkpoint to load"):
        prepare.Prepared.of_model(mixtral(), S, device="cpu").load()


# -- locked memory


def limits(monkeypatch, soft, hard, enforced=True):
    import resource

    now = [soft, hard]
    monkeypatch.setattr(resource, "getrlimit", lambda _: tuple(now))

    def setrlimit(_, wanted):
        now[:] = wanted

    monkeypatch.setattr(resource, "setrlimit", setrlimit)
    monkeypatch.setattr(pinning, "_enforced", lambda limit: enforced)
    return now


def test_a_limit_on_locked_memory_is_said_with_what_to_do(monkeypatch):
    limits(monkeypatch, 8 * MIB, 8 * MIB)
    problem = pinning.locking_problem(GIB)
    assert problem is not None
    assert "limit on locked memory is 8.00 MiB" in problem and "1.00 GiB are to be" in problem
    assert "1016.00 MiB more" in problem and "ulimit -l" in problem
    assert pinning.locking_problem(4 * MIB) is None


def test_a_limit_that_may_be_raised_is(monkeypatch):
    now = limits(monkeypatch, 8 * MIB, 2 * GIB)
    assert pinning.locking_problem(GIB) is None
    assert now == [2 * GIB, 2 * GIB]


def test_a_limit_that_the_driver_does_not_mind_is_no_problem(monkeypatch):
    limits(monkeypatch, 8 * MIB, 8 * MIB, enforced=False)
    assert pinning.locking_problem(GIB) is None


# -- going on without pinned memory


def refuse_pins(monkeypatch):
    monkeypatch.setattr(pinning.Pins, "register", lambda self, buffers: "a test says no")


def test_a_store_that_cannot_be_pinned_says_so(path, monkeypatch):
    refuse_pins(monkeypatch)
    model = Engine.prepare(path, S, device="cpu").model
    store = KVStore(model, 10, torch.float32, pin=True)
    assert (
        not store.pinned and "is not pinned" in str(store.note) and "a test says no" in store.note
    )
    assert KVStore(model, 10, torch.float32, pin=False).note is None


@pytest.mark.gpu
def test_a_run_without_pinned_memory_says_the_same(path, monkeypatch):
    prompts = [[5, 6, 7], [8], [9, 10, 11, 12, 13], [14, 15]]

    def answers():
        with Engine.from_pretrained(path, S, device="cuda", dtype="float32") as e:
            done = e.generate(prompts, 12, ignore_eos=True)
            return [x.token_ids for x in done], e.notes

    wanted, notes = answers()
    assert notes == []
    refuse_pins(monkeypatch)
    got, notes = answers()
    assert got == wanted
    assert len(notes) == 2 and "weights are not pinned" in notes[0] and "KV store" in notes[1]
    assert isinstance(transfer_for(torch.device("cuda"), pinned=False), StagedTransfer)


@pytest.mark.gpu
def test_what_is_free_on_the_gpu_is_planned_with(path):
    hw = Engine.prepare(path, S, device="cuda").capacities
    free, total = torch.cuda.mem_get_info()
    assert abs(hw.gpu_memory_bytes - free) < GIB and hw.gpu_memory_bytes < total


@pytest.mark.gpu
def test_the_peak_of_both_memories(path):
    with Engine.from_pretrained(path, S, device="cuda", dtype="float32") as e:
        e.generate([[5, 6, 7]], 3)
        peak = e.memory_peak()
    assert peak["host"] > 100 * MIB and peak["gpu"] > 0
