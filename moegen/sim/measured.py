"""Time from a machine's measurements: linear between points, physics beyond them."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from moegen.errors import GraphError
from moegen.graph.curve import Curve
from moegen.graph.features import FEATURES, FEATURES_OF
from moegen.graph.hardware import HardwareSpec
from moegen.graph.profile_table import ProfileTable, profiles
from moegen.graph.task import Lane, Work
from moegen.sim.cost import CostModel, Provenance
from moegen.sim.roofline import Roofline

if TYPE_CHECKING:
    import pandas as pd


class Measured(Roofline):
    """What was measured, and the roofline of the same machine for the rest.

    A task at a measured point takes exactly what was measured, one between points lies on the
    lines between them, along each feature. Beyond the last point of a feature it takes the
    seconds of that point times what the roofline says of the task over what it says of the
    point, which is continuous there. Ops without a curve take the roofline. Provenance tells
    which it was (`Provenance`).

    Attention was measured on rows of one length: each further run of lengths costs what the
    machine's ``cpu_call_s`` or ``gpu_call_s`` says, where it is known.

    Parameters
    ----------
    table : ProfileTable
        Measurements, with the machine that they are of.
    """

    def __init__(self, table: ProfileTable) -> None:
        super().__init__(table.machine)
        self.table = table
        self._curves = {op: _Line(curve) for curve in table.curves for op in curve.ops}

    def __repr__(self) -> str:
        return f"CostModel.from_profile({self.hw.name}, measured {self.table.date})"

    def physical(self) -> CostModel:
        if self.hw.task_s is None:
            return self
        return Measured(replace(self.table, machine=replace(self.hw, task_s=None)))

    def domain(self) -> pd.DataFrame:
        import pandas as pd

        rows = [
            (op, feature, values[0], values[-1], len(values))
            for curve in self.table.curves
            for op in curve.ops
            for feature, values in curve.axes.items()
        ]
        return pd.DataFrame(rows, columns=super().domain().columns)

    def _alone(self, op: str, lane: Lane, work: Work) -> tuple[float, Provenance]:
        curve = self._curves.get(op)
        if curve is None:
            return self._physics(lane, work), Provenance.ROOFLINE
        further_s = 0.0
        if work.calls > 1:
            call_s = self._cpu_call_s if lane is Lane.CPU else self._gpu_call_s
            further_s = (work.calls - 1) * call_s
            work = replace(work, calls=1)
        try:
            seconds, provenance, edge = curve.at(work)
        except ZeroDivisionError:
            raise GraphError(
                f"{op} was measured by {', '.join(FEATURES_OF[op])}, and {work} has none of it"
            ) from None
        seconds *= work.launches
        if edge is not None:
            seconds *= self._physics(lane, work) / self._physics(lane, edge)
        elif further_s:
            provenance = Provenance.INTERPOLATED
        return seconds + further_s, provenance


class _Line:
    """A curve ready to be read."""

    def __init__(self, curve: Curve) -> None:
        self._features = [(FEATURES[key], values) for key, values in curve.axes.items()]
        self._seconds = curve.seconds

    def at(self, work: Work) -> tuple[float, Provenance, Work | None]:
        """Seconds of one kernel of ``work``, their provenance, and where the grid ends.

        The last is the work nearest to ``work`` that is within the grid, None if it is itself.
        """
        places: list[tuple[int, float]] = []
        exact, edge = True, None
        for feature, values in self._features:
            value = feature.of(work)
            nearest = min(max(value, values[0]), values[-1])
            if nearest != value:
                edge = feature.scaled(edge or work, nearest / value)
            i = bisect_left(values, nearest)
            if values[i] == nearest:
                places.append((i, 0.0))
            else:
                below = values[i - 1]
                places.append((i - 1, (nearest - below) / (values[i] - below)))
                exact = False
        seconds = _read(self._seconds, places, 0)
        if edge is not None:
            return seconds, Provenance.EXTRAPOLATED, edge
        return seconds, Provenance.MEASURED if exact else Provenance.INTERPOLATED, None


def _read(grid: Sequence[Any], places: Sequence[tuple[int, float]], axis: int) -> float:
    """The grid's value at a place in each axis: an index, and the share of the way to the next."""
    i, share = places[axis]
    if axis == len(places) - 1:
        low = grid[i]
        if share == 0:
            return low
        high = grid[i + 1]
    else:
        low = _read(grid[i], places, axis + 1)
        if share == 0:
            return low
        high = _read(grid[i + 1], places, axis + 1)
    # Rounding must not carry a point beyond its neighbour.
    return min(low + share * (high - low), high)


def read_table(
    path: str | Path,
    hw: HardwareSpec | None,
    versions: Mapping[str, str] | None,
    allow_mismatch: bool,
) -> ProfileTable:
    """A table by its name or from a file, if it is of the machine that is asked about.

    See :meth:`CostModel.from_profile`.
    """
    named = isinstance(path, str) and path in profiles()
    table = ProfileTable.from_name(str(path)) if named else ProfileTable.load(path)
    if not allow_mismatch:
        if hw is None and not named:
            hw = HardwareSpec.detect()
            versions = table.installed_versions() if versions is None else versions
        table.check(hw or table.machine, versions or {})
    return table
