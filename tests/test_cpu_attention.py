"""The CPU's decode attention against float64: every variant, shape, dtype and way to fail."""

from __future__ import annotations

import os
import random
import shutil
import subprocess
import sys
import threading
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

pytestmark = pytest.mark.cpu
torch = pytest.importorskip("torch")

from moegen.errors import InvalidInput, MachineError  # noqa: E402
from moegen.exec import torch_attention  # noqa: E402
from moegen.exec.attention import DecodeShape  # noqa: E402
from moegen.exec.decode_attention import CompiledDecode, cpu_decode  # noqa: E402
from moegen.exec.kernels import cpu_attention  # noqa: E402
from moegen.exec.prepare import Prepared  # noqa: E402
from moegen.exec.torch_attention import TorchDecode  # noqa: E402
from moegen.graph.memory import cpu_stretches  # noqa: E402
from moegen.graph.model import ModelSpec  # noqa: E402

F32, BF16, F16 = torch.float32, torch.bfloat16, torch.float16
#: What rounding to nearest moves a number by at most, of its size.
ROUNDING = {BF16: 2**-8, F16: 2**-11}
NAMES = ["AMX", "AVX-512 BF16", "AVX-512", "AVX2", "portable", "portable16"]
NAMES += ["portable tiles", "torch"]
GQA = DecodeShape(8, 2, 64, 64, False, 0.125)
LATENT = DecodeShape(6, 1, 40, 32, True, 0.2)


@pytest.fixture(scope="session")
def library():
    """All variants, the 16-lane logic among them where this machine has no AVX-512."""
    try:
        return cpu_attention.library("-DMOEGEN_WIDE_ANYWHERE")
    except cpu_attention.Unavailable as e:
        if "CI" in os.environ:  # where nothing may be skipped unseen
            raise
        pytest.skip(str(e))


@pytest.fixture(scope="session")
def make(library):
    def make(name: str, threads: int = 1):
        if name == "torch":
            return TorchDecode(threads)
        if name not in library.variants:
            pytest.skip(f"no {name} on this machine")
        return CompiledDecode(library, name, threads)

    return make


class Case:
    """Rows of a store, in a shuffled order with gaps of NaN between them."""

    def __init__(self, shape, lengths, dtype=F32, seed=0, spread=3.0):
        g = torch.Generator().manual_seed(seed)
        rng = np.random.default_rng(seed)
        self.shape, rows = shape, len(lengths)
        self.length = np.array(lengths, dtype=np.int64)
        self.start = np.zeros(rows, dtype=np.int64)
        at = 1
        for r in rng.permutation(rows):
            self.start[r] = at
            at += lengths[r] + 1
        self.store = torch.full((at, shape.kv_width), torch.nan, dtype=dtype)
        for a, n in zip(self.start, self.length, strict=True):
            # The new token is the kernel's to write.
            self.store[a : a + n - 1] = torch.randn(n - 1, shape.kv_width, generator=g).to(dtype)
        self.q = (spread * torch.randn(rows, shape.n_heads * shape.dk, generator=g)).to(dtype)
        self.new = torch.randn(rows, shape.kv_width, generator=g).to(dtype)

    def run(self, attend) -> torch.Tensor:
        store = self.store.clone()
        out = torch.full((len(self.start), self.shape.n_heads * self.shape.dv), 7.0).to(store.dtype)
        attend.attend(self.shape, self.q, self.new, store, self.start, self.length, out)
        wanted = self.written()
        assert torch.equal(store.nan_to_num(9e4), wanted.nan_to_num(9e4))
        return out

    def written(self) -> torch.Tensor:
        store = self.store.clone()
        store[self.start + self.length - 1] = self.new
        return store

    def exact(self) -> torch.Tensor:
        """In float64, and row by row."""
        s, store, out = self.shape, self.written().double(), []
        for r, (a, n) in enumerate(zip(self.start, self.length, strict=True)):
            seen = n if s.window is None else min(n, s.window)
            kv = store[a + n - seen : a + n]
            if s.latent:
                k, v = kv[:, None], kv[:, None, : s.dv]
            else:
                k, v = kv.split([s.n_kv_heads * s.dk, s.n_kv_heads * s.dv], dim=1)
                k, v = k.unflatten(1, (-1, s.dk)), v.unflatten(1, (-1, s.dv))
            group = s.n_heads // k.shape[1]
            k, v = (t.repeat_interleave(group, 1) for t in (k, v))
            scores = torch.einsum("hd,nhd->hn", self.q[r].double().view(-1, s.dk), k) * s.scale
            if s.sinks is not None:
                scores = torch.cat((scores, s.sinks.double()[:, None]), dim=1)
            weights = scores.softmax(-1)[:, : len(kv)]
            out.append(torch.einsum("hn,nhd->hd", weights, v).flatten())
        return torch.stack(out)

    def check(self, attend) -> torch.Tensor:
        got, wanted = self.run(attend), self.exact()
        dtype = got.dtype
        if dtype == F32:
            torch.testing.assert_close(got.double(), wanted, rtol=0, atol=1e-5)
        else:
            # The kernel rounds its output, and nothing else; torch its weights too.
            times, beside = (1, 1e-5) if isinstance(attend, CompiledDecode) else (3, 1e-2)
            rtol = ROUNDING[dtype] * times
            torch.testing.assert_close(got.double(), wanted, rtol=rtol, atol=beside)
        return got


