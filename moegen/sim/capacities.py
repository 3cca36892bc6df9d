"""What each shared resource gives while others are in use beside it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from types import MappingProxyType
from typing import Protocol

import numpy as np

from moegen.graph.company import Company

#: By resource, what each of the tasks that run now draws on it at full speed.
InUse = Mapping[str, Sequence[float]]
NOTHING: InUse = MappingProxyType({})


class Capacities(Protocol):
    """Units per second of each resource; see `moegen.sim.cost.CostModel`.

    ``of_many`` may give one row for all sets.
    """

    def of(self, in_use: InUse) -> Mapping[str, float]: ...

    def of_many(self, names: Sequence[str], draws: np.ndarray) -> np.ndarray: ...


class Duplex:
    """The link's directions give less while both are in use, whatever they carry.

    Parameters
    ----------
    full : mapping of str to float
        Units per second of each resource alone.
    limits : mapping of str to float or None
        Those of ``h2d`` and ``d2h`` while both are in use.
    """

    def __init__(self, full: Mapping[str, float], limits: Mapping[str, float | None]) -> None:
        self.full, self.both = dict(full), dict(full)
        for name, limit in limits.items():
            if limit is not None and name in full:
                self.both[name] = min(full[name], float(limit))

    def of(self, in_use: InUse) -> Mapping[str, float]:
        return self.both if "h2d" in in_use and "d2h" in in_use else self.full

    def of_many(self, names: Sequence[str], draws: np.ndarray) -> np.ndarray:
        full = _row(self.full, names)
        if not {"h2d", "d2h"} <= set(names):
            return full
        up, down = draws[:, :, names.index("h2d")], draws[:, :, names.index("d2h")]
        both = np.logical_and(up.any(axis=1), down.any(axis=1))
        return np.where(np.expand_dims(both, 1), _row(self.both, names), full)


class InCompany:
    """Resources give the less, the more others are in use beside them.

    Of a resource r that gives C_r alone there is, while tasks run that would draw load[i][b] on
    another one b at full speed::

        C_r * min over entries (r beside b) of 1 - (1 - share) * u
        u = min(1, sum over i of load[i][b] / C_b)

    So r gives ``share`` of C_r beside a b in full use, and next to all of it beside one small
    flow. A task is not beside itself. Where one draws on both, as a zero-copy gather does on the
    link and on what zero-copy kernels get of it, only what the others draw on b counts: for the
    task that has most beside it, each weighed by its part in r::

        u = min(1, max over i of load[i][r] / (max over j of load[j][r])
                   * sum over j other than i of load[j][b] / C_b)

    which is the same where none does. Hence a task alone has all that there is.

    Parameters
    ----------
    full : mapping of str to float
        Units per second of each resource alone.
    company : sequence of Company
    """

    def __init__(self, full: Mapping[str, float], company: Sequence[Company]) -> None:
        self.full, self.company = dict(full), tuple(company)

    def of(self, in_use: InUse) -> Mapping[str, float]:
        shares: dict[str, float] = {}
        for entry in self.company:
            if entry.resource in in_use and entry.beside in in_use:
                own, other = in_use[entry.resource], in_use[entry.beside]
                all_own, all_other = max(own), sum(other)
                beside = max(x * (all_other - y) for x, y in zip(own, other, strict=True))
                used = min(1.0, beside / all_own / self.full[entry.beside])
                share = 1.0 - (1.0 - entry.share) * used
                shares[entry.resource] = min(share, shares.get(entry.resource, 1.0))
        return self.full | {name: share * self.full[name] for name, share in shares.items()}

    def of_many(self, names: Sequence[str], draws: np.ndarray) -> np.ndarray:
        shares = np.ones((len(draws), len(names)))
        for entry in self.company:
            if entry.resource in names and entry.beside in names:
                at = names.index(entry.resource)
                own, other = draws[:, :, at], draws[:, :, names.index(entry.beside)]
                most = own.max(axis=1)
                beside = (own * (other.sum(axis=1, keepdims=True) - other)).max(axis=1)
                beside = np.divide(beside, most, out=np.zeros_like(most), where=most > 0)
                used = np.minimum(1.0, beside / self.full[entry.beside])
                shares[:, at] = np.minimum(shares[:, at], 1.0 - (1.0 - entry.share) * used)
        return shares * _row(self.full, names)


def _row(of: Mapping[str, float], names: Sequence[str]) -> np.ndarray:
    return np.array([of.get(name, np.inf) for name in names])
