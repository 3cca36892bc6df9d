"""Zero-copy and decode attention kernels against torch.

The ``cpu`` tier runs them in Triton's interpreter, where triton is installed and there is no GPU,
and compiles them for GPUs that are not there. The ``gpu`` tier runs them for real.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

torch = pytest.importorskip("torch")
ROOT = Path(__file__).parents[1]
ON_GPU = torch.cuda.is_available()
if not ON_GPU:
    os.environ["TRITON_INTERPRET"] = "1"  # must be set when triton is first imported
pytest.importorskip(
    "triton", reason="triton is not installed: only CUDA builds of torch bring it along"
)

from moegen.exec.arena import Arena  # noqa: E402
from moegen.exec.kernels.triton_attention import decode_attention  # noqa: E402
from moegen.exec.kernels.zero_copy import (  # noqa: E402
    copy_up,
    gather_rows,
    scatter_rows,
)

not_compiled = pytest.mark.skipif(ON_GPU, reason="kernels are compiled on this machine, not read")
# Triton 3.6 turns one-element arrays into loop bounds, which numpy 2.4 no longer does.
interpretable = pytest.mark.skipif(
    tuple(map(int, np.__version__.split(".")[:2])) >= (2, 4),
    reason="triton's interpreter needs numpy < 2.4",
)


@pytest.fixture(
    params=[
        pytest.param("cpu", marks=[pytest.mark.cpu, not_compiled, interpretable]),
        pytest.param("cuda", marks=pytest.mark.gpu),
    ]
)
def device(request: pytest.FixtureRequest) -> str:
    return request.param


def random_bytes(n: int, seed: int = 0) -> torch.Tensor:
    gen = torch.Generator().manual_seed(seed)
    return torch.randint(0, 256, (n,), dtype=torch.uint8, generator=gen)


def pinned(x: torch.Tensor, device: str) -> torch.Tensor:
    return x.pin_memory() if device == "cuda" else x.clone()


def settle(device: str) -> None:
    if device == "cuda":
        torch.cuda.synchronize()


def index(values: list[int], device: str) -> torch.Tensor:
    return torch.tensor(values, dtype=torch.int64).to(device)


# ---------------------------------------------------------------- flat copies


@pytest.mark.parametrize("n", [0, 1, 15, 16, 17, 16384, 16399, 3 * 16384 + 8])
@pytest.mark.parametrize("offset", [0, 1, 2, 4, 8])
def test_flat_copies_move_those_bytes_and_no_other(device: str, n: int, offset: int) -> None:
    host = pinned(random_bytes(offset + n), device)[offset:]
    gpu = torch.full((n + 32,), 77, dtype=torch.uint8, device=device)
    copy_up(gpu, host, n_programs=3)
    settle(device)
    assert torch.equal(gpu[:n].cpu(), host)
    assert (gpu[n:] == 77).all()


def test_a_part_of_a_typed_tensor(device: str) -> None:
    host = pinned(torch.arange(100, dtype=torch.int64).reshape(10, 10), device)
    gpu = torch.zeros(100, dtype=torch.int64, device=device)
    copy_up(gpu, host, nbytes=8 * 33)
    settle(device)
    assert gpu.tolist() == list(range(33)) + [0] * 67


def test_flat_copies_refuse_what_does_not_fit(device: str) -> None:
    host, gpu = pinned(random_bytes(64), device), torch.zeros(63, dtype=torch.uint8, device=device)
    with pytest.raises(ValueError, match="64 bytes from 64 into 63"):
        copy_up(gpu, host)
    with pytest.raises(ValueError, match="65 bytes from 64 into 63"):
        copy_up(gpu, host, nbytes=65)
    with pytest.raises(ValueError, match="contiguous"):
        copy_up(gpu, host[::2])


# ---------------------------------------------------------------- rows

WIDTHS = [  # elements, dtype: units of 16, 16, 8, 4, 2 and 1 bytes
    (1024, torch.bfloat16),
    (576, torch.bfloat16),
    (36, torch.float16),
    (33, torch.float32),
    (7, torch.bfloat16),
    (13, torch.uint8),
]


def token_store(tokens: int, width: int, dtype: torch.dtype, device: str) -> torch.Tensor:
    size = torch.empty(0, dtype=dtype).element_size()
    return pinned(random_bytes(tokens * width * size).view(dtype).reshape(tokens, width), device)


def same_bytes(a: torch.Tensor, b: torch.Tensor) -> bool:
    return torch.equal(a.cpu().view(torch.uint8), b.cpu().view(torch.uint8))


@pytest.mark.parametrize(("width", "dtype"), WIDTHS)
@pytest.mark.parametrize("n_programs", [1, 5])
def test_gather_fetches_ragged_rows(
    device: str, width: int, dtype: torch.dtype, n_programs: int
) -> None:
    lengths = [1, 211, 0, 3, 1, 40, 2]
    starts = [500, 5, 0, 300, 499, 320, 497]
    store = token_store(512, width, dtype, device)
    slot = torch.zeros(sum(lengths) + 5, width, dtype=dtype, device=device)
    want = slot.cpu().clone()
    to, at = [], 2
    for start, length in zip(starts, lengths, strict=True):
        to.append(at)
        want[at : at + length] = store[start : start + length]
        at += length
    extra = [1 << 40]  # entries past n_rows are not read as rows
    gather_rows(
        slot,
        store,
        index(starts + extra, device),
        index(lengths + extra, device),
        index(to + extra, device),
        len(lengths),
        n_programs=n_programs,
    )
    settle(device)
    assert same_bytes(slot, want)


def test_gather_of_more_rows_than_one_launch_holds(
    device: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("moegen.exec.kernels.zero_copy._FEW_ROWS", 8)
    monkeypatch.setattr("moegen.exec.kernels.zero_copy._MAX_ROWS", 16)
    order = torch.randperm(50, generator=torch.Generator().manual_seed(1))
    store = token_store(50, 24, torch.float32, device)
    slot = torch.zeros(50, 24, device=device)
    every = torch.arange(50)
    gather_rows(
        slot,
        store,
        order.to(device),
        torch.ones(50, dtype=torch.int64, device=device),
        every.to(device),
        50,
    )
    settle(device)
    assert same_bytes(slot, store[order])


@pytest.mark.parametrize(("width", "dtype"), WIDTHS)
@pytest.mark.parametrize("n_rows", [1, 37])
def test_scatter_writes_each_token_to_its_place(
    device: str, width: int, dtype: torch.dtype, n_rows: int
) -> None:
    new = token_store(n_rows, width, dtype, device).to(device)
    store = token_store(90, width, dtype, device)
    want = store.clone()
    places = torch.randperm(90, generator=torch.Generator().manual_seed(2))[:n_rows]
    want[places] = new.cpu()
    scatter_rows(store, new, places.to(device), n_programs=3)
    settle(device)
    assert same_bytes(store, want)


def test_scatter_from_a_slice_of_wider_tokens(device: str) -> None:
    wide = token_store(9, 64, torch.bfloat16, device).to(device)
    store = pinned(torch.zeros(9, 24, dtype=torch.bfloat16), device)
    scatter_rows(store, wide[:, 12:36], torch.arange(9, device=device))
    settle(device)
    assert same_bytes(store, wide[:, 12:36].contiguous())


def test_no_rows_is_no_work(device: str) -> None:
    store, slot = token_store(4, 8, torch.float32, device), torch.ones(4, 8, device=device)
    none = index([], device)
    gather_rows(slot, store, none, none, none, 0)
    scatter_rows(store, slot[:0], none)
    settle(device)
    assert (slot == 1).all()


def test_rows_refuse_what_does_not_agree(device: str) -> None:
    store, slot = token_store(4, 8, torch.float32, device), torch.zeros(4, 8, device=device)
    one = index([0], device)
    with pytest.raises(ValueError, match="1 entries for 2 rows"):
        gather_rows(slot, store, one, one, one, 2)
    with pytest.raises(ValueError, match="int64"):
        gather_rows(slot, store, one.int(), one, one, 1)
    with pytest.raises(ValueError, match="one width and dtype"):
        gather_rows(slot.half(), store, one, one, one, 1)
    with pytest.raises(ValueError, match="one width and dtype"):
        scatter_rows(store, slot[:1, :4], one)
    with pytest.raises(ValueError, match="2 entries for 1 tokens"):
        scatter_rows(store, slot[:1], index([0, 1], device))
    with pytest.raises(ValueError, match="contiguous"):
        scatter_rows(store[:, ::2], slot[:1, :4], one)


# ---------------------------------------------------------------- attention

SHAPES = [  # heads, KV heads, dk, dv, latent
    pytest.param((8, 2, 64, 64, False), id="gqa4-64"),
    pytest.param((3, 3, 96, 96, False), id="mha-96"),
    pytest.param((20, 1, 128, 128, False), id="mqa20-128"),
    pytest.param((2, 1, 256, 256, False), id="gqa2-256"),
    pytest.param((2, 2, 24, 8, False), id="dk-not-dv"),
    pytest.param((4, 1, 40, 32, True), id="latent-40"),
    pytest.param((17, 1, 576, 512, True), id="latent-576"),
]


def attend(
    device: str,
    dtype: torch.dtype,
    shape: tuple[int, int, int, int, bool],
    lengths: list[int],
    max_length: int | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """What the kernel gives, and float64, for rows apart from each other in the slot."""
    n_heads, n_kv_heads, dk, dv, latent = shape
    width = dk if latent else n_kv_heads * (dk + dv)
    scale = dk**-0.5
    gen = torch.Generator().manual_seed(3)
    starts, at = [], 3
    for length in lengths:
        starts.append(at)
        at += length + 2
    q = (torch.randn(len(lengths), n_heads * dk, generator=gen) * 2).to(dtype)
    kv = torch.randn(at, width, generator=gen).to(dtype)
    out = torch.full((len(lengths), n_heads * dv), float("nan"), dtype=dtype, device=device)
    slot = kv.clone()
    used = torch.zeros(at, dtype=torch.bool)
    for start, length in zip(starts, lengths, strict=True):
        used[start : start + length] = True
    slot[~used] = float("nan")  # nobody else's tokens may leak in
    got = decode_attention(
        q.to(device),
        slot.to(device),
        index(starts, device),
        index(lengths, device),
        out,
        Arena(64 << 20, torch.device(device)),
        n_heads=n_heads,
        n_kv_heads=n_kv_heads,
        dk=dk,
        dv=dv,
        scale=scale,
        latent=latent,
        max_length=max_length or max(lengths),
    )
    assert got is out
    want = []
    for r, (start, length) in enumerate(zip(starts, lengths, strict=True)):
        row = kv[start : start + length].double()
        if latent:
            k, v = row[:, None, :], row[:, None, :dv]
        else:
            k = row[:, : n_kv_heads * dk].reshape(length, n_kv_heads, dk)
            v = row[:, n_kv_heads * dk :].reshape(length, n_kv_heads, dv)
        group = n_heads // k.shape[1]
        k, v = k.repeat_interleave(group, 1), v.repeat_interleave(group, 1)
        scores = torch.einsum("hd,thd->ht", q[r].double().reshape(n_heads, dk), k) * scale
        want.append(torch.einsum("ht,thd->hd", scores.softmax(-1), v).reshape(-1))
    return out.cpu(), torch.stack(want)


TARGET = "moegen.graph.working.SPLIT_PROGRAMS"


@pytest.mark.parametrize("target", [1, 1024])  # many blocks a program, or one and a merge
@pytest.mark.parametrize("shape", SHAPES)
def test_attention_in_float32(
    device: str,
    shape: tuple[int, int, int, int, bool],
    target: int,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(TARGET, target)
    lengths = [1, 700, 2, 65, 16] if device == "cuda" else [1, 150, 33]
    got, want = attend(device, torch.float32, shape, lengths)
    assert (got.double() - want).abs().max() < 1e-5


@pytest.mark.parametrize("max_length", [300, 5000])
@pytest.mark.parametrize("target", [1, 8])
def test_attention_split_or_whole(
    device: str, max_length: int, target: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    # One program a row up to SPLIT_TOKENS, or many; a max_length above what is there is fine.
    monkeypatch.setattr(TARGET, target)
    got, want = attend(device, torch.float32, (4, 2, 64, 64, False), [300, 64, 1], max_length)
    assert (got.double() - want).abs().max() < 1e-5


@pytest.mark.parametrize("shape", SHAPES)
def test_attention_in_float16(
    device: str, shape: tuple[int, int, int, int, bool], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(TARGET, 1)
    got, want = attend(device, torch.float16, shape, [1, 90, 300])
    assert (got.double() - want).abs().max() < 4e-3  # p and the result are rounded: 2^-11 each


@pytest.mark.gpu  # the interpreter multiplies bfloat16 as if it were integers
@pytest.mark.parametrize("target", [1, 1024])
@pytest.mark.parametrize("shape", SHAPES)
def test_attention_in_bfloat16(
    shape: tuple[int, int, int, int, bool], target: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(TARGET, target)
    got, want = attend("cuda", torch.bfloat16, shape, [1, 90, 700])
    assert (got.double() - want).abs().max() < 3e-2  # p and the result are rounded: 2^-8 each


@pytest.mark.gpu
def test_attention_is_the_same_every_time() -> None:
    shape = (32, 8, 128, 128, False)
    first, _ = attend("cuda", torch.bfloat16, shape, [5000, 3, 900])
    for _ in range(5):
        again, _ = attend("cuda", torch.bfloat16, shape, [5000, 3, 900])
        assert torch.equal(first, again)


def test_attention_of_no_rows_and_of_misfits(device: str) -> None:
    shape = {"n_heads": 4, "n_kv_heads": 2, "dk": 16, "dv": 16, "scale": 1.0, "max_length": 5}
    kv, none = torch.zeros(8, 64, device=device), index([], device)
    empty = torch.zeros(0, 64, device=device)
    arena = Arena(0, torch.device(device))
    decode_attention(empty, kv, none, none, empty, arena, latent=False, **shape)
    with pytest.raises(ValueError, match=r"kv must be contiguous \[\*, 64\]"):
        decode_attention(empty, kv[:, :32], none, none, empty, arena, latent=False, **shape)
    with pytest.raises(ValueError, match="latent True"):
        decode_attention(empty, kv, none, none, empty, arena, latent=True, **shape)
    with pytest.raises(ValueError, match="0 rows"):
        decode_attention(empty, kv, index([1], device), none, empty, arena, latent=False, **shape)


# ---------------------------------------------------------------- compiled for absent GPUs

COMPILE = """
import json, sys
import torch
import moegen.exec.kernels.hold as holding
import moegen.exec.kernels.triton_attention as attention
import moegen.exec.kernels.zero_copy as zero
from moegen.exec.arena import Arena
sys.path.insert(0, "tests")
from triton_compile import compile_launches

