"""From prompts to sequences: tokenized, and checked before anything runs."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from moegen.errors import InvalidInput
from moegen.exec.generate import SequenceState
from moegen.graph.checks import whole, wholes
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
        If a prompt is empty, is neither text nor token ids, does not fit the context, or has a
        token that the model does not; if a limit is no whole number.
    """
    prompts = _rows("prompts", prompts)
    n = len(prompts)
    each = _limits(max_new_tokens, n)
    texts = [None] * n if forced is None else _rows("forced", forced)
    for name, given in (("max_new_tokens", each), ("forced", texts)):
        if len(given) != n:
            raise InvalidInput(f"{name} has {len(given)} entries for {n} prompts")
    rows = []
    for i, (prompt, most, text) in enumerate(zip(prompts, each, texts, strict=True)):
        if isinstance(prompt, str):
            ids = _encode(tokenizer, i, prompt)
        else:
            ids = _token_ids(model, f"prompt {i}", prompt)
        own = None
        if forced is not None:
            own = _token_ids(model, f"forced tokens of prompt {i}", text)
            if not own:
                raise InvalidInput(f"forced tokens of prompt {i} are empty: give at least one")
            most = min(most, len(own))
        _check(model, i, ids, most)
        rows.append(SequenceState(i, ids, most, own))
    return rows


def _rows(name: str, values: Any) -> list[Any]:
    if isinstance(values, (str, bytes, Mapping)) or not isinstance(values, Iterable):
        raise InvalidInput(f"{name} must be a list with one entry a prompt, got {values!r}")
    return list(values)


def _limits(given: Any, n: int) -> list[int]:
    if not isinstance(given, Iterable) or isinstance(given, str):
        return [whole(given, "max_new_tokens", at_least=1)] * n
    return [whole(x, f"prompt {i}: max_new_tokens", at_least=1) for i, x in enumerate(list(given))]


def _encode(tokenizer: Any, i: int, text: str) -> list[int]:
    if tokenizer is None:
        raise InvalidInput("this engine has no tokenizer: give token ids instead of text")
    try:
        text.encode()
    except UnicodeEncodeError as e:
        raise InvalidInput(
            f"prompt {i} is no text: half of a surrogate pair at {e.start}, {text[e.start]!r}"
        ) from e
    return list(tokenizer(text)["input_ids"])


def _token_ids(model: ModelSpec, name: str, values: Any) -> list[int]:
    ids = list(wholes(values, name))
    for at, token in enumerate(ids):
        if token >= model.vocab:
            raise InvalidInput(
                f"{name} has a token id outside [0, {model.vocab}): {token} at place {at}"
            )
    return ids


def _check(model: ModelSpec, i: int, ids: list[int], most: int) -> None:
    if not ids:
        raise InvalidInput(f"prompt {i} is empty: it has no tokens to start from")
    limit = model.max_context
    if len(ids) + most > limit:
        raise InvalidInput(
            f"prompt {i} has {len(ids)} tokens and may generate {most}: together "
            f"{len(ids) + most - limit} more than the model's context of {limit}; shorten "
            f"it or lower max_new_tokens"
        )
    if min(ids) < 0 or max(ids) >= model.vocab:
        raise InvalidInput(f"prompt {i} has a token id outside [0, {model.vocab})")
