"""What plots of DataFrames share: the names of axes, and refusals of what cannot be drawn."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from moegen.errors import InvalidInput

_NAMES = {
    "omega": "ω, share of decode attention on the CPU",
    "B": "B, sequences in flight together",
    "b_a": "b_a, sequences that the GPU attends to at a time",
    "b_e": "b_e, tokens through an expert at a time",
    "s_expert": "S_Expert, GPU memory for experts copied ahead",
    "s_params": "S_Params, GPU memory for weights that stay",
    "h2d_bytes_per_s": "link, host to GPU",
    "cpu_attn_bytes_per_s": "KV that the CPU attends to",
    "host_bytes_per_s": "host memory, all cores",
    "host_memory_bytes": "host memory",
    "gpu_memory_bytes": "GPU memory",
    "kv_len": "tokens of context",
    "decode_tokens_per_s": "decode throughput (tokens/s)",
    "prefill_tokens_per_s": "prefill throughput (tokens/s)",
    "throughput": "throughput of the job (generated tokens/s)",
    "tokens_per_s": "throughput (tokens/s)",
    "tokens_per_usd": "generated tokens for a US dollar",
    "tokens_per_joule": "generated tokens for a joule",
    "time_s": "time (s)",
    "price_usd": "price of the machine (USD)",
    "power_w": "power of the machine (W)",
    "prompt_len": "tokens of a prompt",
    "gen_len": "tokens of an answer",
}
_SYMBOLS = {
    "omega": "ω",
    "h2d_bytes_per_s": "link",
    "host_memory_bytes": "host memory",
    "gpu_memory_bytes": "GPU memory",
}
_SIZES = {"s_expert", "s_params"}


def symbol(column: str) -> str:
    """What a column is called in a sentence."""
    return _SYMBOLS.get(column, column)


def _giga(column: str) -> str:
    """The unit in which a column of bytes is shown; empty for other columns."""
    if column.endswith("_bytes_per_s"):
        return "GB/s"
    return "GB" if column.endswith("_bytes") or column in _SIZES else ""


def value_name(column: str, value: Any) -> str:
    """A value of a column with its unit."""
    unit = _giga(column)
    if unit:
        return f"{value / 1e9:.4g} {unit}"
    return f"{value:g}" if isinstance(value, float) else str(value)


def dress(axis: Any, column: str) -> None:
    """Name an axis after its column, with the unit, and let its numbers be easy to read."""
    unit = _giga(column)
    name = _NAMES.get(column, column)
    axis.set_label_text(f"{name} ({unit})" if unit else name)
    scale = 1e9 if unit else 1.0
    axis.set_major_formatter(lambda value, _: f"{value / scale:,.10g}")


def without_errors(df: Any) -> Any:
    """The points that fit, of a frame that :func:`moegen.sweep` gave; any other as it is."""
    import pandas as pd

    if not isinstance(df, pd.DataFrame) or "error" not in df.columns:
        return df
    fits = df[df["error"].fillna("") == ""]
    if fits.empty and len(df):
        raise InvalidInput(f"no point fits, there is nothing to plot: {df['error'].iloc[0]}")
    return fits


def check(frame: Any, name: str, numbers: Sequence[str], others: Sequence[str]) -> None:
    """Refuse a frame without rows, without one of these columns, or with gaps in them."""
    import pandas as pd

    if not isinstance(frame, pd.DataFrame):
        raise InvalidInput(f"{name} must be a DataFrame, got {type(frame).__name__}")
    for column in (*numbers, *others):
        if column not in frame.columns:
            there = ", ".join(map(str, frame.columns)) or "none"
            raise InvalidInput(f"{name} has no column {column!r}; its columns are {there}")
    if frame.empty:
        raise InvalidInput(f"{name} has no rows: there is nothing to plot")
    for column in (*others, *({"binds"} & set(frame.columns))):
        for row in np.flatnonzero(frame[column].isna())[:1]:
            raise InvalidInput(f"{name}[{column!r}] has no value in row {frame.index[row]}")
    for column in numbers:
        values = np.asarray(frame[column])
        if values.dtype.kind not in "iuf":
            raise InvalidInput(f"{name}[{column!r}] must hold numbers, got {values.tolist()[:3]}")
        for row in np.flatnonzero(~np.isfinite(values))[:1]:
            raise InvalidInput(
                f"{name}[{column!r}] is {values[row]} in row {frame.index[row]}: leave out points "
                f"that have no value"
            )
