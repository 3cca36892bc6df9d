"""A cost model's machine with other rates, where its durations were measured with these."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from moegen.errors import InvalidInput
from moegen.graph.hardware import HardwareSpec
from moegen.graph.task import Task
from moegen.sim.corrected import Scaled
from moegen.sim.cost import Cost, CostModel
from moegen.sim.roofline import Roofline

# Resources that a model may have beside the roofline's, and the rate that says what they give.
_RATES = {"zero_copy": "zero_copy_bytes_per_s"}


class OtherMachine(Scaled):
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

    def __repr__(self) -> str:
        return f"{self.of!r} on another machine, {self.hw.name}"

    @property
    def hw(self) -> HardwareSpec:
        return self._machine[1]

    def physical(self) -> CostModel:
        return OtherMachine(self.of.physical(), self.hw)

    def factor(self, task: Task) -> float:
        before, after = self._before.seconds(task), self._after.seconds(task)
        return after / before if before else 1.0

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
        return Cost(
            cost.seconds * after.seconds / before.seconds, cost.provenance, demands, cost.issue_s
        )

    def capacities(self, *running: Any) -> Mapping[str, float]:
        given = self.of.capacities(*running)
        before, after = self._before.capacities(*running), self._after.capacities(*running)
        changed = {}
        for name, rate in given.items():
            if name in _RATES:
                old, new = (getattr(hw, _RATES[name]) for hw in self._machine)
            else:
                old, new = before.get(name), after.get(name)
            changed[name] = rate * _ratio(new, old)
        return changed

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
