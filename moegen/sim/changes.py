"""One part changed: a knob, a rate of the machine or an op's durations, as people say it."""

from __future__ import annotations

import dataclasses
import math
import re
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

from moegen.errors import InvalidInput
from moegen.graph.checks import number
from moegen.graph.hardware import HardwareSpec
from moegen.graph.strategy import Strategy
from moegen.units import format_bytes, parse_bytes, parse_rate

KNOBS = tuple(f.name for f in dataclasses.fields(Strategy))
#: All rates of the link, changed together by the name "link".
LINK = (
    "h2d_bytes_per_s", "d2h_bytes_per_s", "duplex_bytes_per_s", "duplex_d2h_bytes_per_s",
    "zero_copy_bytes_per_s",
)  # fmt: skip
_RELATIVE = re.compile(r"\s*([x*+-])\s*(\S.*?)\s*")
_SIZES = ("s_expert", "s_params")
_SYMBOLS = {"omega": "ω", "s_expert": "S_Expert", "s_params": "S_Params"}
_TIMES = {2.0: "twice", 0.5: "half"}


@dataclass(frozen=True)
class Change:
    """What is asked, sorted by what it changes.

    Attributes
    ----------
    knobs : mapping
        Fields of Strategy, as asked.
    rates : mapping
        Fields of HardwareSpec, or "link", as asked.
    ops : mapping of str to float
        Factors of the durations of ops.
    """

    knobs: Mapping[str, Any]
    rates: Mapping[str, Any]
    ops: Mapping[str, float]

    @classmethod
    def of(cls, asked: Mapping[str, Any]) -> Change:
        """Sort what is asked by name.

        Raises
        ------
        InvalidInput
            If nothing is asked, a name is unknown, or a factor of an op is no number of at
            least 0.
        """
        if not asked:
            raise InvalidInput('nothing is changed: ask for something, such as omega="+0.1"')
        machine = [f.name for f in dataclasses.fields(HardwareSpec)]
        unknown = [name for name in asked if name not in (*KNOBS, *machine, "link", "op")]
        if unknown:
            raise InvalidInput(
                f"there is no {unknown[0]!r} to change; there are knobs: {', '.join(KNOBS)}; "
                f"rates of the machine: link for all of the link's, or "
                f"{', '.join(n for n in machine if n.endswith('_per_s') or n.endswith('_s'))}; "
                f'and op={{"expert": 0.5}}'
            )
        ops = asked.get("op", {})
        if not isinstance(ops, Mapping) or ("op" in asked and not ops):
            raise InvalidInput(
                f'op must map ops to factors, such as {{"expert": 0.5}}, got {ops!r}'
            )
        factors = {
            op: number(_times(f), f"the factor of {op}", at_least=0) for op, f in ops.items()
        }
        rest = {name: value for name, value in asked.items() if name != "op"}
        knobs = {name: value for name, value in rest.items() if name in KNOBS}
        rates = {name: value for name, value in rest.items() if name not in KNOBS}
        return cls(knobs, rates, factors)

    def strategy(self, s: Strategy) -> Strategy:
        """``s`` with the knobs as asked.

        Raises
        ------
        InvalidInput
            If a value is out of range.
        """
        return s.with_(**{k: _new(k, getattr(s, k), asked) for k, asked in self.knobs.items()})

    def machine(self, hw: HardwareSpec) -> HardwareSpec:
        """``hw`` with the rates as asked.

        Raises
        ------
        InvalidInput
            If a field is no rate that a duration depends on, has no value, gets one out of range,
            or is changed twice.
        """
        new: dict[str, Any] = {}
        for name, asked in self.rates.items():
            if name == "link":
                if not _is_factor(asked):
                    raise InvalidInput(f'link takes a factor above 0, such as "x2", got {asked!r}')
                fields = [field for field in LINK if getattr(hw, field) is not None]
            elif name not in hw.rates and getattr(hw, name) is not None:
                raise InvalidInput(
                    f"no duration depends on {name}, so a run would take the same; those that "
                    f"durations depend on are {', '.join(hw.rates)}"
                )
            else:
                fields = [name]
            for field in fields:
                if field in new:
                    raise InvalidInput(
                        f"link changes {field} too, and {field} is changed by itself: name each "
                        f"rate of the link, or link alone"
                    )
                new[field] = _new(field, getattr(hw, field), asked)
        return hw.with_(**new) if new else hw

    def words(self, strategy: Strategy | None, hw: HardwareSpec | None) -> str:
        """The question as a person would say it: "link twice as fast, ω 0.5 -> 0.6"."""
        said = []
        for name, asked in self.rates.items():
            label = "link" if name == "link" else (hw.rates if hw else {}).get(name, name)
            said.append(f"{label} {_said(name, asked)}")
        if strategy is not None and self.knobs:
            new = self.strategy(strategy)
            for name in self.knobs:
                old, now = (_shown(name, getattr(s, name)) for s in (strategy, new))
                said.append(f"{_SYMBOLS.get(name, name)} {old} -> {now}")
        for op, factor in self.ops.items():
            said.append(f"{op} in {_TIMES.get(factor, f'{factor:g} times')} the time")
        return ", ".join(said)


