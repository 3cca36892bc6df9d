"""What ops hold while they run, beside the buffers between lanes: S_IS of Eq. 3.

Each function follows the executor's code expression by expression and gives the bytes alive
at its worst moment; tests measure that code and hold it to these numbers. Kernels that the
fused attention and matrix libraries launch are taken to need nothing of their own.

Shape legend: n tokens, H hidden, E experts, k experts a token, I an MLP's width; ``a`` is the
bytes of an activation.
"""

from __future__ import annotations

from dataclasses import dataclass

from moegen.graph.model import Attention, Layer, ModelSpec, Phase
from moegen.graph.sizes import Capacity

# Decode attention on the GPU splits rows until about so many programs run, and where a split
# has more tokens than that; a program has up to so many query heads.
SPLIT_PROGRAMS, SPLIT_TOKENS, HEAD_TILE = 1024, 1024, 16
# Pieces of the working memory begin at multiples of this.
ARENA_ALIGN_BYTES = 256


@dataclass(frozen=True)
class Need:
    """Bytes that an op holds at its worst moment, and on how many tokens it works."""

    op: str
    tokens: int
    bytes: int


def temporaries(model: ModelSpec, phase: Phase, c: Capacity, tile: int) -> Need:
    """The op that needs the most beside what is kept from op to op.

    Parameters
    ----------
    tile : int
        b_e: tokens that an MLP, a router and the weighted sum take at once.
    """
    n = min(tile, c.tokens)
    needs = []
    for indices in model.layer_classes.values():
        layer = model.layers[indices[0]]
        a, hidden = model.act_bytes, model.hidden
        attention = layer.attention
        staged = c.staged_tokens
        needs += [
            Need("pre_attn", staged, staged * _pre_attn(attention, hidden, a, phase)),
            Need("post_attn", staged, staged * _post_attn(attention, hidden, a, phase)),
        ]
        if phase == "prefill":
            held = staged * _attn_prefill(attention, a) + _mask(attention, c, a)
            needs.append(Need("attn_prefill", staged, held))
        else:
            needs.append(Need("attn_gpu", c.part_rows, _attn_gpu(attention, c)))
        mlp = "expert" if layer.mlp == "moe" else "dense_mlp"
        needs.append(Need(mlp, n, n * _mlp(layer, hidden, a)))
        if layer.mlp == "moe":
            needs.append(Need("route", n, n * _route(layer, hidden)))
            needs.append(Need("combine", n, n * (8 + a) * hidden))
    head = c.rows * (model.act_bytes * model.hidden + _norm(model.hidden))
    needs.append(Need("lm_head", c.rows, head))
    return max(needs, key=lambda need: need.bytes)


def routing_bytes(layer: Layer, tokens: int) -> int:
    """A layer's routing: ids, weights, the tokens in expert order, and what sorting takes.

    Eight int64 of each of a token's k choices, and a few of each expert.
    """
    return 64 * tokens * layer.top_k + 64 * (layer.n_experts + 1) if layer.n_experts else 0


def _norm(width: int) -> int:
    # In float32: the input and its square, or the input and its product.
    return 8 * width


def _angles(dim: int) -> int:
    # Position, frequencies, cosines and sines and their products in float32, then side by side.
    return 8 + 28 * dim


def _pre_attn(at: Attention, hidden: int, a: int, phase: Phase) -> int:
    if at.kind == "gqa":
        q, kv = at.q_width(phase), at.kv_width
        rotated = q + at.n_kv_heads * at.head_dim
        held = a * (q + kv) + _angles(at.head_dim) + 3 * a * rotated
        return max(_norm(hidden), a * (hidden + q + kv), held)
    rank, rope = at.q_lora_rank or 0, at.n_heads * at.rope_head_dim
    widest = at.n_heads * at.head_dim
    kept = a * (hidden + 2 * rank + widest + 2 * at.kv_width) + _angles(at.rope_head_dim)
    latent = at.n_heads * at.kv_lora_rank if phase == "decode" else 0
    last = a * (rope + latent + at.q_width(phase))
    return max(_norm(hidden), kept + max(_norm(max(rank, at.kv_width)), 12 * rope, last))


def _post_attn(at: Attention, hidden: int, a: int, phase: Phase) -> int:
    heads = 0
    if at.kind == "mla" and phase == "decode":
        heads = 2 * a * at.n_heads * at.v_head_dim  # out of the latent, and laid out anew
    return max(heads, heads // 2 + a * hidden, a * hidden + max(_norm(hidden), a * hidden))


def _attn_prefill(at: Attention, a: int) -> int:
    # The output, and the same as the kernel left it with a float32 sum a head.
    held = 2 * a * at.out_width("prefill") + 4 * at.n_heads
    if at.kind == "mla":
        nope = at.head_dim - at.rope_head_dim
        held += a * at.n_heads * (nope + at.v_head_dim + at.head_dim)
    return held


def _mask(at: Attention, c: Capacity, a: int) -> int:
    # A window needs a mask, of booleans (three while it is made) and then of activations.
    if at.window is None or c.longest <= at.window:
        return 0
    return c.longest**2 * (3 + a)


def _attn_gpu(at: Attention, c: Capacity) -> int:
    if not c.part_rows:
        return 0
    small = 64 * c.part_rows  # starts and lengths
    group = at.n_heads if at.kind == "mla" else at.n_heads // at.n_kv_heads
    kv_heads = 1 if at.kind == "mla" else at.n_kv_heads
    width = at.kv_lora_rank if at.kind == "mla" else at.v_head_dim
    # Few rows are split until the programs are enough; R rows into ceil(most / R) parts each.
    most = -(-SPLIT_PROGRAMS // (kv_heads * -(-group // HEAD_TILE)))
    parts = most + min(c.part_rows, most)
    if c.longest > SPLIT_TOKENS:
        parts = max(parts, c.part_rows * -(-c.longest // SPLIT_TOKENS))
    return small + parts * at.n_heads * 4 * (width + 1)


def _mlp(layer: Layer, hidden: int, a: int) -> int:
    # Input, gate and up, their product, output; and an output beside another's input.
    width = max(layer.moe_intermediate, layer.shared_intermediate, layer.dense_intermediate)
    return a * (3 * width + 2 * hidden)


def _route(layer: Layer, hidden: int) -> int:
    # The input in float32, and scores: logits, softmax, by group, masked, and what topk gives.
    return 4 * hidden + 24 * layer.n_experts + 16 * layer.top_k