MIXED = [1, 300, 2, 17, 17, 64, 1, 33, 32, 31, 299, 5]
SHAPES = {
    "gqa": DecodeShape(8, 2, 128, 128, False, 128**-0.5),
    "mha": DecodeShape(3, 3, 64, 64, False, 0.125),
    "pairs": DecodeShape(4, 2, 96, 96, False, 0.1),
    "groups of 5": DecodeShape(5, 1, 80, 80, False, 0.1),
    "groups of 7": DecodeShape(14, 2, 112, 112, False, 0.1),
    "a group of 64": DecodeShape(64, 1, 64, 64, False, 0.125),
    "odd widths": DecodeShape(6, 2, 24, 20, False, 0.2),
    "of 7": DecodeShape(2, 1, 7, 5, False, 0.4),
    "wide": DecodeShape(4, 1, 256, 256, False, 1 / 16),
    "latent": DecodeShape(16, 1, 576, 512, True, 576**-0.5),
    "small latent": DecodeShape(5, 1, 40, 32, True, 0.2),
    "odd latent": DecodeShape(4, 1, 31, 23, True, 0.2),
    "window": DecodeShape(8, 2, 64, 64, False, 0.125, window=40),
    "window of 1": DecodeShape(8, 2, 64, 64, False, 0.125, window=1),
    "sinks": DecodeShape(8, 2, 64, 64, False, 0.125, sinks=torch.linspace(-3, 9, 8)),
    "latent sinks": DecodeShape(4, 1, 64, 48, True, 0.2, 9, torch.linspace(-3, 9, 4)),
}


@pytest.mark.parametrize("dtype", [F32, BF16, F16], ids=str)
@pytest.mark.parametrize("shape", SHAPES.values(), ids=SHAPES)
@pytest.mark.parametrize("name", NAMES)
def test_shapes(make, name, shape, dtype):
    with closing(make(name)) as attend:
        Case(shape, MIXED, dtype).check(attend)


@pytest.mark.parametrize("name", NAMES)
def test_lengths_of_1_to_4096(make, name):
    lengths = [1, 4096, 1023, 1024, 1025, 2049, 3000, 7, 2048, 640, 4095]
    shape = DecodeShape(4, 1, 32, 32, False, 0.2, sinks=torch.tensor([0.0, 1.0, -1.0, 5.0]))
    for each in (shape, replace(shape, window=1500), replace(LATENT, sinks=None)):
        with closing(make(name, 2)) as attend:
            Case(each, lengths).check(attend)


@given(
    kv_heads=st.integers(1, 3),
    group=st.integers(1, 9),
    dk=st.integers(1, 70),
    dv=st.integers(1, 70),
    latent=st.booleans(),
    lengths=st.lists(st.integers(1, 140), min_size=1, max_size=5),
    window=st.none() | st.integers(1, 150),
    sinks=st.booleans(),
    dtype=st.sampled_from([F32, BF16, F16]),
    name=st.sampled_from(NAMES[3:-1]),
    seed=st.integers(0, 99),
)
@settings(max_examples=80)
def test_any_shape(
    make, kv_heads, group, dk, dv, latent, lengths, window, sinks, dtype, name, seed
):
    if latent:
        kv_heads, dk = 1, dk + dv
    heads = kv_heads * group
    logits = torch.randn(heads) if sinks else None
    shape = DecodeShape(heads, kv_heads, dk, dv, latent, dk**-0.5, window, logits)
    with closing(make(name)) as attend:
        Case(shape, lengths, dtype, seed, spread=1.0).check(attend)


