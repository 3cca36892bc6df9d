"""Each primitive in torch against a plain formula in float64, on strided tensors and on none."""

from __future__ import annotations

import pytest

pytestmark = pytest.mark.cpu
torch = pytest.importorskip("torch")

from moegen.exec.arena import Arena  # noqa: E402
from moegen.exec.primitives import reference  # noqa: E402
from moegen.exec.primitives.reference import Reference  # noqa: E402
from moegen.exec.primitives.select import primitives_for  # noqa: E402

OPS = Reference()
ARENA = Arena(0, torch.device("cpu"))  # nothing is taken of it
# Half a unit in the last place of the result, and of what is rounded on the way.
ROUNDING = {torch.float32: 2**-22, torch.bfloat16: 2**-7, torch.float16: 2**-10}
DTYPES = list(ROUNDING)
TOKENS = [0, 1, 7, 300]


@pytest.fixture(autouse=True)
def small_blocks(monkeypatch):
    """So that 300 tokens are many blocks, the last one shorter."""
    torch.manual_seed(0)
    monkeypatch.setattr(reference, "_BLOCK", 1000)


def random(*shape, dtype=torch.float32):
    """Rows of a wider tensor, as pieces of a buffer are."""
    *rest, last = shape
    return torch.randn(*rest, last + 3).to(dtype)[..., :last]


def unwritten(*shape, dtype=torch.float32):
    *rest, last = shape
    return torch.full((*rest, last + 3), torch.nan, dtype=dtype)[..., :last]


def near(got, wanted, dtype):
    torch.testing.assert_close(got.double(), wanted, rtol=2 * ROUNDING[dtype], atol=1e-5)


def test_devices():
    assert isinstance(primitives_for(torch.device("cpu")), Reference)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("n", TOKENS)
@pytest.mark.parametrize("biased", [False, True])
def test_linear(n, dtype, biased):
    x, w, out = (
        random(n, 40, dtype=dtype),
        random(24, 40, dtype=dtype),
        unwritten(n, 24, dtype=dtype),
    )
    bias = torch.randn(24).to(dtype) if biased else None
    OPS.linear(x, w, out, bias)
    wanted = x.double() @ w.double().T + (bias.double() if biased else 0.0)
    torch.testing.assert_close(
        out.double(), wanted, rtol=ROUNDING[dtype], atol=40 * ROUNDING[dtype]
    )


@pytest.mark.parametrize("counts", [[3, 0, 5, 1], [0, 0], [7], [0, 2, 0]])
def test_grouped_linear(counts):
    n, groups = sum(counts), len(counts)
    x, out = random(n + 2, 16), unwritten(n + 2, 12)
    # Matrices that lie apart, as experts do in a slot.
    w = torch.randn(groups, 300)[:, 50:242].unflatten(1, (12, 16))
    ends = torch.tensor(counts).cumsum(0).int()
    OPS.grouped_linear(x, w, ends, out)
    of_row = torch.arange(groups).repeat_interleave(torch.tensor(counts))
    wanted = torch.einsum("ni,noi->no", x[:n].double(), w[of_row].double())
    torch.testing.assert_close(out[:n].double(), wanted, rtol=0, atol=1e-5)


def normed(x, weight, eps, dtype):
    x = x.double() / (x.double().pow(2).mean(-1, keepdim=True) + eps).sqrt()
    return x.to(dtype).double() * weight.double()


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("n", TOKENS)
def test_rms_norm(n, dtype):
    x, weight, out = (
        random(n, 48, dtype=dtype),
        torch.randn(48).to(dtype),
        unwritten(n, 48, dtype=dtype),
    )
    OPS.rms_norm(x, weight, 0.3, out)
    near(out, normed(x, weight, 0.3, dtype), dtype)
    OPS.rms_norm(x, weight, 0.3, x)
    assert torch.equal(x, out)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("n", TOKENS)
def test_add_rms_norm(n, dtype):
    x, y = random(n, 48, dtype=dtype), random(n, 48, dtype=dtype)
    weight, total = torch.randn(48).to(dtype), (x.double() + y.double()).to(dtype)
    OPS.add_rms_norm(x, y, weight, 1e-5, y)  # as families call it: the result over the summand
    assert torch.equal(x, total)
    near(y, normed(total, weight, 1e-5, dtype), dtype)


