"""What the time of an op depends on: numbers that follow from its work, whatever the model.

A measured curve is a grid over these. Each op has its own, in a fixed order:

- matrix products: ``tokens`` a kernel, and ``flops_per_token``, which is how wide the matrices
  are (two FLOPs a weight); products of experts also ``launches``, for the experts of one task may
  be computed together;
- prefill attention: ``prompt_tokens``, ``attended_flops`` a token, which is how long the prompts
  are, and ``io_per_token``, bytes of its query, key, value and output, which tells models apart;
- decode attention: ``rows``, ``bytes_per_row``, which is how long their KV is, and
  ``flops_per_byte``, which is its kind (4 for mixtral's grouped heads in two bytes a number, some
  240 for the latent heads of deepseek-v2);
- ``sample`` and ``combine``: ``gpu_bytes``, and ``gpu_bytes_per_token``, which is how long a row
  of the vocabulary is, or those of a token's experts: few long rows take longer than as many bytes
  in short ones;
- ``append_kv``, which scatters rows over host memory: ``d2h_bytes`` and ``d2h_bytes_per_token``,
  for short rows fill the link less than long ones;
- other kernels: ``gpu_bytes``;
- other copies, by the copy engine or by kernels that read and write host memory: ``h2d_bytes`` or
  ``d2h_bytes``.

Where an op launches several kernels or copies, numbers and seconds are those of one, unless
``launches`` is a feature: then seconds are those of all of them.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace

from moegen.graph.task import Work


@dataclass(frozen=True)
class Feature:
    """A number that the time of an op depends on.

    Parameters
    ----------
    of : callable
        It, of a task's work.
    grows : tuple of str
        Fields of the work that are proportional to it when the other features stay.
    shrinks : tuple of str
        Fields of which there is as much less then: so many bytes are fewer tokens if each has more.
    of_model : bool
        Whether it follows from a model's widths, and not from how much there is to do.
    """

    of: Callable[[Work], float]
    grows: tuple[str, ...] = ()
    shrinks: tuple[str, ...] = ()
    of_model: bool = False

    def scaled(self, work: Work, factor: float) -> Work:
        """``work`` with this feature ``factor`` times as large and the others as they are."""
        more = {name: getattr(work, name) * factor for name in self.grows}
        less = {name: getattr(work, name) / factor for name in self.shrinks}
        return replace(work, **more, **less)


FEATURES = {
    "tokens": Feature(lambda w: w.tokens / w.launches, ("tokens", "flops")),
    "flops_per_token": Feature(lambda w: w.flops / w.tokens, ("flops", "gpu_bytes"), of_model=True),
    "prompt_tokens": Feature(lambda w: w.tokens / w.launches, ("tokens", "flops", "gpu_bytes")),
    "attended_flops": Feature(lambda w: w.flops / w.tokens, ("flops",)),
    "io_per_token": Feature(lambda w: w.gpu_bytes / w.tokens, ("gpu_bytes",), of_model=True),
    "launches": Feature(lambda w: w.launches, ("launches", "tokens", "flops", "gpu_bytes")),
    "rows": Feature(
        lambda w: w.rows / w.launches, ("rows", "tokens", "flops", "gpu_bytes", "host_bytes")
    ),
    "bytes_per_row": Feature(
        lambda w: (w.gpu_bytes + w.host_bytes) / w.rows, ("flops", "gpu_bytes", "host_bytes")
    ),
    "flops_per_byte": Feature(
        lambda w: w.flops / (w.gpu_bytes + w.host_bytes), ("flops",), of_model=True
    ),
    "gpu_bytes": Feature(lambda w: w.gpu_bytes / w.launches, ("gpu_bytes", "tokens")),
    "gpu_bytes_per_token": Feature(
        lambda w: w.gpu_bytes / w.tokens, shrinks=("tokens",), of_model=True
    ),
    "h2d_bytes": Feature(lambda w: w.h2d_bytes / w.launches, ("h2d_bytes",)),
    "d2h_bytes": Feature(lambda w: w.d2h_bytes / w.launches, ("d2h_bytes", "tokens")),
    "d2h_bytes_per_token": Feature(
        lambda w: w.d2h_bytes / w.tokens, shrinks=("tokens",), of_model=True
    ),
}

_PRODUCT = ("tokens", "flops_per_token")
_PRODUCTS = (*_PRODUCT, "launches")
_OF_ROWS = ("gpu_bytes", "gpu_bytes_per_token")
_ATTENTION = ("rows", "bytes_per_row", "flops_per_byte")
#: The features of each op.
FEATURES_OF: dict[str, tuple[str, ...]] = {
    "copy_rows": ("h2d_bytes",),
    "embed": ("gpu_bytes",),
    "copy_dense": ("h2d_bytes",),
    "pre_attn": _PRODUCT,
    "send_qkv": ("d2h_bytes",),
    "attn_cpu": _ATTENTION,
    "recv_attn": ("h2d_bytes",),
    "append_kv": ("d2h_bytes", "d2h_bytes_per_token"),
    "fetch_kv": ("h2d_bytes",),
    "attn_gpu": _ATTENTION,
    "attn_prefill": ("prompt_tokens", "attended_flops", "io_per_token"),
    "post_attn": _PRODUCT,
    "route": _PRODUCT,
    "copy_counts": ("d2h_bytes",),
    "shared_expert": _PRODUCT,
    "dense_mlp": _PRODUCT,
    "copy_expert": ("h2d_bytes",),
    "expert": _PRODUCTS,
    "combine": _OF_ROWS,
    "lm_head": _PRODUCT,
    "sample": _OF_ROWS,
    "copy_tokens": ("d2h_bytes",),
}