report = {}

def note(name, done):
    report.setdefault(name, []).append(
        {"shared": done.metadata.shared, "ptx": done.asm["ptx"], "built": len(done.asm["cubin"])})

for module in (holding, zero, attention):
    compile_launches(module, int(sys.argv[1]), note)

def index(n): return torch.zeros(n, dtype=torch.int64)
def tokens(n, width): return torch.zeros(n, width, dtype=torch.bfloat16)
holding.hold(1e-3)
zero.copy_up(torch.empty(100000), torch.empty(100000))
zero.gather_rows(tokens(64, 2048), tokens(64, 2048), index(64), index(64), index(64), 64)
zero.scatter_rows(tokens(64, 576), tokens(64, 576), index(64))
def decode(rows, longest, dtype, heads, kv_heads, dk, dv, latent):
    attention.decode_attention(
        torch.zeros(rows, heads * dk, dtype=dtype),
        torch.zeros(8, dk if latent else kv_heads * (dk + dv), dtype=dtype),
        index(rows), index(rows), torch.zeros(rows, heads * dv, dtype=dtype),
        Arena(64 << 20, torch.device("cpu")), n_heads=heads, n_kv_heads=kv_heads, dk=dk, dv=dv,
        scale=1.0, latent=latent, max_length=longest)
