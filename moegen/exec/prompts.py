"""From prompts to sequences: tokenized, and checked before anything runs."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from moegen.errors import InvalidInput
from moegen.exec.generate import SequenceState
from moegen.graph.model import ModelSpec


def to_sequences(
    model: ModelSpec,
    tokenizer: Any,
    prompts: Sequence[str | Sequence[int]],
    max_new_tokens: int | Sequence[int],
    forced: Sequence[Sequence[int]] | None,
) -> list[SequenceState]:
    """One sequence a prompt, with its own limit and, if given, the tokens forced on it.

    Raises
    ------
    InvalidInput
        If a prompt is empty, does not fit the context, or has a token the model does not.
    """
    n = len(prompts)
    each = [max_new_tokens] * n if isinstance(max_new_tokens, int) else list(max_new_tokens)
    for name, given in (("max_new_tokens", each), ("forced", forced)):
        if given is not None and len(given) != n:
            raise InvalidInput(f"{name} has {len(given)} entries for {n} prompts")
    rows = []
    for i, (prompt, most) in enumerate(zip(prompts, each, strict=True)):
        ids = _encode(tokenizer, prompt) if isinstance(prompt, str) else [int(x) for x in prompt]
        own = None if forced is None else [int(x) for x in forced[i]]
        most = most if own is None else min(most, len(own))
        _check(model, i, ids, most)
        rows.append(SequenceState(i, ids, most, own))
    return rows


def _encode(tokenizer: Any, text: str) -> list[int]:
    if tokenizer is None:
        raise InvalidInput("this engine has no tokenizer: give token ids instead of text")
    return list(tokenizer(text)["input_ids"])


def _check(model: ModelSpec, i: int, ids: list[int], most: int) -> None:
    if not ids:
        raise InvalidInput(f"prompt {i} is empty: it has no tokens to start from")
    if most < 1:
        raise InvalidInput(f"prompt {i}: max_new_tokens must be at least 1, got {most}")
    limit = model.max_context
    if len(ids) + most > limit:
        raise InvalidInput(
            f"prompt {i} has {len(ids)} tokens and may generate {most}: together "
            f"{len(ids) + most - limit} more than the model's context of {limit}; shorten "
            f"it or lower max_new_tokens"
        )
    if min(ids) < 0 or max(ids) >= model.vocab:
        raise InvalidInput(f"prompt {i} has a token id outside [0, {model.vocab})")