@pytest.mark.parametrize("name", NAMES[:-1])
def test_float16_numbers_of_every_kind(make, name):
    """With one token the output is its value: every float16 number comes back."""
    kinds = torch.arange(-(2**15), 2**15, dtype=torch.int32).to(torch.int16).view(F16)
    finite = kinds[kinds.isfinite()].view(-1, 64)
    shape = DecodeShape(1, 1, 64, 64, False, 0.0)
    new = torch.cat((torch.zeros_like(finite), finite), dim=1)
    store, out = torch.zeros_like(new), torch.empty_like(finite)
    rows = np.arange(len(new))
    with closing(make(name)) as attend:
        attend.attend(shape, torch.zeros_like(finite), new, store, rows, np.ones_like(rows), out)
    assert torch.equal(out, finite)


@pytest.mark.parametrize("name", NAMES[:-1])
@pytest.mark.parametrize("dtype", [BF16, F16])
def test_outputs_are_rounded_to_the_nearest(make, name, dtype):
    torch.manual_seed(0)
    # Two tokens of equal weight: the output is their mean, which is exact in float32.
    shape = DecodeShape(1, 1, 64, 64, False, 0.0)
    new, store = torch.randn(50, 128).to(dtype), torch.zeros(100, 128, dtype=dtype)
    store[::2] = torch.randn(50, 128).to(dtype)
    wanted = ((store[::2, 64:].float() + new[:, 64:].float()) / 2).to(dtype)
    out = torch.empty(50, 64, dtype=dtype)
    with closing(make(name)) as attend:
        start = np.arange(0, 100, 2)
        attend.attend(shape, torch.ones_like(out), new, store, start, np.full(50, 2), out)
    assert torch.equal(out, wanted)


@pytest.mark.parametrize("name", NAMES)
def test_large_scores_neither_overflow_nor_lose_the_softmax(make, name):
    case = Case(replace(GQA, scale=40.0), [200, 3])
    with closing(make(name)) as attend:
        got = case.run(attend)
    # One token takes nearly all of the weight: what is left is the value's rounding, and that
    # of scores of some ten thousand.
    torch.testing.assert_close(got.double(), case.exact(), rtol=0, atol=0.05)


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("where", ["key", "value"])
def test_what_is_no_number_reaches_the_output_of_its_row_alone(make, name, where):
    case = Case(GQA, [50, 40])
    column = 3 if where == "key" else 128 + 3
    case.store[case.start[0] + 20, column] = torch.nan
    with closing(make(name)) as attend:
        out = case.run(attend).view(2, 8, 64)
    assert out[0, :4].isnan().any() and not out[0, 4:].isnan().any() and not out[1].isnan().any()


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("shape", [GQA, LATENT], ids=["gqa", "latent"])
def test_threads_change_no_bit(make, name, shape):
    case = Case(shape, [*MIXED, 2500, 3, 1100, 4096], BF16)
    outs = []
    for threads in (1, 2, 3, 16):
        with closing(make(name, threads)) as attend:
            outs += [case.run(attend), case.run(attend)]
    assert all(torch.equal(out, outs[0]) for out in outs)


CUT_BY_HEADS = {
    "4 key heads": DecodeShape(16, 4, 64, 64, False, 0.125),
    "6 key heads": DecodeShape(30, 6, 48, 32, False, 0.125),
    "2 key heads": DecodeShape(4, 2, 128, 64, False, 0.1, 650, torch.linspace(-3, 5, 4)),
    "one key head": DecodeShape(70, 1, 96, 80, False, 0.1),
    "latent": DecodeShape(64, 1, 96, 64, True, 0.1),
    "odd latent": DecodeShape(33, 1, 111, 93, True, 0.1, sinks=torch.linspace(-3, 5, 33)),
}


