"""The GPU lane's working memory, piece by piece: S_IS of Eq. 3.

Some pieces a program holds for good, such as the residual stream; on top of them each op takes
what it needs as long as it runs, a *frame*. The executor takes the pieces listed here and no
others, out of one block of :func:`working_bytes` (`moegen.exec.arena`), so that the ledger is
true by construction.

Shape legend: n tokens, H hidden, E experts, k experts a token, I an MLP's width; ``a`` is the
bytes of an activation.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import lru_cache
from typing import Literal, NamedTuple

from moegen.graph.model import Attention, Layer, ModelSpec, Phase
from moegen.graph.sizes import FLOAT32_ROUTER, Capacity, aligned
from moegen.graph.strategy import Strategy

# Decode attention on the GPU splits rows until about so many programs run, enough for a few
# waves on a large GPU; and where a split would have more tokens than that, lest a long row among
# short ones leave one program streaming alone. A program has up to so many query heads.
SPLIT_PROGRAMS, SPLIT_TOKENS, HEAD_TILE = 1024, 1024, 16
# Choices that are sorted by expert are counted so many at a time.
SORT_CHUNK = 1024

_SIZES = {"activation": 0, "float32": 4, "int32": 4}


class Kept(NamedTuple):
    """A piece that a program holds for good: its line in the ledger, shape and kind."""

    line: str
    shape: tuple[int, ...]
    kind: Literal["activation", "float32", "int32"]


@dataclass(frozen=True)
class Frame:
    """Bytes that an op takes at most, and on how many tokens or rows it works."""

    op: str
    n: int
    bytes: int


def working_bytes(model: ModelSpec, s: Strategy, phase: Phase, c: Capacity) -> int:
    """All working memory of a program whose largest step is ``c``."""
    return sum(kept_bytes(model, phase, c).values()) + largest_frame(model, s, phase, c).bytes


def kept_pieces(model: ModelSpec, phase: Phase, c: Capacity) -> dict[str, Kept]:
    """What a program holds for good, by the executor's names, in the order it is taken."""
    n, hidden = c.tokens, model.hidden
    k = max(x.top_k for x in model.layers)
    experts = max(x.n_experts for x in model.layers)
    rotated = max(_rotated(x.attention) for x in model.layers)
    pieces = {
        "x": Kept("hidden states", (n, hidden), "activation"),
        "h": Kept("hidden states", (n, hidden), "activation"),
        "cos": Kept("positions", (n, rotated // 2), "float32"),
        "sin": Kept("positions", (n, rotated // 2), "float32"),
    }
    if phase == "prefill":
        # A running sum from 0 for each micro-batch, of which there are at most as many as rows.
        pieces["prompt_ends"] = Kept("positions", (2 * c.rows,), "int32")
    if experts:
        pieces |= {
            "ids": Kept("routing", (n, k), "int32"),
            "gates": Kept("routing", (n, k), "float32"),
            "order": Kept("routing", (n * k,), "int32"),
            "inverse": Kept("routing", (n, k), "int32"),
            "expert_ends": Kept("routing", (experts,), "int32"),
            "outputs": Kept("outputs by expert", (n * k, hidden), "activation"),
        }
    if any(x.shared_params for x in model.layers):
        pieces["shared"] = Kept("shared experts' output", (n, hidden), "activation")
    return pieces


def kept_bytes(model: ModelSpec, phase: Phase, c: Capacity) -> dict[str, int]:
    """Bytes of :func:`kept_pieces`, by line of the ledger."""
    lines: dict[str, int] = {}
    for piece in kept_pieces(model, phase, c).values():
        size = _SIZES[piece.kind] or model.act_bytes
        lines[piece.line] = lines.get(piece.line, 0) + aligned(math.prod(piece.shape) * size)
    return lines


def largest_frame(model: ModelSpec, s: Strategy, phase: Phase, c: Capacity) -> Frame:
    """The op that takes the most beside what is kept."""
    return max(frames(model, s, phase, c), key=lambda frame: frame.bytes)


def frames(model: ModelSpec, s: Strategy, phase: Phase, c: Capacity) -> list[Frame]:
    """What each op of each class of layers takes at most while it runs."""
    a, hidden = model.act_bytes, model.hidden
    n, staged = min(s.b_e, c.tokens), c.staged_tokens
    last = aligned(c.rows * hidden * a)
    found = [Frame("lm_head", c.rows, last)]
    for indices in model.layer_classes.values():
        layer = model.layers[indices[0]]
        at = layer.attention
        found.append(Frame("pre_attn", staged, _pre_attn(at, hidden, staged, a, phase)))
        if phase == "prefill":
            found.append(Frame("attn_prefill", staged, _attn_prefill(at, staged, a)))
        else:
            found.append(Frame("post_attn", staged, _post_attn(at, staged, a)))
            found.append(Frame("attn_gpu", c.part_rows, _attn_gpu(at, c, a)))
        if layer.mlp == "dense":
            found.append(Frame("dense_mlp", n, _mlp(layer.dense_intermediate, n, a)))
            continue
        if layer.shared_params:
            found.append(Frame("shared_expert", n, _mlp(layer.shared_intermediate, n, a)))
        found.append(_expert(layer, hidden, s, c, a))
        found.append(Frame("route", c.tokens, _route(model, layer, n, c.tokens, a)))
    return found


def _rotated(at: Attention) -> int:
    return at.rope_head_dim if at.kind == "mla" else at.head_dim


def _pre_attn(at: Attention, hidden: int, n: int, a: int, phase: Phase) -> int:
    if at.kind == "gqa":
        return aligned(n * hidden * a, n * (at.q_width(phase) + at.kv_width) * a)
    # Keys and values are made where they belong, and in prefill so are the queries.
    held = aligned(n * hidden * a, n * (at.q_lora_rank or 0) * a)
    return held + aligned(n * at.n_heads * at.head_dim * a) * (phase == "decode")


def _post_attn(at: Attention, n: int, a: int) -> int:
    # What decode's attention left in the latent space is brought out of it.
    return aligned(n * at.n_heads * at.v_head_dim * a) if at.kind == "mla" else 0


def _attn_prefill(at: Attention, n: int, a: int) -> int:
    if at.kind == "gqa":
        return 0
    nope = at.head_dim - at.rope_head_dim
    # The latent decompressed to keys and values, and keys with their rotated part.
    return aligned(n * at.n_heads * (nope + at.v_head_dim) * a, n * at.n_heads * at.head_dim * a)


def _mlp(width: int, n: int, a: int) -> int:
    return aligned(2 * n * width * a, n * width * a)


def _expert(layer: Layer, hidden: int, s: Strategy, c: Capacity, a: int) -> Frame:
    # Experts that are taken together have at most b_e choices, so no more than that.
    group = min(s.expert_group, layer.top_k)
    n = min(s.b_e, c.tokens * group)
    ends = aligned(4 * min(s.expert_group, layer.n_experts)) if s.expert_group > 1 else 0
    return Frame("expert", n, aligned(n * hidden * a) + _mlp(layer.moe_intermediate, n, a) + ends)


def _route(model: ModelSpec, layer: Layer, n: int, tokens: int, a: int) -> int:
    if model.model_type in FLOAT32_ROUTER:
        scores = aligned(4 * n * model.hidden, 4 * n * layer.n_experts)
    else:
        scores = aligned(n * layer.n_experts * a)
    return max(scores, sort_bytes(tokens * layer.top_k, layer.n_experts))


def sort_bytes(choices: int, n_experts: int) -> int:
    """What sorting choices by expert takes at most: counts by expert of each chunk."""
    return aligned(4 * -(-choices // SORT_CHUNK) * n_experts)


def decode_block(d_key: int, act_bytes: int, latent: bool) -> int:
    """Tokens of a block of decode attention on the GPU.

    Such that two stages of buffers fit 99 KiB of shared memory. ``d_key`` is a key's width, of
    a latent the part that is the value too.
    """
    if latent:
        return 32 if act_bytes == 2 else 16
    return min(64, max(16, 16384 // (max(16, 1 << (d_key - 1).bit_length()) * act_bytes)))


def decode_split(max_length: int, tiles: int, block: int) -> int:
    """Tokens that a program of decode attention streams: whole blocks, few enough that the
    programs fill the GPU. ``tiles`` counts programs if no row were split."""
    blocks = -(-max_length // block)
    wanted = min(blocks, max(1, -(-SPLIT_PROGRAMS // tiles)))
    return min(-(-blocks // wanted) * block, SPLIT_TOKENS)


def _attn_gpu(at: Attention, c: Capacity, a: int) -> int:
    return _split_rows(at, c.part_rows, c.longest, a) if c.part_rows else 0


@lru_cache(maxsize=1024)
def _split_rows(at: Attention, part_rows: int, longest: int, a: int) -> int:
    latent = at.kind == "mla"
    kv_heads, width = (1, at.kv_lora_rank) if latent else (at.n_kv_heads, at.v_head_dim)
    tiles = kv_heads * -(-(at.n_heads // kv_heads) // HEAD_TILE)
    block = decode_block(width if latent else at.head_dim, a, latent)
    blocks = -(-longest // block)
    long = -(-longest // SPLIT_TOKENS)
    # Few rows are split into more parts each; past these no row is but for its length.
    few = min(part_rows, -(-SPLIT_PROGRAMS // tiles))
    parts = part_rows * long if long > 1 else 0
    for rows in range(1, few + 1):
        split = max(min(blocks, -(-SPLIT_PROGRAMS // (rows * tiles))), long)
        if split > 1:
            parts = max(parts, rows * split)
    of_rows = aligned(8 * part_rows, 8 * part_rows)
    if not parts:
        return of_rows
    return of_rows + aligned(4 * parts * at.n_heads * width, 4 * parts * at.n_heads)
