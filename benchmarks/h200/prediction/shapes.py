"""What files of results must have, and what one lacks, in words."""

from __future__ import annotations

import math
from typing import Any

from moegen.comparison.split import PARTS


class _Above0(tuple[type, ...]):
    """Types of a number that must be above 0."""


# A shape: a type; several, of which one will do; of an object the shapes of some keys, which may be
# missing where the name ends in ?, or with `str` as the key that of every value; of a list that of
# each item, with ... behind it if there must be one, or several shapes, one an item.
_NUMBER = (int, float)
_MAYBE = (*_NUMBER, type(None))
_POSITIVE, _COUNT = _Above0(_NUMBER), _Above0((int,))
_STRATEGY = dict.fromkeys(("B", "b_a", "b_e"), _COUNT) | {
    "omega": _NUMBER, "kv_slots": int, "dense_slots": int,
}  # fmt: skip
_POINT = {"model": str, "layers": int, "name": str, "phase": str, "strategy": _STRATEGY}
_ERRORS = dict.fromkeys(("step_median", "step_worst", "per_op"), _NUMBER)
#: Of each file of results, by its name.
SHAPES: dict[str, Any] = {
    "measured.json": {
        "points": [
            _POINT
            | {"timeline": str, "run": int, "period_s": _NUMBER, "step_end_s": [_NUMBER]}
            | {"lengths": [[_COUNT, _COUNT], ...]}
        ],
        "failed": [{"model": str, "point": str}],
        "machine?": dict.fromkeys(("gpu", "torch", "python", "date", "cpu?", "code?"), str)
        | {"cores": int},
        "seed?": int,
    },
    "predicted.json": {
        "points": [
            _POINT
            | dict.fromkeys(("tokens", "predicted_s", "measured_s", "measured_period_s"), _POSITIVE)
            | dict.fromkeys(("error", "all_runs_s", "all_runs_error", "period_error_s"), _NUMBER)
            | {"expert_slots": int, "lengths": [int, int], "runs_s": [_POSITIVE, ...]}
            | {"spread": _MAYBE, "parts": dict.fromkeys(PARTS, _NUMBER)}
            | {
                "ops": {
                    str: dict.fromkeys(("predicted_s", "measured_s"), _NUMBER)
                    | {"lane": str, "tasks": _COUNT, "spread": _MAYBE}
                }
            }
        ],
        "curve": [
            dict.fromkeys(("tokens_per_s", "measured_tokens_per_s"), _POSITIVE)
            | dict.fromkeys(("omega", "low", "high", "measured_low", "probability_best"), _NUMBER)
        ],
    },
    "first.json": _ERRORS | {"code": str, "errors": {str: _NUMBER}},
    "slopes.json": {
        "model": str,
        "layers": int,
        "situations": [
            {"name": str, "kept": bool, "context": int, "share": _NUMBER, "steps": int}
            | {"rounds": int, "strategy": _STRATEGY}
            | {
                "slopes": [
                    {"op": str, "lane": str, "tasks": _COUNT, "binds": bool, "agrees": bool}
                    | dict.fromkeys(("delay_s", "predicted_slope", "measured_slope", "se"), _NUMBER)
                    | {"error": _MAYBE}
                ]
            }
        ],
    },
    "profile_notes.json": {"seconds": _NUMBER, "compiled_s?": _MAYBE, "notes": [str]},
    "others.json": {
        "since": str,
        "delays?": {"seed": int, "ops": [str, ...], "why": str, "step_ms": {str: [_POSITIVE, ...]}},
        "measurements": [
            _ERRORS | {"seed": int, "date": str, "slopes_within": int, "slopes": int, "why": str}
        ],
    },
}  # fmt: skip


def lacks(data: Any, shape: Any, where: str = "") -> str:
    """What is wrong with some data, in words; empty if it has what its shape says.

    Numbers must be finite everywhere.
    """
    shapes = shape if isinstance(shape, tuple) else (shape,)
    kinds = [x if isinstance(x, type) else type(x) for x in shapes]
    of = next((x for x, kind in zip(shapes, kinds, strict=True) if _is(data, kind)), None)
    if of is None:
        names = " or ".join(kind.__name__ for kind in kinds)
        return f"{where or 'all of it'} must be {names}, and is {type(data).__name__}"
    if isinstance(data, dict):
        parts = _by_key(data, of if isinstance(of, dict) else {}, where)
    elif isinstance(data, list):
        parts = _by_item(data, of if isinstance(of, list) else [object], where)
    elif isinstance(data, float) and not math.isfinite(data):
        return f"{where} is {data}, and must be a finite number"
    elif isinstance(shape, _Above0) and data <= 0:
        return f"{where} is {data}, and must be above 0"
    else:
        return ""
    if isinstance(parts, str):
        return parts
    return next(filter(None, (lacks(x, each, at) for at, x, each in parts)), "")


def _is(data: Any, kind: type) -> bool:
    """Of booleans Python makes numbers; here they are none."""
    return isinstance(data, kind) and (kind in (bool, object) or not isinstance(data, bool))


# Where something is, what it is, and its shape; or what is wrong, in words.
_Parts = list[tuple[str, Any, Any]] | str


def _by_key(data: dict[str, Any], of: dict[Any, Any], where: str) -> _Parts:
    for key in of:
        if key is not str and not key.endswith("?") and key not in data:
            return f"{where or 'it'} has no {key}"
    rest = of.get(str, object)
    return [
        (f"{where}.{key}".lstrip("."), x, of.get(key, of.get(f"{key}?", rest)))
        for key, x in data.items()
    ]


def _by_item(data: list[Any], of: list[Any], where: str) -> _Parts:
    if of[-1] is ...:
        of = of[:-1]
        if not data:
            return f"{where} is empty"
    if len(of) == 1:
        of = of * len(data)
    if len(of) != len(data):
        return f"{where} must have {len(of)} items, and has {len(data)}"
    return [(f"{where}[{i}]", x, each) for i, (x, each) in enumerate(zip(data, of, strict=True))]
