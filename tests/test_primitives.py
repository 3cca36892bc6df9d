"""The fused primitives against float64.

The ``cpu`` tier runs them in Triton's interpreter, where triton is installed and there is no GPU,
and compiles them for a GPU that is not there. The ``gpu`` tier runs them for real, larger.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from itertools import accumulate
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

torch = pytest.importorskip("torch")
ROOT = Path(__file__).parents[1]
ON_GPU = torch.cuda.is_available()
if not ON_GPU:
    os.environ["TRITON_INTERPRET"] = "1"  # must be set when triton is first imported
pytest.importorskip(
    "triton", reason="triton is not installed: only CUDA builds of torch bring it along"
)

from moegen.exec.arena import Arena  # noqa: E402
from moegen.exec.primitives import cuda, triton_routing  # noqa: E402
from moegen.graph import working  # noqa: E402

# Triton's interpreter turns one-element arrays into loop bounds, which numpy 2.4 does not.
INTERPRETABLE = tuple(map(int, np.__version__.split(".")[:2])) < (2, 4)
ON_CPU = [
    pytest.mark.cpu,
    pytest.mark.skipif(ON_GPU, reason="kernels are compiled on this machine, not read"),
    pytest.mark.skipif(not INTERPRETABLE, reason="triton's interpreter needs numpy < 2.4"),
]


@pytest.fixture(
    params=[pytest.param("cpu", marks=ON_CPU), pytest.param("cuda", marks=pytest.mark.gpu)]
)
def device(request: pytest.FixtureRequest) -> str:
    return request.param


@pytest.fixture(
    params=[
        pytest.param(("cpu", torch.float32), id="cpu-float32", marks=ON_CPU),
        pytest.param(("cpu", torch.float16), id="cpu-float16", marks=ON_CPU),
        # The interpreter computes with bfloat16 as if it were integers.
        *(
            pytest.param(("cuda", dtype), id=f"cuda-{str(dtype)[6:]}", marks=pytest.mark.gpu)
            for dtype in (torch.float32, torch.float16, torch.bfloat16)
        ),
    ]
)
def place(request: pytest.FixtureRequest) -> tuple[str, torch.dtype]:
    """A device and a dtype that can be computed with there."""
    return request.param


# Half a unit in the last place, with as much again for what was rounded before.
ROUNDING = {torch.float32: 4e-6, torch.float16: 2.0**-10, torch.bfloat16: 2.0**-7}
OPS = cuda.Cuda()


def random(*shape: int, dtype: torch.dtype = torch.float32, seed: int = 0) -> torch.Tensor:
    gen = torch.Generator().manual_seed(seed)
    return torch.randn(*shape, generator=gen).to(dtype)


def in_wider(x: torch.Tensor, device: str) -> torch.Tensor:
    """The same numbers as rows of a wider tensor, whose other columns are NaN."""
    wide = torch.full((*x.shape[:-1], x.shape[-1] + 8), float("nan"), dtype=x.dtype, device=device)
    wide[..., : x.shape[-1]] = x
    return wide[..., : x.shape[-1]]


def room(*shape: int, dtype: torch.dtype, device: str) -> torch.Tensor:
    """Where to write: rows of a wider tensor, full of NaN."""
    return in_wider(torch.full(shape, float("nan"), dtype=dtype), device)


def untouched(x: torch.Tensor) -> bool:
    """Whether the columns beside a tensor that ``room`` or ``in_wider`` gave are as they were."""
    columns = x.as_strided((*x.shape[:-1], 8), x.stride(), x.storage_offset() + x.shape[-1])
    return bool(columns.isnan().all())


def close(got: torch.Tensor, want: torch.Tensor, dtype: torch.dtype, slack: float = 1.0) -> None:
    error = (got.cpu().double() - want).abs()
    assert not error.isnan().any()
    assert (error <= slack * ROUNDING[dtype] * (want.abs() + 1)).all(), error.max()


def arena(device: str, nbytes: int = 1 << 16) -> Arena:
    return Arena(nbytes, torch.device(device))


# ---------------------------------------------------------------- matrices


@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize("n", [0, 1, 37])
def test_linear(place: tuple[str, torch.dtype], n: int, bias: bool) -> None:
    device, dtype = place
    x, w, b = random(n, 40, dtype=dtype), random(24, 40, dtype=dtype), random(24, dtype=dtype)
    out = room(n, 24, dtype=dtype, device=device)
    OPS.linear(in_wider(x, device), w.to(device), out, b.to(device) if bias else None)
    close(out, x.double() @ w.double().T + (b.double() if bias else 0), dtype, 4)
    assert untouched(out)


@pytest.mark.gpu
def test_linear_into_rows_of_a_wider_tensor_takes_no_memory() -> None:
    x, w = random(256, 512).cuda().half(), random(128, 512).cuda().half()
    out = room(256, 128, dtype=torch.float16, device="cuda")
    OPS.linear(x, w, out)
    torch.cuda.synchronize()
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    OPS.linear(x, w, out)
    assert torch.cuda.max_memory_allocated() == before


GROUPS = [  # rows of each group
    [0],
    [1],
    [0, 3, 0, 0, 17, 1],
    [5] * 8,
    [130, 0, 1, 70],
    [33, 64, 200, 128, 129],
]


@pytest.mark.parametrize("depth", [24, 128])
@pytest.mark.parametrize("counts", GROUPS, ids=str)
def test_grouped_linear(place: tuple[str, torch.dtype], counts: list[int], depth: int) -> None:
    device, dtype = place
    n, groups, width = sum(counts), len(counts), 72
    x = random(n + 5, depth, dtype=dtype)  # five rows behind the last end
    w = random(groups, width, depth, dtype=dtype, seed=1)
    apart = torch.full((groups, width * depth + 64), float("nan"), dtype=dtype)
    apart[:, : width * depth] = w.flatten(1)
    apart = apart.to(device)[:, : width * depth].unflatten(1, (width, depth))
    out = room(n + 5, width, dtype=dtype, device=device)
    ends = torch.tensor(list(accumulate(counts)), dtype=torch.int32, device=device)
    OPS.grouped_linear(in_wider(x, device), apart, ends, out)
    start = 0
    for g, count in enumerate(counts):
        rows = slice(start, start + count)
        close(out[rows], x[rows].double() @ w[g].double().T, dtype, 8)
        start += count
    assert untouched(out)


@pytest.mark.gpu
@pytest.mark.parametrize("groups", [1, 60, 256, 512])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_grouped_linear_of_many_groups(groups: int, dtype: torch.dtype) -> None:
    gen = torch.Generator().manual_seed(0)
    counts = torch.randint(0, 40, (groups,), generator=gen)
    x = random(int(counts.sum()), 256, dtype=dtype)
    w = random(groups, 320, 256, dtype=dtype, seed=1)
    out = room(len(x), 320, dtype=dtype, device="cuda")
    OPS.grouped_linear(x.cuda(), w.cuda(), counts.cumsum(0).int().cuda(), out)
    group = torch.arange(groups).repeat_interleave(counts)
    want = torch.cat([x[group == g].double() @ w[g].double().T for g in range(groups) if counts[g]])
    close(out, want, dtype, 16)


# ---------------------------------------------------------------- rows


def normed(x: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
    x = x.double()
    return weight.double() * x * (x.pow(2).mean(-1, keepdim=True) + eps).rsqrt()


@pytest.mark.parametrize("width", [7, 64, 1536, 5120])
@pytest.mark.parametrize("n", [0, 1, 5])
def test_rms_norm(place: tuple[str, torch.dtype], n: int, width: int) -> None:
    device, dtype = place
    x, weight = random(n, width, dtype=dtype), random(width, dtype=dtype, seed=1)
    x[n // 2 :] *= 1e-3  # where eps counts
    out, source = room(n, width, dtype=dtype, device=device), in_wider(x, device)
    OPS.rms_norm(source, weight.to(device), 1e-5, out)
    close(out, normed(x, weight, 1e-5), dtype, 2)
    assert torch.equal(source.cpu(), x) and untouched(out)
    OPS.rms_norm(source, weight.to(device), 1e-5, source)
    assert torch.equal(source, out) and untouched(source)


@pytest.mark.parametrize("into", ["out", "y"])
@pytest.mark.parametrize("width", [24, 4096])
def test_add_rms_norm(place: tuple[str, torch.dtype], width: int, into: str) -> None:
    device, dtype = place
    x, y = random(6, width, dtype=dtype), random(6, width, dtype=dtype, seed=1)
    weight = random(width, dtype=dtype, seed=2)
    gx, gy = in_wider(x, device), in_wider(y, device)
    out = gy if into == "y" else room(6, width, dtype=dtype, device=device)
    OPS.add_rms_norm(gx, gy, weight.to(device), 1e-5, out)
    total = (x.double() + y.double()).to(dtype)
    assert torch.equal(gx.cpu(), total)
    close(out, normed(total, weight, 1e-5), dtype, 2)
    assert untouched(gx) and untouched(gy) and untouched(out)


@pytest.mark.parametrize("width", [5, 1408, 1024])
@pytest.mark.parametrize("n", [0, 1, 9])
def test_silu_mul(place: tuple[str, torch.dtype], n: int, width: int) -> None:
    device, dtype = place
    gate_up = random(n, 2 * width, dtype=dtype) * 4
    if n:
        gate_up[0, :2] = torch.tensor([-500.0, 500.0])
    out = room(n, width, dtype=dtype, device=device)
    OPS.silu_mul(in_wider(gate_up, device), out)
    gate, up = gate_up.double().chunk(2, -1)
    close(out, gate * gate.sigmoid() * up, dtype)
    assert untouched(out)


@pytest.mark.parametrize("width", [3, 576, 1100])
@pytest.mark.parametrize("n", [0, 1, 50])
def test_gather(place: tuple[str, torch.dtype], n: int, width: int) -> None:
    device, dtype = place
    x = random(20, width, dtype=dtype)
    index = torch.randint(0, 20, (n,), generator=torch.Generator().manual_seed(0))
    out = room(n, width, dtype=dtype, device=device)
    OPS.gather(in_wider(x, device), index.int().to(device), out)
    assert torch.equal(out.cpu(), x[index]) and untouched(out)


@pytest.mark.parametrize("shared", [False, True])
@pytest.mark.parametrize("k", [1, 2, 6, 8])
@pytest.mark.parametrize(("n", "width"), [(0, 16), (1, 1030), (13, 72)])
def test_combine(place: tuple[str, torch.dtype], n: int, width: int, k: int, shared: bool) -> None:
    device, dtype = place
    x, more = random(n, width, dtype=dtype), random(n, width, dtype=dtype, seed=1)
    y, weights = random(n * k, width, dtype=dtype, seed=2), random(n, k, seed=3).abs()
    inverse = torch.randperm(n * k, generator=torch.Generator().manual_seed(4)).view(n, k)
    to = in_wider(x, device)
    OPS.combine(
        to,
        in_wider(y, device),
        inverse.int().to(device),
        weights.to(device),
        in_wider(more, device) if shared else None,
        arena(device, 0),
    )
    want = x.double() + (y[inverse].double() * weights.double()[..., None]).sum(1)
    close(to, want + more.double() if shared else want, dtype, 2)
    assert untouched(to)


# ---------------------------------------------------------------- rotation


def angles(n: int, half: int) -> tuple[torch.Tensor, torch.Tensor]:
    turn = random(n, half, seed=5) * 3
    return turn.cos(), turn.sin()


@pytest.mark.parametrize(("heads", "kv_heads", "d"), [(4, 2, 128), (3, 3, 96), (6, 1, 16)])
@pytest.mark.parametrize("n", [0, 1, 7])
def test_rope_halves(
    place: tuple[str, torch.dtype], n: int, heads: int, kv_heads: int, d: int
) -> None:
    device, dtype = place
    qkv = random(n, (heads + 2 * kv_heads) * d, dtype=dtype)
    cos, sin = angles(n, d // 2)
    q = room(n, heads * d, dtype=dtype, device=device)
    kv = room(n, 2 * kv_heads * d, dtype=dtype, device=device)
    OPS.rope_halves(in_wider(qkv, device), cos.to(device), sin.to(device), heads, kv_heads, q, kv)
    parts = qkv.unflatten(1, (-1, d)).double()
    a, b = parts[:, : heads + kv_heads].chunk(2, -1)
    c, s = cos.double()[:, None], sin.double()[:, None]
    turned = torch.cat((a * c - b * s, b * c + a * s), -1)
    close(q, turned[:, :heads].flatten(1), dtype)
    close(kv[:, : kv_heads * d], turned[:, heads:].flatten(1), dtype)
    assert torch.equal(kv[:, kv_heads * d :].cpu(), qkv[:, (heads + kv_heads) * d :])
    assert untouched(q) and untouched(kv)


@pytest.mark.parametrize("in_place", [False, True])
@pytest.mark.parametrize(("heads", "d"), [(1, 64), (5, 64), (3, 24), (2, 2)])
@pytest.mark.parametrize("n", [0, 1, 7])
def test_rope_pairs(
    place: tuple[str, torch.dtype], n: int, heads: int, d: int, in_place: bool
) -> None:
    device, dtype = place
    x = random(n, heads, d, dtype=dtype)
    cos, sin = angles(n, d // 2)
    source = in_wider(x, device)
    out = source if in_place else room(n, heads, d, dtype=dtype, device=device)
    OPS.rope_pairs(source, cos.to(device), sin.to(device), out)
    a, b = x.double().unflatten(-1, (-1, 2)).unbind(-1)
    c, s = cos.double()[:, None], sin.double()[:, None]
    close(out, torch.stack((a * c - b * s, a * s + b * c), -1).flatten(-2), dtype)
    assert untouched(out)


# ---------------------------------------------------------------- routing


def best(scores: torch.Tensor, k: int) -> torch.Tensor:
    """The k largest of each row, of equals the first."""
    return scores.sort(dim=-1, descending=True, stable=True).indices[..., :k]


CHOICES = [  # experts, k, groups, groups that count, whether weights are made to sum to 1
    (8, 2, 0, 0, True),
    (8, 1, 0, 0, False),
    (60, 4, 0, 0, False),
    (64, 6, 0, 0, True),
    (128, 8, 0, 0, True),
    (160, 6, 8, 3, False),
    (256, 8, 8, 4, True),
    (12, 3, 3, 2, True),
    (512, 16, 0, 0, False),
    (4, 4, 0, 0, True),
]


@pytest.mark.parametrize(("n_experts", "k", "groups", "top_groups", "renormalize"), CHOICES)
@pytest.mark.parametrize("n", [0, 1, 20])
def test_top_k(
    place: tuple[str, torch.dtype], n: int, n_experts: int, k: int, groups: int,
    top_groups: int, renormalize: bool,
) -> None:  # fmt: skip
    device, dtype = place
    # Few values: many logits are equal, and different ones are far apart.
    logits = (random(n, n_experts) * 4).round().to(dtype)
    ids = torch.full((n, k + 1), -7, dtype=torch.int32, device=device)[:, :k]
    weights = torch.full((n, k + 2), float("nan"), device=device)[:, :k]
    OPS.top_k(
        in_wider(logits, device), ids, weights, arena(device, 0), renormalize=renormalize,
        scaling=2.5, groups=groups, top_groups=top_groups,
    )  # fmt: skip
    p = logits.double().softmax(-1)
    kept = p
    if groups:
        grouped = p.unflatten(-1, (groups, -1))
        chosen = best(grouped.amax(-1), top_groups)
        mask = torch.zeros(n, groups, dtype=torch.bool).scatter_(1, chosen, True)
        kept = grouped.masked_fill(~mask[..., None], -1).flatten(1)
    want = best(kept, k)
    assert torch.equal(ids.cpu().long(), want)
    values = p.gather(1, want)
    if renormalize:
        values = values / values.sum(-1, keepdim=True)
    close(weights, values * 2.5, torch.float32)


def test_top_k_of_nan_is_nan_among_real_experts(device: str) -> None:
    logits = random(3, 12)
    logits[1, 5] = float("nan")
    ids = torch.empty(3, 4, dtype=torch.int32, device=device)
    weights = torch.empty(3, 4, device=device)
    OPS.top_k(logits.to(device), ids, weights, arena(device, 0), renormalize=True)
    assert weights[1].isnan().all() and not weights[::2].isnan().any()
    assert sorted(set(ids[1].tolist())) == sorted(ids[1].tolist())
    assert ((ids >= 0) & (ids < 12)).all()


def sort_and_check(ids: torch.Tensor, n_experts: int, device: str) -> Arena:
    n, k = ids.numel(), ids.shape[1]
    memory = arena(device, working.sort_bytes(n, n_experts))
    order = torch.full((n,), -1, dtype=torch.int32, device=device)
    inverse = torch.full((len(ids), k), -1, dtype=torch.int32, device=device)
    ends = torch.full((n_experts,), -1, dtype=torch.int32, device=device)
    counts = torch.full((n_experts,), -1, dtype=torch.int64, device=device)
    OPS.sort_choices(ids.int().to(device), n_experts, order, inverse, ends, counts, memory)
    flat = ids.reshape(-1)
    places = flat.sort(stable=True).indices
    assert torch.equal(order.cpu().long(), places // k)
    assert torch.equal(inverse.cpu().long().reshape(-1)[places], torch.arange(n))
    want = flat.bincount(minlength=n_experts)
    assert torch.equal(counts.cpu(), want)
    assert torch.equal(ends.cpu().long(), want.cumsum(0))
    return memory


@pytest.mark.parametrize("alone", [True, False])
@pytest.mark.parametrize(
    ("n", "k", "n_experts"),
    [(0, 2, 8), (1, 1, 1), (1, 8, 60), (600, 2, 8), (190, 6, 160), (1030, 1, 64), (9, 10, 512)],
)
def test_sort_choices(
    device: str, n: int, k: int, n_experts: int, alone: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(triton_routing, "_ALONE", 1 << 30 if alone else -1)
    gen = torch.Generator().manual_seed(0)
    # Not evenly: the last experts get nothing.
    ids = torch.randint(0, (n_experts + 1) // 2, (n, k), generator=gen)
    memory = sort_and_check(ids, n_experts, device)
    assert (memory.peak == 0) == (alone or n == 0)


@pytest.mark.parametrize("tier", [pytest.param("cpu", marks=ON_CPU)])
@settings(max_examples=25)
@given(data=st.data())
def test_any_choices_are_sorted(tier: str, data: st.DataObject) -> None:
    n_experts = data.draw(st.integers(1, 70))
    k = data.draw(st.integers(1, 4))
    one = st.lists(st.integers(0, n_experts - 1), min_size=k, max_size=k)
    rows = data.draw(st.lists(one, max_size=40))
    ids = torch.tensor(rows, dtype=torch.int64).reshape(-1, k)
    with pytest.MonkeyPatch.context() as patch:
        if data.draw(st.booleans()):  # a small chunk, so that few choices are several
            patch.setattr(triton_routing, "_ALONE", -1)
            patch.setattr(triton_routing, "CHUNK", 16)
            patch.setattr(working, "SORT_CHUNK", 16)  # what the arena is made for
        sort_and_check(ids, n_experts, tier)


@pytest.mark.gpu
@pytest.mark.parametrize(("n_experts", "k"), [(8, 2), (64, 6), (160, 6), (256, 8), (512, 10)])
@pytest.mark.parametrize("n", [512, 5000, 32768])
def test_sort_many_choices(n: int, n_experts: int, k: int) -> None:
    gen = torch.Generator().manual_seed(0)
    sort_and_check(torch.randint(0, n_experts, (n, k), generator=gen), n_experts, "cuda")
    sort_and_check(torch.full((n, k), n_experts - 1), n_experts, "cuda")


# ---------------------------------------------------------------- attention

SHAPES = [  # heads, KV heads, D, D_v
    pytest.param((4, 2, 64, 64), id="gqa2-64"),
    pytest.param((2, 2, 96, 96), id="mha-96"),
    pytest.param((4, 1, 128, 128), id="mqa4-128"),
    pytest.param((1, 1, 256, 256), id="mha-256"),
    pytest.param((2, 2, 24, 8), id="d-not-dv"),
    pytest.param((2, 2, 192, 128), id="mla"),
]


def causal(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, lengths: list[int], scale: float,
    window: int | None,
) -> torch.Tensor:  # fmt: skip
    group = q.shape[1] // k.shape[1]
    outs = [q.new_empty(0, q.shape[1], v.shape[2], dtype=torch.float64)]
    for a, b, c in zip(*(t.double().split(lengths) for t in (q, k, v)), strict=True):
        b, c = b.repeat_interleave(group, 1), c.repeat_interleave(group, 1)
        s = torch.einsum("qhd,khd->hqk", a, b) * scale
        i = torch.arange(len(a))
        hidden = i[:, None] < i
        if window is not None:
            hidden |= i[:, None] - i >= window
        p = s.masked_fill(hidden, float("-inf")).softmax(-1)
        outs.append(torch.einsum("hqk,khd->qhd", p, c))
    return torch.cat(outs)


def attend(
    place: tuple[str, torch.dtype], shape: tuple[int, int, int, int], lengths: list[int],
    window: int | None = None,
) -> torch.Tensor:  # fmt: skip
    device, dtype = place
    heads, kv_heads, d, dv = shape
    n = sum(lengths)
    q = random(n, heads, d, dtype=dtype) * 2
    # Keys and values of a token beside each other, as the cache has them.
    kv = random(n, kv_heads * (d + dv), dtype=dtype, seed=1)
    rows = in_wider(kv, device)
    k, gk = (t[:, : kv_heads * d].unflatten(1, (kv_heads, d)) for t in (kv, rows))
    v, gv = (t[:, kv_heads * d :].unflatten(1, (kv_heads, dv)) for t in (kv, rows))
    out = room(n, heads, dv, dtype=dtype, device=device)
    ends = torch.tensor([0, *accumulate(lengths)], dtype=torch.int32, device=device)
    OPS.attend_prefill(in_wider(q, device), gk, gv, lengths, ends, d**-0.5, out, window)
    want = causal(q, k, v, lengths, d**-0.5, window)
    # Probabilities are rounded too, and sums of values of size 1 have that error.
    close(out, want, dtype, 3)
    assert untouched(out)
    return out


@pytest.mark.parametrize("shape", SHAPES)
def test_prefill(place: tuple[str, torch.dtype], shape: tuple[int, int, int, int]) -> None:
    lengths = [1, 0, 131, 64, 0] if place[0] == "cpu" else [1, 0, 700, 128, 0, 129, 2, 64]
    attend(place, shape, lengths)


@pytest.mark.parametrize("window", [1, 3, 64, 100, 500])
def test_prefill_in_a_window(place: tuple[str, torch.dtype], window: int) -> None:
    attend(place, (1, 1, 32, 32), [150, 1, 70], window)


def test_prefill_of_nothing_and_of_many_short_prompts(place: tuple[str, torch.dtype]) -> None:
    attend(place, (1, 1, 16, 16), [])
    attend(place, (1, 1, 16, 16), [0, 0])
    attend(place, (1, 1, 16, 16), [i % 4 for i in range(30)])


@pytest.mark.gpu
def test_prefill_of_long_prompts_is_right_and_the_same_every_time() -> None:
    where = ("cuda", torch.bfloat16)
    lengths = [3000, 17, 1025, *[16] * 300]
    first = attend(where, (8, 2, 128, 128), lengths)
    assert torch.equal(attend(where, (8, 2, 128, 128), lengths), first)


@pytest.mark.gpu
def test_nothing_is_allocated() -> None:
    n, h = 3000, 256
    x, y = random(n, h).cuda().bfloat16(), random(2 * n, h).cuda().bfloat16()
    memory = arena("cuda", working.sort_bytes(2 * n, 64))
    ids = torch.randint(0, 64, (n, 2), dtype=torch.int32, device="cuda")
    order, inverse = torch.empty(2 * n, dtype=torch.int32, device="cuda"), torch.empty_like(ids)
    ends = torch.empty(64, dtype=torch.int32, device="cuda")
    counts = torch.empty(64, dtype=torch.int64, device="cuda")
    weights, logits = torch.ones(n, 2, device="cuda"), random(n, 64).cuda()
    w = random(64, h, h).cuda().bfloat16()
    starts = torch.tensor([0, 1000, n], dtype=torch.int32, device="cuda")
    heads = x.unflatten(1, (2, 128))
    o = torch.empty_like(heads)
    out = torch.empty_like(y)

    def work() -> None:
        OPS.top_k(logits, ids, weights, memory, renormalize=True)
        OPS.sort_choices(ids, 64, order, inverse, ends, counts, memory)
        OPS.gather(x, order, y)
        OPS.grouped_linear(y, w, ends, out)
        OPS.combine(x, out, inverse, weights, None, memory)
        OPS.rms_norm(x, x[0], 1e-5, x)
        OPS.attend_prefill(heads, heads, heads, [1000, 2000], starts, 1.0, o)

    work()
    torch.cuda.synchronize()
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    work()
    assert torch.cuda.max_memory_allocated() == before


@pytest.mark.gpu
def test_other_sizes_compile_nothing_anew(monkeypatch: pytest.MonkeyPatch) -> None:
    from triton import knobs

    compiled: list[str] = []
    monkeypatch.setattr(
        knobs.runtime, "jit_cache_hook", lambda **about: compiled.append(about["repr"])
    )
    h, experts, k = 256, 16, 2
    x, w = random(600, h).cuda().half(), random(experts, h, h).cuda().half()
    many, act = random(1201, 2 * h).cuda().half(), torch.empty(1201, h).cuda().half()
    logits, weights = random(600, experts).cuda(), torch.ones(601, k, device="cuda")
    numbers = torch.zeros(1202, dtype=torch.int32, device="cuda")
    counts = torch.empty(experts, dtype=torch.int64, device="cuda")
    memory = arena("cuda")
    monkeypatch.setattr(triton_routing, "_ALONE", experts * 500 * k)

    def work(n: int, skip: int) -> None:
        ids = torch.zeros(n + 1, k, dtype=torch.int32, device="cuda")[skip:][:n]
        order, inverse = numbers[skip : skip + n * k], torch.zeros_like(ids)
        ends = torch.zeros(experts + skip, dtype=torch.int32, device="cuda")[skip:]
        starts = torch.tensor([0] * skip + [0, n], dtype=torch.int32, device="cuda")[skip:]
        OPS.top_k(logits[:n], ids, weights[skip:][:n], memory, renormalize=True)
        OPS.sort_choices(ids, experts, order, inverse, ends, counts, memory)
        OPS.gather(x[:n], order, act[: n * k])
        few = torch.full_like(ends, n * k)[: experts - 7 * skip]
        OPS.grouped_linear(act[: n * k], w[: len(few)], few, act[: n * k])
        OPS.silu_mul(many[: n * k], act[: n * k])
        OPS.combine(x[:n], act[: n * k], inverse, weights[skip:][:n], None, memory)
        OPS.rms_norm(x[:n], x[0], 1e-5, x[:n])
        q = x[:n].unflatten(1, (2, 128))
        OPS.attend_prefill(q, q, q, [n], starts, 1.0, many[:n, :h].unflatten(1, (2, 128)))

    for n in (1, 300, 600):  # few rows a group, some, and many; one program sorts, or three
        work(n, 0)
    compiled.clear()
    for n, skip in ((2, 1), (16, 1), (17, 0), (33, 1), (128, 0), (401, 1), (599, 0)):
        work(n, skip)
    torch.cuda.synchronize()
    assert compiled == []


@pytest.mark.gpu
def test_offsets_past_two_billion_elements() -> None:
    if torch.cuda.mem_get_info()[0] < 20e9:
        pytest.skip("needs 20 GB of GPU memory")
    n, heads, d, dtype = 140_000, 128, 128, torch.bfloat16
    x = torch.zeros(n, heads * d, dtype=dtype, device="cuda")
    x[-3:] = last = random(3, heads * d, dtype=dtype).cuda()
    last = last.cpu()
    index = torch.tensor([n - 1, 0, n - 3], dtype=torch.int32, device="cuda")
    out = torch.empty(3, heads * d, dtype=dtype, device="cuda")
    OPS.gather(x, index, out)
    assert torch.equal(out[::2].cpu(), last[[2, 0]])

    w = random(2, 64, heads * d, dtype=dtype) / 128
    few = torch.empty(n, 64, dtype=dtype, device="cuda")
    ends = torch.tensor([n - 3, n], dtype=torch.int32, device="cuda")
    OPS.grouped_linear(x, w.cuda(), ends, few)
    close(few[-3:], last.double() @ w[1].double().T, dtype, 2)
    del few

    lengths = [1000] * 139 + [997, 3]
    starts = torch.tensor([0, *accumulate(lengths)], dtype=torch.int32, device="cuda")
    q, o = x.unflatten(1, (heads, d)), torch.empty(n, heads, d, dtype=dtype, device="cuda")
    OPS.attend_prefill(q, q, q, lengths, starts, d**-0.5, o)
    q = last.unflatten(1, (heads, d))
    close(o[-3:], causal(q, q, q, [3], d**-0.5, None), dtype, 3)

    half = o.view(n, heads * d)[:, : heads * d // 2]
    OPS.silu_mul(x, half)
    gate, up = last.double().chunk(2, -1)
    close(half[-3:], gate * gate.sigmoid() * up, dtype)
    ones = torch.ones(heads * d, dtype=dtype)
    OPS.rms_norm(x, ones.cuda(), 1e-5, x)
    close(x[-3:], normed(last, ones, 1e-5), dtype, 2)


# ---------------------------------------------------------------- compiled for absent GPUs

COMPILE = """
import json, re, sys
import torch
from moegen.exec.arena import Arena
from moegen.exec.primitives import (
    cuda, triton_grouped, triton_prefill, triton_rope, triton_routing, triton_rows)