@pytest.mark.parametrize("dtype", [F32, BF16, F16], ids=str)
@pytest.mark.parametrize("shape", CUT_BY_HEADS.values(), ids=CUT_BY_HEADS)
@pytest.mark.parametrize("name", NAMES[:-1])
def test_units_that_are_cut_by_heads_change_no_bit(make, name, shape, dtype):
    """The last units, as many as threads: none with one thread, some with 3, all with 16."""
    case = Case(shape, [700, 3, 700, 1500, 640, 1025, 700], dtype)
    with closing(make(name)) as attend:
        whole = case.check(attend)
    for threads in (3, 16):
        with closing(make(name, threads)) as attend:
            assert all(torch.equal(case.run(attend), whole) for _ in range(3)), threads


@pytest.mark.parametrize("cores", [2, 3, 4])
def test_threads_where_cores_are_few(make, cores):
    """With a thread for each core but one the caller only waits; else it works too."""
    have = os.sched_getaffinity(0)
    if len(have) < cores:
        pytest.skip(f"fewer than {cores} cores")
    case = Case(GQA, [*MIXED, 1500], BF16)
    with closing(make("portable")) as attend:
        wanted = case.run(attend)
    os.sched_setaffinity(0, sorted(have)[:cores])
    try:
        for threads in range(2, cores + 2):
            with closing(make("portable", threads)) as attend:
                assert all(torch.equal(case.run(attend), wanted) for _ in range(20))
    finally:
        os.sched_setaffinity(0, have)


def test_the_ledger_knows_how_rows_are_cut(library):
    stretches = library.functions.moegen_stretches
    for n in (*range(1, 9000), 65535, 65536, 65537, 10**6):
        assert 0 <= cpu_stretches(n) - stretches(n) <= cpu_stretches(n) // 8
        assert n > 1024 or stretches(n) == 1
    for n in range(1, 64):
        assert stretches(1024 * n) == cpu_stretches(1024 * n) == n


@pytest.mark.parametrize("name", NAMES)
def test_no_rows_and_padded_buffers(make, name):
    with closing(make(name, 2)) as attend:
        none = np.empty(0, dtype=np.int64)
        empty = [torch.empty(0, n) for n in (512, 256, 512)]
        attend.attend(GQA, empty[0], empty[1], torch.empty(5, 256), none, none, empty[2])
        case = Case(GQA, [5, 9, 33])
        q, new = (torch.nn.functional.pad(t, (0, 24)) for t in (case.q, case.new))
        out = torch.full((3, 600), 7.0)
        args = (q[:, :512], new[:, :256], case.written(), case.start, case.length, out[:, :512])
        attend.attend(GQA, *args)
    torch.testing.assert_close(out[:, :512].double(), case.exact(), rtol=0, atol=1e-5)
    assert (out[:, 512:] == 7).all()


@pytest.mark.parametrize("threads", [1, 3])
@pytest.mark.parametrize("name", NAMES)
def test_several_callers_at_once(make, name, threads):
    cases = [Case(GQA, [90, 1200, 7, n], seed=n) for n in (11, 222, 33, 144)]
    faults = []
    with closing(make(name, threads)) as attend:

        def call(case):
            try:
                first = case.check(attend)
                faults.extend(1 for _ in range(12) if not torch.equal(case.run(attend), first))
            except BaseException as e:
                faults.append(e)

        callers = [threading.Thread(target=call, args=(case,)) for case in cases]
        for c in callers:
            c.start()
        for c in callers:
            c.join()
    assert not faults


def test_a_fork_attends_with_threads_of_its_own(make):
    case = Case(GQA, [1500, 20, 300])
    with closing(make("portable", 3)) as attend:
        first = case.run(attend)
        child = os.fork()
        if child == 0:
            code = 1
            try:
                code = 0 if torch.equal(case.run(attend), first) else 2
                attend.close()
            finally:
                os._exit(code)
        _, status = os.waitpid(child, 0)
        assert os.waitstatus_to_exitcode(status) == 0
        assert torch.equal(case.run(attend), first)


@pytest.mark.parametrize("name", ["portable", "torch"])
def test_reading_takes_any_memory(make, name):
    with closing(make(name, 2)) as attend:
        attend.read(torch.randn(3_000_003))
        attend.read(torch.randn(4))


