"""Attention formulations against a naive one in float64."""

from __future__ import annotations

import pytest

pytestmark = pytest.mark.cpu
torch = pytest.importorskip("torch")

from moegen.exec import torch_attention  # noqa: E402
from moegen.exec.attention import DecodeShape  # noqa: E402


def naive(q, k, v, scale):
    """One query [heads, D] over k [n, heads, D], v [n, heads, D_v], in float64."""
    q, k, v = q.double(), k.double(), v.double()
    weights = (torch.einsum("hd,nhd->hn", q, k) * scale).softmax(-1)
    return torch.einsum("hn,nhd->hd", weights, v)


def views(lengths, width, *, capacity=None, dtype=torch.float32):
    """Rows in one flat store, each owning a range of it; the unused part is NaN."""
    capacity = capacity or max(lengths)
    flat = torch.full((len(lengths) * capacity, width), torch.nan, dtype=dtype)
    rows = [flat[r * capacity : r * capacity + n] for r, n in enumerate(lengths)]
    for row in rows:
        row.copy_(torch.randn(row.shape))
    return rows


def naive_gqa(q, rows, heads, kv_heads, dim, scale):
    out = []
    for q_row, kv in zip(q, rows, strict=True):
        k, v = kv.view(-1, 2, kv_heads, dim).unbind(1)
        k, v = (t.repeat_interleave(heads // kv_heads, 1) for t in (k, v))
        out.append(naive(q_row.view(heads, dim), k, v, scale).flatten())
    return torch.stack(out)


def naive_latent(q, rows, heads, rank, scale):
    out = []
    for q_row, kv in zip(q, rows, strict=True):
        k = kv[:, None].expand(-1, heads, -1)
        out.append(naive(q_row.view(heads, -1), k, k[..., :rank], scale).flatten())
    return torch.stack(out)


MIXED = [1, 300, 2, 17, 17, 17, 64, 1, 33, 299, 300, 300, 5]
EQUAL = [40] * 6


@pytest.mark.parametrize("lengths", [MIXED, EQUAL, [1], [1, 1, 1]])
@pytest.mark.parametrize("dim", [64, 96])
@pytest.mark.parametrize("group", [1, 4])
def test_decode_of_groups(lengths, dim, group):
    torch.manual_seed(0)
    kv_heads, scale = 2, dim**-0.5
    heads = group * kv_heads
    rows = views(lengths, 2 * kv_heads * dim)
    q = 3 * torch.randn(len(lengths), heads * dim)
    got = torch_attention.decode(DecodeShape(heads, kv_heads, dim, dim, False, scale), q, rows)
    wanted = naive_gqa(q, rows, heads, kv_heads, dim, scale)
    torch.testing.assert_close(got.double(), wanted, rtol=0, atol=5e-6)


@pytest.mark.parametrize("lengths", [MIXED, EQUAL, [1]])
@pytest.mark.parametrize(("heads", "rank", "rope"), [(4, 32, 8), (16, 512, 64)])
def test_decode_of_a_latent(lengths, heads, rank, rope):
    torch.manual_seed(0)
    scale = 1.3 * (rank + rope) ** -0.5
    rows = views(lengths, rank + rope)
    q = 3 * torch.randn(len(lengths), heads * (rank + rope))
    got = torch_attention.decode(DecodeShape(heads, 1, rank + rope, rank, True, scale), q, rows)
    wanted = naive_latent(q, rows, heads, rank, scale)
    # Products of so many float32 numbers are summed in another order on each kind of processor.
    torch.testing.assert_close(got.double(), wanted, rtol=0, atol=5e-6 * max(1, rank / 128))


@pytest.mark.parametrize("kind", ["gqa", "latent"])
def test_scores_of_half_precision_rows_stay_float32(kind):
    # Large scores that differ by less than bfloat16 can tell apart decide the softmax.
    torch.manual_seed(0)
    rows = views([300, 7], 128, dtype=torch.bfloat16)
    if kind == "gqa":
        q = 8 * torch.randn(2, 4 * 64).bfloat16()
        got = torch_attention.decode(DecodeShape(4, 1, 64, 64, False, 1.0), q, rows)
        wanted = naive_gqa(q, rows, 4, 1, 64, 1.0)
    else:
        q = 8 * torch.randn(2, 4 * 128).bfloat16()
        got = torch_attention.decode(DecodeShape(4, 1, 128, 96, True, 1.0), q, rows)
        wanted = naive_latent(q, rows, 4, 96, 1.0)
    torch.testing.assert_close(got.double(), wanted, rtol=0, atol=0.03)


def test_evenly_spaced_rows_become_one_batch_and_others_do_not():
    rows = views([5] * 4, 8, capacity=9)
    assert [(r.start, r.stop) for r, _ in torch_attention._batches(rows)] == [(0, 4)]
    ((_, batch),) = torch_attention._batches(rows)
    assert torch.equal(batch, torch.stack(rows))
    assert batch.data_ptr() == rows[0].data_ptr()
    apart = [rows[0], rows[1], rows[3], *views([5, 5], 8), rows[1], rows[0]]
    spans = []
    for span, batch in torch_attention._batches(apart):
        assert torch.equal(batch, torch.stack(apart[span]))
        spans.append((span.start, span.stop))
    assert spans == [(0, 2), (2, 3), (3, 5), (5, 6), (6, 7)]
