"""Checks of single values, so that a wrong one is refused by name wherever it comes in."""

from __future__ import annotations

import math
from collections.abc import Iterable
from numbers import Integral, Real
from typing import Any

from moegen.errors import InvalidInput

#: No count of rows, tokens or steps is larger; products of two stay far below overflow.
MOST = 2**40


def whole(value: Any, what: str, *, at_least: int = 0, at_most: int | None = None) -> int:
    """``value`` as an int, if it is a whole number within bounds.

    Takes numpy's integers and floats without a fraction; no bool and no text.

    Raises
    ------
    InvalidInput
        Naming ``what`` and the value.
    """
    if type(value) is not int:
        if not _is_whole(value):
            raise InvalidInput(_wanted(what, at_least, value))
        value = int(value)
    if value < at_least:
        raise InvalidInput(_wanted(what, at_least, value))
    if at_most is not None and value > at_most:
        raise InvalidInput(f"{what} must be at most {at_most}, got {_short(value)}")
    return value


def _is_whole(value: Any) -> bool:
    if isinstance(value, bool):
        return False
    if isinstance(value, Integral):
        return True
    # Any: the type checker has it that a Real need not become an int.
    number: Any = value
    return isinstance(value, Real) and math.isfinite(number) and number == int(number)


def wholes(
    values: Any, what: str, *, at_least: int = 0, at_most: int | None = None
) -> tuple[int, ...]:
    """The same for every one of ``values``: a list, a tuple, an array.

    Raises
    ------
    InvalidInput
        Naming the place of the first one that is wrong, as ``what[place]``.
    """
    if hasattr(values, "tolist"):  # an array's items would be slow one by one
        values = values.tolist()
    if isinstance(values, (str, bytes, dict)) or not isinstance(values, Iterable):
        raise InvalidInput(f"{what} must be a list of whole numbers, got {_short(values)}")
    values = tuple(values)
    high = math.inf if at_most is None else at_most
    # One built-in after the other: a batch has thousands of rows, and a search many batches.
    if set(map(type, values)) == {int} and at_least <= min(values) and max(values) <= high:
        return values
    return tuple(
        whole(v, f"{what}[{i}]", at_least=at_least, at_most=at_most) for i, v in enumerate(values)
    )


def number(
    value: Any,
    what: str,
    *,
    above: float | None = None,
    at_least: float | None = None,
    at_most: float | None = None,
) -> float:
    """``value`` as a float, if it is finite and within bounds. Takes no bool and no text.

    Raises
    ------
    InvalidInput
        Naming ``what`` and the value.
    """
    # The message is made when it is needed: a simulation checks millions of numbers.
    if isinstance(value, bool) or not isinstance(value, Real):
        raise InvalidInput(_wanted_number(what, above, at_least, at_most, value))
    real: Any = value
    try:
        result = float(real)
    except OverflowError:
        raise InvalidInput(_wanted_number(what, above, at_least, at_most, value)) from None
    if (
        not math.isfinite(result)
        or (above is not None and result <= above)
        or (at_least is not None and result < at_least)
        or (at_most is not None and result > at_most)
    ):
        raise InvalidInput(_wanted_number(what, above, at_least, at_most, value))
    return result


def _wanted_number(
    what: str, above: float | None, at_least: float | None, at_most: float | None, value: Any
) -> str:
    bound = ""
    if above is not None:
        bound = f" above {above:g}"
    elif at_least is not None:
        bound = f" of at least {at_least:g}"
    if at_most is not None:
        bound += f"{' and' if bound else ' of'} at most {at_most:g}"
    return f"{what} must be a finite number{bound}, got {_short(value)}"


def _wanted(what: str, at_least: int, value: Any) -> str:
    return f"{what} must be a whole number of at least {at_least}, got {_short(value)}"


def _short(value: Any) -> str:
    # Digits of a huge int may not even be printable (sys.set_int_max_str_digits).
    if isinstance(value, int) and abs(value) >= 10**40:
        return f"a number of about {'-' if value < 0 else ''}2**{value.bit_length()}"
    text = repr(value)
    return text if len(text) <= 80 else text[:77] + "..."