@pytest.mark.parametrize("name", ["portable", "torch"])
@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"length": np.array([5, 400])}, "outside the store"),
        ({"length": np.array([5, 0])}, "outside the store"),
        ({"start": np.array([-1, 9])}, "outside the store"),
        ({"start": np.array([1])}, "takes q, new_kv, store and out of"),
        ({"out": torch.empty(2, 511)}, "takes q, new_kv, store and out of"),
        ({"q": torch.empty(2, 512, dtype=BF16)}, "one dtype"),
        ({"new_kv": torch.empty(256, 2).T}, "contiguous rows"),
        ({"store": torch.empty(99, 300)[:, :256]}, "without gaps"),
        ({"shape": replace(GQA, sinks=torch.ones(7))}, "sinks"),
    ],
)
def test_what_does_not_fit_is_refused(make, name, change, said):
    case = Case(GQA, [5, 9])
    given = {"shape": GQA, "q": case.q, "new_kv": case.new, "store": case.store}
    given |= {"start": case.start, "length": case.length, "out": torch.empty(2, 512)}
    with closing(make(name)) as attend, pytest.raises(InvalidInput, match=said):
        attend.attend(**(given | change))


def test_use_after_close_is_refused(make):
    attend = make("portable", 2)
    attend.close()
    attend.close()
    with pytest.raises(MachineError, match="closed"):
        attend.read(torch.ones(8))


# -- torch's rows over threads


def test_little_kv_wakes_few_threads():
    for mib, wanted in ((0.5, 0), (1.5, 2), (3.5, 4), (20, 8)):
        n = int(mib * 2**20 / (16 * 1024))  # 1 KiB a token, 16 rows
        case, asked = Case(GQA, [n] * 16), []
        with closing(TorchDecode(8)) as attend:
            submit = attend._pool.submit
            attend._pool.submit = lambda *a: asked.append(a) or submit(*a)  # noqa: B023
            case.run(attend)
        assert len(asked) == wanted, mib


def test_threads_share_the_tokens_evenly():
    rng = random.Random(0)
    for _ in range(200):
        costs = [rng.randint(1, 300) for _ in range(rng.randint(2, 60))]
        parts = rng.randint(2, 8)
        bounds = torch_attention._balanced(costs, parts)
        assert bounds[0] == 0 and bounds[-1] == len(costs) and len(bounds) == parts + 1
        assert bounds == sorted(bounds)
        shares = [sum(costs[a:b]) for a, b in zip(bounds, bounds[1:], strict=False)]
        assert max(shares) <= sum(costs) / parts + max(costs)


def test_an_error_in_a_thread_reaches_the_caller(monkeypatch):
    def broken(*_):
        raise ValueError("broken row")

    monkeypatch.setattr(torch_attention, "decode", broken)
    with closing(TorchDecode(2)) as attend, pytest.raises(ValueError, match="broken row"):
        Case(GQA, [2000] * 4).run(attend)


def test_torch_keeps_its_threads():
    before = torch.get_num_threads()
    torch.set_num_threads(2)
    try:
        with closing(TorchDecode(3)) as attend, ThreadPoolExecutor(1) as later:
            Case(GQA, [9, 9]).run(attend)
            assert later.submit(torch.get_num_threads).result() == 2
            assert attend._pool.submit(torch.get_num_threads).result() == 1
        assert torch.get_num_threads() == 2
    finally:
        torch.set_num_threads(before)


# -- with and without a compiler


CHILD = """
import sys, torch, numpy as np
from pathlib import Path
from moegen.exec.decode_attention import cpu_decode
from moegen.exec.attention import DecodeShape
d = cpu_decode(2)
kv, out = torch.ones(3, 16), torch.empty(1, 16)
shape = DecodeShape(2, 1, 8, 8, False, 1.0)
d.attend(shape, torch.ones(1, 16), torch.ones(1, 16), kv, np.array([0]), np.array([3]), out)
assert (out == 1).all()
print(d.kind, "|", d.note)
d.close()
"""


# Stands in for a compiler that takes ten seconds: it links what is compiled already.
COMPILER = """#!/bin/sh
for last; do [ "$before" = -o ] && out=$last; before=$last; done
case " $* " in
*" -c "*) sleep 0.3; : > "$out"; echo "$out: nothing" > "$out.d" ;;
*" -shared "*) cp "{made}" "$out" ;;
*) exec {real} "$@" ;;
esac
"""