def angles(n, width):
    angle = torch.randn(n, width // 2) * 9
    return angle.cos(), angle.sin()


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("n", TOKENS)
@pytest.mark.parametrize(("heads", "kv_heads"), [(6, 2), (3, 3), (8, 1)])
def test_rope_halves(n, heads, kv_heads, dtype):
    d = 16
    qkv, (cos, sin) = random(n, (heads + 2 * kv_heads) * d, dtype=dtype), angles(n, d)
    q, kv = unwritten(n, heads * d, dtype=dtype), unwritten(n, 2 * kv_heads * d, dtype=dtype)
    OPS.rope_halves(qkv, cos, sin, heads, kv_heads, q, kv)
    x = qkv.double().unflatten(1, (-1, d))
    turn = torch.complex(cos.double(), sin.double())[:, None]
    turned = torch.complex(x[..., : d // 2], x[..., d // 2 :]) * turn
    turned = torch.cat((turned.real, turned.imag), dim=-1)
    # Products are rounded too, so small differences of large ones count.
    limit = 16 * ROUNDING[dtype]
    got = torch.cat((q, kv), dim=1).double().unflatten(1, (-1, d))
    torch.testing.assert_close(
        got[:, : heads + kv_heads], turned[:, : heads + kv_heads], rtol=0, atol=limit
    )
    assert torch.equal(got[:, heads + kv_heads :], x[:, heads + kv_heads :])


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("n", TOKENS)
def test_rope_pairs(n, dtype):
    # Part of each head alone is turned, and in place.
    x, (cos, sin) = random(n, 5, 24, dtype=dtype), angles(n, 8)
    part, before = x[..., 16:], x.double()
    turn = torch.complex(cos.double(), sin.double())[:, None]
    turned = torch.complex(before[..., 16::2], before[..., 17::2]) * turn
    OPS.rope_pairs(part, cos, sin, part)
    near(part, torch.stack((turned.real, turned.imag), dim=-1).flatten(-2), dtype)
    assert torch.equal(x[..., :16].double(), before[..., :16])


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("n", TOKENS)
def test_silu_mul(n, dtype):
    both, out = random(n, 62, dtype=dtype), unwritten(n, 31, dtype=dtype)
    OPS.silu_mul(both, out)
    gate, up = both.double().chunk(2, dim=-1)
    near(out, gate / (1 + (-gate).exp()) * up, dtype)


@pytest.mark.parametrize("dtype", DTYPES)
def test_gather(dtype):
    x, out = random(9, 20, dtype=dtype), unwritten(5, 20, dtype=dtype)
    index = torch.tensor([8, 0, 0, 3, 8], dtype=torch.int32)
    OPS.gather(x, index, out)
    assert torch.equal(out, x[index.long()])
    OPS.gather(x, index[:0], out[:0])


def best(scores, k):
    """Places of the k largest of each row, of equals the lowest, by sorting in Python."""
    return [sorted(range(len(row)), key=lambda e: (-row[e], e))[:k] for row in scores.tolist()]


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("n", TOKENS)
@pytest.mark.parametrize("groups", [0, 4])
@pytest.mark.parametrize("renormalize", [False, True])
def test_top_k(n, dtype, groups, renormalize):
    experts, k, top_groups = 16, 3, 2
    logits = (2 * random(n, experts)).round().to(dtype)  # with many equals
    ids, weights = torch.empty(n, k, dtype=torch.int32), unwritten(n, k)
    OPS.top_k(
        logits, ids, weights, ARENA,
        renormalize=renormalize, scaling=1.5, groups=groups, top_groups=top_groups,
    )  # fmt: skip
    scores = logits.double().softmax(-1)
    allowed = scores.clone()
    if groups:
        chosen = best(logits.double().unflatten(1, (groups, -1)).amax(-1), top_groups)
        for row, kept in zip(allowed, chosen, strict=True):
            for g in set(range(groups)) - set(kept):
                row[g * 4 : g * 4 + 4] = 0.0
    # Equal logits have equal scores in float32 as well.
    assert ids.tolist() == best(allowed, k)
    wanted = scores.gather(1, ids.long())
    if renormalize:
        wanted /= wanted.sum(-1, keepdim=True)
    torch.testing.assert_close(weights.double(), 1.5 * wanted, rtol=1e-5, atol=0)


@pytest.mark.parametrize("n", TOKENS)
@pytest.mark.parametrize(("experts", "k"), [(8, 2), (60, 4), (5, 1)])
def test_sort_choices(n, experts, k):
    ids = torch.rand(n, experts).argsort(1)[:, :k].int().contiguous()
    ids[ids == 2] = 3  # one has no tokens
    order, inverse = torch.empty(n * k, dtype=torch.int32), torch.empty_like(ids)
    ends, counts = torch.empty(experts, dtype=torch.int32), torch.empty(experts).long()
    OPS.sort_choices(ids, experts, order, inverse, ends, counts, ARENA)
    places = sorted(range(n * k), key=lambda i: (ids.flatten()[i].item(), i))
    assert order.tolist() == [i // k for i in places]
    assert [places[p] for p in inverse.flatten().tolist()] == list(range(n * k))
    of = ids.flatten().tolist()
    assert counts.tolist() == [of.count(e) for e in range(experts)]
    assert ends.tolist() == [sum(x <= e for x in of) for e in range(experts)]


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("n", TOKENS)
@pytest.mark.parametrize("with_shared", [False, True])
def test_combine_is_one_rounded_sum_in_the_order_of_k(n, dtype, with_shared):
    k, hidden = 3, 16
    x, y = random(n, hidden, dtype=dtype), torch.randn(n * k, hidden).to(dtype)
    shared = random(n, hidden, dtype=dtype) if with_shared else None
    inverse, weights = torch.randperm(n * k).view(n, k).int(), torch.rand(n, k)
    wanted = x.double() + (weights.double()[..., None] * y[inverse.long()].double()).sum(1)
    if shared is not None:
        wanted += shared.double()
    got = x.clone()
    OPS.combine(got, y, inverse, weights, shared, ARENA)
    torch.testing.assert_close(got.double(), wanted, rtol=ROUNDING[dtype], atol=1e-6)
    # The order in which experts stored their outputs changes no bit.
    shuffle, again = torch.randperm(n * k), x.clone()
    OPS.combine(again, y[shuffle], shuffle.argsort()[inverse.long()].int(), weights, shared, ARENA)
    assert torch.equal(got, again)


@pytest.mark.parametrize(
    "lengths", [[], [1], [5], [33], [4, 4, 4, 1, 9, 9], [7, 3, 7], [2, 0, 5], [20, 20]]
)
@pytest.mark.parametrize("window", [None, 1, 6])
@pytest.mark.parametrize(("heads", "kv_heads", "dim", "v_dim"), [(8, 2, 16, 16), (3, 3, 24, 16)])
def test_prefill_is_causal_and_rows_do_not_meet(lengths, window, heads, kv_heads, dim, v_dim):
    n, scale = sum(lengths), dim**-0.5
    q, k, v = 2 * random(n, heads, dim), random(n, kv_heads, dim), random(n, kv_heads, v_dim)
    out, ends = unwritten(n, heads, v_dim), torch.tensor([0, *lengths]).cumsum(0).int()
    OPS.attend_prefill(q, k, v, lengths, ends, scale, out, window)
    row = torch.arange(len(lengths)).repeat_interleave(torch.tensor(lengths).long())
    t = torch.arange(n)
    seen = (row[:, None] == row) & (t <= t[:, None])
    if window is not None:
        seen &= t > t[:, None] - window
    k, v = (x.double().repeat_interleave(heads // kv_heads, 1) for x in (k, v))
    scores = torch.einsum("qhd,khd->hqk", q.double(), k) * scale
    weights = scores.masked_fill(~seen, -torch.inf).softmax(-1)
    torch.testing.assert_close(
        out.double(), torch.einsum("hqk,khd->qhd", weights, v), rtol=0, atol=5e-6
    )


def test_what_an_operation_holds_does_not_grow_with_the_tokens(monkeypatch):
    from torch.utils._python_dispatch import TorchDispatchMode

    monkeypatch.setattr(reference, "_BLOCK", 1 << 12)

    class Largest(TorchDispatchMode):
        most = 0

        def __torch_dispatch__(self, func, types, args=(), kwargs=None):
            out = func(*args, **(kwargs or {}))
            given = {t.untyped_storage()._cdata for t in args if isinstance(t, torch.Tensor)}
            given.add(((kwargs or {}).get("out", ARENA.block)).untyped_storage()._cdata)
            for t in out if isinstance(out, (tuple, list)) else (out,):
                if isinstance(t, torch.Tensor) and t.untyped_storage()._cdata not in given:
                    self.most = max(self.most, t.untyped_storage().nbytes())
            return out

    n, d, heads = 4000, 16, 4
    hidden = heads * d
    x, y = torch.randn(2, n, hidden)
    cos, sin = angles(n, d)
    q, qkv, kv = torch.empty(n, hidden), torch.randn(n, 2 * hidden), torch.empty(n, hidden)
    ids, gates = torch.empty(n, 2, dtype=torch.int32), torch.empty(n, 2)
    inverse = torch.randint(n, (n, 2)).int()
    lengths = [8] * (n // 8)
    heads_of = [t.view(n, heads, d) for t in (q, x, y, kv)]
    with Largest() as seen:
        OPS.add_rms_norm(x, y, torch.ones(hidden), 1e-5, y)
        OPS.rope_halves(qkv, cos, sin, heads, heads // 2, q, kv)
        OPS.rope_pairs(heads_of[1], cos, sin, heads_of[1])
        OPS.silu_mul(qkv, q)
        OPS.top_k(x, ids, gates, ARENA, renormalize=True, groups=4, top_groups=2)
        OPS.combine(x, y, inverse, gates, None, ARENA)
        OPS.attend_prefill(*heads_of[:3], lengths, ids[:0], 1.0, heads_of[3])
    assert 0 < seen.most <= 16 * 2**12