sys.path.insert(0, "tests")
from triton_compile import compile_launches

capability, shared = map(int, sys.argv[1:])
report = {}

def note(name, done):
    ptx = done.asm["ptx"]
    report.setdefault(name, []).append({
        "shared": done.metadata.shared,
        "wide": "ld.global.v4.b32" in ptx or "cp.async.cg.shared.global" in ptx,
        "wgmma": "wgmma" in ptx,
        "atomics": re.search(r"\\s(atom|red)\\.", ptx) is not None,
    })

for module in (triton_grouped, triton_prefill, triton_rope, triton_routing, triton_rows):
    compile_launches(module, capability, note)
    if hasattr(module, "shared_bytes"):
        module.shared_bytes = lambda device: shared

def full(*shape, dtype=torch.bfloat16): return torch.empty(*shape, dtype=dtype)
def ints(*shape): return full(*shape, dtype=torch.int32)
def floats(*shape): return full(*shape, dtype=torch.float32)
ops, none = cuda.Cuda(), Arena(1 << 20, torch.device("cpu"))
ops.rms_norm(full(9, 4096), full(4096), 1e-5, full(9, 4096))
ops.add_rms_norm(full(9, 8192), full(9, 8192), full(8192), 1e-5, full(9, 8192))
ops.silu_mul(full(9, 28672), full(9, 14336))
ops.gather(full(9, 4096), ints(9), full(9, 4096))
ops.combine(full(9, 4096), full(72, 4096), ints(9, 8), floats(9, 8), full(9, 4096), none)
ops.rope_halves(
    full(9, 6144), floats(9, 64), floats(9, 64), 32, 8, full(9, 4096), full(9, 2048))
