"""Whether a prediction and a run are of one machine, as far as both say which it was."""

from __future__ import annotations

import warnings
from collections.abc import Mapping
from typing import Any

from moegen.graph.hardware import CPU_LANES, HardwareSpec
from moegen.graph.profile_table import ProfileTable, same_part
from moegen.sim.cost import CostModel
from moegen.sim.scaled import Wrapped
from moegen.timeline import Timeline

_PARTS = (("GPU", "gpu_name"), ("CPU", "cpu_name"))


def basis(cost: CostModel) -> dict[str, Any]:
    """What a cost model's durations rest on, for ``Timeline.meta``.

    Returns
    -------
    dict
        ``machine``, by ``gpu_name`` and ``cpu_name``, and ``rests_on``, in words. Empty if the
        model is of no machine.
    """
    origin = _origin(cost)
    hw, table = getattr(origin, "hw", None), getattr(origin, "table", None)
    if not isinstance(hw, HardwareSpec):
        return {}
    rests_on = f"the rates of {hw.name}"
    if isinstance(table, ProfileTable):
        rests_on = f"the profile of {hw.name}, measured {table.date}"
    return {"machine": {key: getattr(hw, key) for _, key in _PARTS}, "rests_on": rests_on}


def parts_of(timeline: Timeline) -> dict[str, str]:
    """``gpu_name`` and ``cpu_name`` of the machine that a timeline is of; what it says of them."""
    said = timeline.meta.get("machine")
    said = said if isinstance(said, Mapping) else {}
    known = {key: said[key] for _, key in _PARTS if isinstance(said.get(key), str)}
    if timeline.meta.get("device") == "cpu":
        known.setdefault("gpu_name", CPU_LANES)
    return known


def check_machine(predicted: CostModel | Timeline, measured: Timeline) -> None:
    """Warn if a prediction rests on another machine than a run's.

    Nothing is said where one of the two does not name its machine.

    Parameters
    ----------
    predicted : CostModel or Timeline
        What predicts the run, or a prediction of it.
    measured : Timeline
        The run.

    Warns
    -----
    UserWarning
    """
    if isinstance(predicted, Timeline):
        theirs = parts_of(predicted)
    else:
        theirs = basis(predicted).get("machine", {})
    mine = parts_of(measured)
    differ = [
        f"the {part} there is {theirs[key]!r} and the run's is {mine[key]!r}"
        for part, key in _PARTS
        if key in theirs and key in mine and not same_part(theirs[key], mine[key])
    ]
    if differ:
        warnings.warn(
            f"the prediction is of another machine than the run: {'; '.join(differ)}. For this "
            f"one's, measure it: moegen profile",
            stacklevel=3,
        )


def _origin(cost: CostModel) -> CostModel:
    """The cost model that others are wrapped around."""
    while isinstance(cost, Wrapped):
        cost = cost.of
    return cost
