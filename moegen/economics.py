"""What tokens cost: per dollar rented or owned, per joule. The whole machine, while it works."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Literal

import numpy as np

from moegen.errors import InvalidInput
from moegen.graph.checks import number
from moegen.graph.hardware import HardwareSpec

Basis = Literal["own", "rent"]
_NEEDS: dict[Basis, tuple[str, ...]] = {
    "own": ("price_usd", "power_w"),
    "rent": ("rental_usd_per_hour",),
}
_HOURS_A_YEAR = 8766.0
_SECONDS_AN_HOUR = 3600.0
_JOULES_A_KWH = 3.6e6


def usd_per_hour(
    hw: HardwareSpec,
    basis: Basis | None = None,
    *,
    years: float = 3.0,
    usd_per_kwh: float = 0.15,
    busy: float = 1.0,
) -> float:
    """What an hour of work of a machine costs, in dollars.

    Parameters
    ----------
    basis : {None, "own", "rent"}
        "own": ``price_usd`` written off evenly, and electricity for ``power_w``. "rent":
        ``rental_usd_per_hour``. None: "own" if price and power are known, else "rent".
    years : float
        In which the price is written off.
    usd_per_kwh : float
        Price of electricity.
    busy : float
        Share of those years in which the machine works; it draws its power only then.

    Raises
    ------
    InvalidInput
        If the machine has no such price, or a parameter is out of range.
    """
    if _basis([hw], basis) == "rent":
        assert hw.rental_usd_per_hour is not None
        return hw.rental_usd_per_hour
    years, busy = number(years, "years", above=0), number(busy, "busy", above=0)
    if busy > 1:
        raise InvalidInput(f"busy must be a share of the time, at most 1, got {busy}")
    electricity = number(usd_per_kwh, "usd_per_kwh", at_least=0)
    assert hw.price_usd is not None and hw.power_w is not None
    joules = hw.power_w * _SECONDS_AN_HOUR
    return hw.price_usd / (years * _HOURS_A_YEAR * busy) + electricity * joules / _JOULES_A_KWH


def tokens_per_usd(
    tokens_per_s: Any,
    hw: HardwareSpec | Sequence[HardwareSpec],
    basis: Basis | None = None,
    **terms: float,
) -> Any:
    """Tokens for a dollar.

    Parameters
    ----------
    tokens_per_s : float, array or Series
        Throughputs, tokens a second. NaN stays NaN: a point that does not fit costs nothing.
    hw : HardwareSpec or a sequence of them
        The machine, or one for each throughput. They are all rented, or all owned: with ``basis``
        None, owned if price and power of all are known, else rented.
    basis, **terms
        As :func:`usd_per_hour` takes them.

    Returns
    -------
    float, ndarray or Series
        As ``tokens_per_s`` is one.

    Raises
    ------
    InvalidInput
        If a machine has no such price, or a throughput is negative or infinite.
    """
    machines = [hw] if isinstance(hw, HardwareSpec) else list(hw)
    basis = _basis(machines, basis)
    cost = [usd_per_hour(machine, basis, **terms) / _SECONDS_AN_HOUR for machine in machines]
    return _divided(tokens_per_s, hw, cost)


def tokens_per_joule(tokens_per_s: Any, hw: HardwareSpec | Sequence[HardwareSpec]) -> Any:
    """Tokens for a joule, at ``power_w`` of the whole machine.

    Parameters
    ----------
    tokens_per_s, hw
        As :func:`tokens_per_usd` takes them.

    Raises
    ------
    InvalidInput
        If a machine's power is not known, or a throughput is negative or infinite.
    """
    machines = [hw] if isinstance(hw, HardwareSpec) else list(hw)
    _require(machines, ("power_w",))
    return _divided(tokens_per_s, hw, [machine.power_w for machine in machines])


def _basis(machines: list[HardwareSpec], basis: Basis | None) -> Basis:
    """How to pay for machines, all in the same way."""
    if basis is not None and basis not in _NEEDS:
        raise InvalidInput(f'basis must be "own" or "rent", got {basis!r}')
    if basis is not None:
        _require(machines, _NEEDS[basis])
        return basis
    for known, fields in _NEEDS.items():
        if not any(getattr(machine, field) is None for machine in machines for field in fields):
            return known
    names = ", ".join(sorted({machine.name for machine in machines}))
    raise InvalidInput(
        f"{names}: neither price_usd and power_w nor rental_usd_per_hour is known of all: "
        f"give them, as hw.with_(rental_usd_per_hour=...)"
    )


def _require(machines: list[HardwareSpec], fields: tuple[str, ...]) -> None:
    for machine in machines:
        missing = [field for field in fields if getattr(machine, field) is None]
        if missing:
            raise InvalidInput(
                f"{machine.name} has no {' and no '.join(missing)}: give it, "
                f"as hw.with_({missing[0]}=...)"
            )


def _divided(tokens_per_s: Any, hw: Any, rates: list[Any]) -> Any:
    """Throughputs over one rate, or over a rate each."""
    values = np.asarray(tokens_per_s, dtype=float)
    wrong = values[~np.isnan(values) & ~((values >= 0) & np.isfinite(values))]
    if wrong.size:
        raise InvalidInput(f"tokens_per_s must be finite and not negative, got {wrong.flat[0]}")
    if isinstance(hw, HardwareSpec):
        over: Any = rates[0]
    elif values.shape != (len(rates),):
        raise InvalidInput(f"{len(rates)} machines for throughputs of shape {values.shape}")
    else:
        over = np.array(rates)
    if isinstance(tokens_per_s, (list, tuple)):
        tokens_per_s = values
    return tokens_per_s / over