for shape in [(32, 8, 128, 128, False), (8, 8, 256, 256, False), (128, 1, 576, 512, True)]:
    for dtype in (torch.bfloat16, torch.float32):
        decode(2, 4000, dtype, *shape)  # split
decode(2000, 600, torch.bfloat16, 32, 8, 128, 128, False)  # whole
print(json.dumps(report))
"""


@pytest.mark.cpu
@pytest.mark.parametrize("capability", [86, 90])
def test_kernels_compile_into_wide_accesses_and_fit(capability: int) -> None:
    env = {k: v for k, v in os.environ.items() if k != "TRITON_INTERPRET"}
    done = subprocess.run(
        [sys.executable, "-c", COMPILE, str(capability)],
        cwd=ROOT,
        env=env,
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stderr
    report = json.loads(done.stdout)
    assert set(report) == {
        "_hold_kernel",
        "_copy_kernel",
        "_gather_kernel",
        "_scatter_kernel",
        "_attend_kernel",
        "_merge_kernel",
    }
    for name in ("_copy_kernel", "_gather_kernel", "_scatter_kernel"):
        ptx = report[name][0]["ptx"]
        assert ".v2.b64" in ptx, f"{name} does not move 16 bytes a thread"
    held = report["_hold_kernel"][0]["ptx"]
    assert held.count("%globaltimer") == 2 and "bra" in held, "it does not wait by the clock"
    for built in report["_attend_kernel"]:
        assert built["shared"] <= 99 * 1024
