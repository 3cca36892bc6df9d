"""A cost model's machine with other rates, where its durations were measured with these."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace

import numpy as np

from moegen.errors import InvalidInput
from moegen.graph.hardware import HardwareSpec
from moegen.graph.task import Task
from moegen.sim.capacities import NOTHING, InUse
from moegen.sim.cost import Cost, CostModel
from moegen.sim.roofline import Roofline
from moegen.sim.scaled import Wrapped

# What resources give alone where a table says what they give in company, as in Measured.
_FULL = {
    "h2d": "h2d_bytes_per_s",
    "d2h": "d2h_bytes_per_s",
    "zero_copy": "zero_copy_bytes_per_s",
    "host_memory": "cpu_attn_bytes_per_s",
}


class OtherMachine(Wrapped):
    """Durations of one machine, as they would be on another one.

    A task takes longer or shorter, alone, in the ratio of what the rooflines of the two machines
    say of it; and each shared resource gives more or less in the ratio of the two. So what no
    changed rate touches stays exactly as it was, measured or not.

    Parameters
    ----------
    cost : CostModel
        Of a machine, ``cost.hw``.
    hw : HardwareSpec
        The other one.

    Raises
    ------
    InvalidInput
        If the cost model is of no machine.
    """

    def __init__(self, cost: CostModel, hw: HardwareSpec) -> None:
        super().__init__(cost)
        self._machine = machine_of(cost), hw
        self._before, self._after = Roofline(self._machine[0]), Roofline(hw)
        old, new = self._machine
        self._full_ratios = {
            r: getattr(new, rate) / getattr(old, rate) for r, rate in _FULL.items()
        }

    def __repr__(self) -> str:
        return f"{self.of!r} on another machine, {self.hw.name}"

    @property
    def hw(self) -> HardwareSpec:
        return self._machine[1]

    def physical(self) -> CostModel:
        return OtherMachine(self.of.physical(), self.hw)

    def estimate(self, task: Task) -> Cost:
        cost = self.of.estimate(task)
        before, after = self._before.estimate(task), self._after.estimate(task)
        if before == after or not before.seconds:
            return cost
        # Bytes stay, seconds of a part of the machine do not.
        demands = {
            name: units * _ratio(after.demands.get(name), before.demands.get(name))
            for name, units in cost.demands.items()
        }
        seconds = cost.seconds * after.seconds / before.seconds
        return replace(cost, seconds=seconds, demands=demands)

    def capacities(self, in_use: InUse = NOTHING) -> Mapping[str, float]:
        # In company what others draw counts as a part of what there is: here and there the same.
        ratios = self._full_ratios if self.company else {}
        before = {r: [x / ratios.get(r, 1.0) for x in drawn] for r, drawn in in_use.items()}
        given = self.of.capacities(before)
        if not self.company:
            old, new = self._before.capacities(in_use), self._after.capacities(in_use)
            ratios = {name: _ratio(new.get(name), old.get(name)) for name in given}
        return {name: rate * ratios.get(name, 1.0) for name, rate in given.items()}

    def capacities_of_many(self, names: Sequence[str], draws: np.ndarray) -> np.ndarray:
        return CostModel.capacities_of_many(self, names, draws)

    def loads(self, cost: Cost) -> dict[str, float]:
        return CostModel.loads(self, cost)  # by the other machine's capacities


def machine_of(cost: CostModel) -> HardwareSpec:
    """The machine that a cost model is of.

    Raises
    ------
    InvalidInput
        If it is of none.
    """
    hw = getattr(cost, "hw", None)
    if not isinstance(hw, HardwareSpec):
        raise InvalidInput(
            f"{cost!r} is of no machine, so no rate of one can be changed: take "
            f"CostModel.roofline(hw) or CostModel.from_profile(...)"
        )
    return hw


def _ratio(new: float | None, old: float | None) -> float:
    return new / old if new is not None and old else 1.0