ops.rope_pairs(full(9, 128, 64), floats(9, 32), floats(9, 32), full(9, 128, 64))
for experts, k, groups, top in (8, 2, 0, 0), (160, 6, 8, 3):
    ops.top_k(floats(9, experts), ints(9, k), floats(9, k), none, renormalize=True,
        groups=groups, top_groups=top)
    for n in 16, 9000:
        ops.sort_choices(ints(n, k), experts, ints(n * k), ints(n, k), ints(experts),
            full(experts, dtype=torch.int64), none)
for heads, kv_heads, d, dv in (32, 8, 128, 128), (16, 16, 192, 128), (8, 8, 256, 256):
    ops.attend_prefill(full(9, heads, d), full(9, kv_heads, d), full(9, kv_heads, dv),
        [9], ints(2), 1.0, full(9, heads, dv))
for n in 8, 500, 4000:
    ops.grouped_linear(full(n, 4096), full(8, 512, 4096), ints(8), full(n, 512))
print(json.dumps(report))
"""

BUILT = {  # kernels, and how many forms of each
    "_rms_norm_kernel": 2,
    "_silu_mul_kernel": 1,
    "_gather_kernel": 1,
    "_combine_kernel": 1,
    "_rope_halves_kernel": 1,
    "_rope_pairs_kernel": 1,
    "_top_k_kernel": 2,
    "_sort_kernel": 2,
    "_count_kernel": 2,
    "_scan_kernel": 2,
    "_place_kernel": 2,
    "_prefill_kernel": 3,
    "_grouped_kernel": 3,
}
# Their inputs are small.
NARROW = {"_top_k_kernel", "_sort_kernel", "_count_kernel", "_scan_kernel", "_place_kernel"}


@pytest.mark.cpu
@pytest.mark.parametrize(("capability", "shared"), [(86, 98 * 1024), (90, 226 * 1024)])
def test_kernels_compile_into_wide_accesses_and_fit(capability: int, shared: int) -> None:
    env = {k: v for k, v in os.environ.items() if k != "TRITON_INTERPRET"}
    done = subprocess.run(
        [sys.executable, "-c", COMPILE, str(capability), str(shared)],
        cwd=ROOT,
        env=env,
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stderr
    report = json.loads(done.stdout)
    assert {name: len(forms) for name, forms in report.items()} == BUILT
    for name, forms in report.items():
        assert not any(form["atomics"] for form in forms), name
        assert all(form["shared"] <= shared + 1024 for form in forms), name
        if name not in NARROW:
            assert forms[0]["wide"], f"{name} does not load 16 bytes a thread"
    if capability == 90:
        assert all(form["wgmma"] for form in report["_prefill_kernel"])
        assert [form["wgmma"] for form in report["_grouped_kernel"]] == [False, True, True]