@pytest.fixture
def compiler(tmp_path, library):
    path = tmp_path / "bin" / "g++"
    path.parent.mkdir()
    made = tmp_path / "made.so"
    made.write_bytes(Path(library.functions._name).read_bytes()[:-32])  # without its checksum
    path.write_text(COMPILER.format(made=made, real=shutil.which("c++")))
    path.chmod(0o755)
    return str(path)


def child(tmp_path, python=sys.executable, **env) -> subprocess.Popen[str]:
    given = {k: v for k, v in os.environ.items() if k != "TORCH_EXTENSIONS_DIR"}
    given |= {"XDG_CACHE_HOME": str(tmp_path), "OMP_NUM_THREADS": "1"} | env
    return subprocess.Popen(
        [python, "-c", CHILD],
        env=given,
        text=True,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
    )


def finished(process: subprocess.Popen[str]) -> str:
    out, _ = process.communicate(timeout=120)
    assert process.returncode == 0, out
    return out.strip()


def test_several_processes_meet_an_empty_cache(tmp_path, compiler):
    at_once = [child(tmp_path, CXX=compiler) for _ in range(2)]
    assert all(finished(p).startswith("C++ ") for p in at_once)
    (file,) = (tmp_path / "moegen" / "kernels").iterdir()  # nothing half made is left
    # What is kept needs no compiler.
    none = {"CXX": str(tmp_path / "none")}
    made = file.stat().st_mtime_ns
    assert finished(child(tmp_path, **none)).endswith("| None")
    assert file.stat().st_mtime_ns == made
    # Damaged, it is made again, or torch takes over.
    file.write_bytes(file.read_bytes()[:1000])
    assert finished(child(tmp_path, **none)).splitlines()[-1].startswith("torch | attention on")
    assert finished(child(tmp_path, CXX=compiler)).startswith("C++ ")


@pytest.mark.parametrize("place", ["XDG_CACHE_HOME", "TORCH_EXTENSIONS_DIR"])
def test_a_cache_that_cannot_be_written_serves_this_process(tmp_path, compiler, place):
    (tmp_path / "file").write_text("in the way")
    temporary = tmp_path / "temporary"
    temporary.mkdir()
    env = {place: str(tmp_path / "file"), "TMPDIR": str(temporary)}
    (line,) = finished(child(tmp_path, CXX=compiler, **env)).splitlines()
    assert line.startswith("C++ ") and "compiled anew by each process" in line
    assert not list(temporary.iterdir())


@pytest.mark.parametrize(
    ("env", "said"),
    [
        ({"CXX": "{tmp}/none"}, "apt install g++"),
        ({"CXX": "{tmp}/broken"}, "could not be compiled"),
        ({"PATH": "{tmp}"}, "pip install ninja"),
    ],
    ids=["no compiler", "a broken compiler", "no ninja"],
)
def test_without_a_compiler_torch_attends_and_says_so(tmp_path, env, said):
    bad = tmp_path / "broken"
    bad.write_text("#!/bin/sh\necho 'internal error: broken' >&2; exit 1\n")
    bad.chmod(0o755)
    env = {k: v.format(tmp=tmp_path) for k, v in env.items()}
    # The same Python where no program lies beside it.
    python = tmp_path / "python"
    python.symlink_to(os.path.realpath(sys.executable))
    env["PYTHONPATH"] = os.pathsep.join(filter(None, sys.path))
    (line,) = finished(child(tmp_path, python, **env)).splitlines()  # and nothing of torch's own
    assert line.startswith("torch | attention on the CPU goes through torch") and said in line


def test_a_variant_is_chosen_by_name(monkeypatch, library):
    for name in ("torch", "portable"):
        monkeypatch.setenv("MOEGEN_CPU_ATTENTION", name)
        with closing(cpu_decode(1)) as attend:
            assert attend.kind.endswith(name)
    monkeypatch.setenv("MOEGEN_CPU_ATTENTION", "abacus")
    with pytest.raises(InvalidInput, match="abacus: this machine has torch, "):
        cpu_decode(1)
    # Before weights are loaded.
    with pytest.raises(InvalidInput, match="abacus: this machine has torch, "):
        Prepared.of_model(ModelSpec.from_pretrained("mixtral-8x7b").with_(n_layers=1), device="cpu")