def _times(asked: Any) -> Any:
    match = _RELATIVE.fullmatch(asked) if isinstance(asked, str) else None
    return _number("an op's factor", match[2]) if match and match[1] in "x*" else asked


def _new(name: str, now: Any, asked: Any) -> Any:
    """A field's new value: as given, or relative to what it is: "x2", "+0.1", "-1"."""
    match = _RELATIVE.fullmatch(asked) if isinstance(asked, str) else None
    if match is None:
        if isinstance(asked, str) and name != "fetch":
            return _number(name, asked)
        return asked
    if isinstance(now, bool) or not isinstance(now, (int, float)):
        raise InvalidInput(f"{name} is {now!r}: give its new value, {asked!r} is relative to one")
    by = _number(name, match[2]) if match[1] in "+-" else _number("a factor", match[2])
    value = {"x": now * by, "*": now * by, "+": now + by, "-": now - by}[match[1]]
    if not isinstance(now, int):
        return float(f"{value:.12g}")  # of omega what rounding adds is taken off
    if not math.isfinite(value) or (match[1] in "+-" and by % 1):
        raise InvalidInput(f"{name} is a whole number, {now}, and cannot change by {asked!r}")
    return round(value)


def _is_factor(asked: Any) -> bool:
    match = _RELATIVE.fullmatch(asked) if isinstance(asked, str) else None
    try:
        return match is not None and match[1] in "x*" and 0 < float(match[2]) < math.inf
    except ValueError:
        return False


def _number(name: str, text: str) -> float:
    if name in _SIZES or name.endswith("_bytes"):
        return parse_bytes(text)
    with suppress(InvalidInput, ValueError):
        return parse_rate(text) if name.endswith("_bytes_per_s") else float(text)
    rate = 'a rate such as "25GB/s", ' if name.endswith("_bytes_per_s") else ""
    raise InvalidInput(
        f'{name} takes a number, {rate}or a change such as "x2", "+1" or "-1", got {text!r}'
    )


def _shown(name: str, value: Any) -> str:
    if name in _SIZES:
        return format_bytes(value)
    return f"{value:g}" if isinstance(value, float) else str(value)


def _said(name: str, asked: Any) -> str:
    match = _RELATIVE.fullmatch(asked) if isinstance(asked, str) else None
    if match is None or match[1] in "+-":
        return f"{asked:g}" if isinstance(asked, float) else str(asked)
    factor = _number("a factor", match[2])
    if name.endswith("_s") and not name.endswith("_per_s"):
        return f"x{factor:g}"
    return f"{_TIMES.get(factor, f'{factor:g} times')} as fast"
