"""Time from a machine's measurements: linear between points, physics beyond them."""

from __future__ import annotations

import math
from bisect import bisect_left
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple, get_args

from moegen.errors import GraphError
from moegen.graph.curve import Curve
from moegen.graph.features import FEATURES, FEATURES_OF
from moegen.graph.hardware import HardwareSpec
from moegen.graph.layer import Phase
from moegen.graph.profile_table import ProfileTable, profiles, require_profile
from moegen.graph.task import Lane, Task, TaskId, Work, kernel_bytes
from moegen.sim.capacities import InCompany
from moegen.sim.cost import Cost, CostModel, Provenance
from moegen.sim.roofline import Alone, Roofline, bound_work

if TYPE_CHECKING:
    import pandas as pd

# A width worked out from a task's work may miss the one that was measured by so much.
_ROUNDING = 1e-9


class Measured(Roofline):
    """What was measured, and the roofline of the same machine for the rest.

    A task at a measured point takes exactly what was measured, one between points lies on the
    lines between them, along each feature. Beyond the last point of a feature it takes the
    seconds of that point times what the roofline says of the task over what it says of the
    point, which is continuous there. Where only one size was measured nothing tells what of its
    seconds goes with size: it takes what the roofline says more or less than of the point, as
    long as that was no faster than the roofline. Ops without a curve take the roofline.
    Provenance tells which it was (`Provenance`).

    Of several curves of an op those of the task's phase are asked, those of both phases only
    where there is none, and of these the one nearest to the task: the least sum, over its
    features, of the logarithm of how many times they are beyond its axis. Features that follow
    from a model's widths go before the others, for however much there is to do, what was measured
    of the same model says more than what was of another. Of those that are as near it is the one
    whose points lie closest around the task, and of these the first in the table.

    Attention was measured on rows of one length: each further run of lengths costs what the
    machine's ``cpu_call_s`` or ``gpu_call_s`` says, where it is known.

    Where the table says what resources give in company (`moegen.graph.company`), sharing rests on
    that (`moegen.sim.capacities.InCompany`) and not on the machine's ``host_bytes_per_s`` and
    ``duplex_bytes_per_s``: zero-copy kernels (lane KV, and ACT up) then also draw on what such
    kernels get of the link, and host memory is what CPU attention gets of it, which copies
    disturb rather than draw on. What lane ACT moves draws on nothing where it was measured: it is
    too small to slow copies of weights. How much these slow it is in its curve
    (``beside_copies``).

    Parameters
    ----------
    table : ProfileTable
        Measurements, with the machine that they are of.
    """

    def __init__(self, table: ProfileTable) -> None:
        super().__init__(table.machine)
        self.table = table
        if table.company:
            full = self._full | {"host_memory": float(self.hw.cpu_attn_bytes_per_s)}
            self._capacities = InCompany(full, table.company)
            self.company = table.company
        self.latencies = table.latencies
        lines = [(_Line(curve), curve) for curve in table.curves]
        self._lines = {
            (op, phase): _of_phase([pair for pair in lines if op in pair[1].ops], phase)
            for op in {op for curve in table.curves for op in curve.ops}
            for phase in get_args(Phase)
        }

    def __repr__(self) -> str:
        return f"CostModel.from_profile({self.hw.name}, measured {self.table.date})"

    def __reduce__(self) -> tuple[type[Measured], tuple[ProfileTable]]:
        return Measured, (self.table,)  # a sweep's processes read the curves anew

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

    def spread(self, task: Task) -> float:
        work = bound_work(task)
        lines = self._lines.get(task.id[:2])
        if not lines or work.launches == 0:
            return 0.0
        try:
            return _nearest(lines, work).spread(work)
        except ZeroDivisionError:
            raise GraphError(_nothing_of(task.id.op, work)) from None

    def estimate(self, task: Task) -> Cost:
        cost = super().estimate(task)
        if task.lane is Lane.ACT and self.table.company and self._lines.get(task.id[:2]):
            return replace(cost, demands={})
        return cost

    def _add_memory(self, demands: dict[str, float], lane: Lane, work: Work) -> None:
        if not self.table.company:
            super()._add_memory(demands, lane, work)
        elif lane is Lane.CPU:
            if work.host_bytes:
                demands["host_memory"] = work.host_bytes
        elif moved := kernel_bytes(lane, work):
            demands["zero_copy"] = moved

    def _alone(self, task: TaskId, lane: Lane, work: Work) -> Alone:
        lines = self._lines.get(task[:2])
        if not lines:
            return super()._alone(task, lane, work)
        further_s = 0.0
        if work.calls > 1:
            call_s = self._cpu_call_s if lane is Lane.CPU else self._gpu_call_s
            further_s = (work.calls - 1) * call_s
            work = replace(work, calls=1)
        try:
            line = _nearest(lines, work)
            read = line.at(work)
        except ZeroDivisionError:
            raise GraphError(_nothing_of(task.op, work)) from None
        seconds, provenance = read.seconds, read.provenance
        if read.edge is not None:
            seconds = self._beyond(lane, seconds, read.edge, read.only, work)
        elif further_s:
            provenance = Provenance.INTERPOLATED
        # Without company it draws on the link itself, and shares it with copies so.
        keeps = {r: x for r, x in read.keeps.items() if r == "zero_copy" or self.table.company}
        return Alone(seconds + further_s, provenance, read.issue_s, read.turn_s, keeps)

    def _beyond(self, lane: Lane, seconds: float, edge: Work, only: Work, work: Work) -> float:
        """What ``work`` takes, by the ``seconds`` at the grid's edge and that which has all but the
        one size of some features (see `_Reading`)."""
        only_s = self._physics(lane, only)
        seconds *= only_s / self._physics(lane, edge)
        work_s = self._physics(lane, work)
        return seconds + work_s - only_s if seconds >= only_s else seconds * work_s / only_s


class _Reading(NamedTuple):
    """What a curve says of some work.

    Attributes
    ----------
    seconds : float
    provenance : Provenance
    edge : Work or None
        The work nearest to it that is within the grid, None if it is itself.
    only : Work
        The work itself, but for features of size of which one value was measured: at that one.
    issue_s, turn_s : float
        What the issuing thread takes for all that the work launches, and before that.
    keeps : mapping of str to float
        The share of its speed that it keeps beside what slows it, in full use, by resource.
    """

    seconds: float
    provenance: Provenance
    edge: Work | None
    only: Work
    issue_s: float
    turn_s: float
    keeps: Mapping[str, float]


class _Line:
    """A curve ready to be read."""

    def __init__(self, curve: Curve) -> None:
        self._features = [(FEATURES[key], values) for key, values in curve.axes.items()]
        # Of these one size was measured. What is launched again takes as long again.
        self._of_one_size = {
            FEATURES[key]
            for key, values in curve.axes.items()
            if len(values) == 1 and key != "launches" and not FEATURES[key].of_model
        }
        self._seconds, self._spread = curve.seconds, curve.spread
        #: Whether seconds are those of one kernel, however many are launched.
        self.of_one = "launches" not in curve.axes
        self._launches = curve.axes.get("launches", (1.0,))
        self._issue_s, self._turn_s, self._more_s = curve.issue_s, curve.turn_s, curve.more_s
        self._once_s = curve.once_s or 0.0
        self._beside = {"h2d": curve.beside_copies, "zero_copy": curve.crowded}

    def distance(self, work: Work) -> tuple[float, float]:
        """How far ``work`` is beyond the grid, by its model's features and by the others: 0 within
        it."""
        of_model = others = 0.0
        for feature, values in self._features:
            value = feature.of(work)
            far = max(values[0] / value, value / values[-1])
            if far > 1 + _ROUNDING:
                if feature.of_model:
                    of_model += math.log(far)
                else:
                    others += math.log(far)
        return of_model, others

    def cell(self, work: Work) -> float:
        """How far the points around ``work`` lie apart, by the logarithm: 0 at a point."""
        apart = 0.0
        for feature, values in self._features:
            i, share = _place(values, _within(values, feature.of(work)))
            if share > 0:
                apart += math.log(values[i + 1] / values[i])
        return apart

    def at(self, work: Work) -> _Reading:
        """All that there is at ``work``, or where the grid ends before it."""
        places, edge, only, exact = self._places(work)
        one_s = seconds = _read(self._seconds, places, 0)
        if self.of_one:
            seconds = one_s * work.launches - (work.launches - 1) * self._once_s
        provenance = Provenance.MEASURED if exact else Provenance.INTERPOLATED
        if edge is not None:
            provenance = Provenance.EXTRAPOLATED
        turn_s = 0.0 if self._turn_s is None else _read(self._turn_s, places, 0)
        waits_s = {r: _read(grid, places, 0) - one_s for r, grid in self._beside.items() if grid}
        keeps = {r: seconds / (seconds + s) for r, s in waits_s.items() if s > 0}
        issue_s = self._issued_s(work, places)
        return _Reading(seconds, provenance, edge, only, issue_s, turn_s, keeps)

    def _issued_s(self, work: Work, places: Sequence[tuple[int, float]]) -> float:
        if self._issue_s is None:
            return 0.0
        of = min(max(work.launches, self._launches[0]), self._launches[-1])
        seconds = _read(self._issue_s, places, 0)
        if self._more_s is None:
            return seconds * work.launches / of
        return seconds + (work.launches - of) * self._more_s

    def spread(self, work: Work) -> float:
        """The relative standard deviation at ``work``, or where the grid ends before it."""
        if self._spread is None:
            return 0.0
        return _read(self._spread, self._places(work)[0], 0)

    def _places(self, work: Work) -> tuple[list[tuple[int, float]], Work | None, Work, bool]:
        """Where ``work`` is in each axis, what `_Reading` calls edge and only, and if it is a
        point."""
        places: list[tuple[int, float]] = []
        exact, edge, only = True, None, work
        for feature, values in self._features:
            value = feature.of(work)
            nearest = _within(values, value)
            if abs(nearest - value) > _ROUNDING * nearest:
                edge = feature.scaled(edge or work, nearest / value)
                if feature in self._of_one_size:
                    only = feature.scaled(only, nearest / value)
            places.append(_place(values, nearest))
            exact = exact and places[-1][1] == 0
        return places, edge, only, exact


def _within(values: Sequence[float], value: float) -> float:
    """The nearest to ``value`` that an axis reaches."""
    return min(max(value, values[0]), values[-1])


def _place(values: Sequence[float], value: float) -> tuple[int, float]:
    """Where a value within an axis lies: the point below it, and the share of the way to the
    next."""
    i = bisect_left(values, value)
    if values[i] == value:
        return i, 0.0
    below = values[i - 1]
    return i - 1, (value - below) / (values[i] - below)


def _of_phase(pairs: Sequence[tuple[_Line, Curve]], phase: str) -> tuple[_Line, ...]:
    own = tuple(line for line, curve in pairs if curve.phase == phase)
    return own or tuple(line for line, curve in pairs if curve.phase is None)


def _nearest(lines: Sequence[_Line], work: Work) -> _Line:
    """Of the lines that are least far from ``work`` the one whose points lie closest around it."""
    if len(lines) == 1:
        return lines[0]
    far = [line.distance(work) for line in lines]
    least = min(far)
    near = [line for line, x in zip(lines, far, strict=True) if x == least]
    return near[0] if len(near) == 1 else min(near, key=lambda line: line.cell(work))


def _nothing_of(op: str, work: Work) -> str:
    return f"{op} was measured by {', '.join(FEATURES_OF[op])}, and {work} has none of it"


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
    between = low + share * (high - low)
    # Rounding must not carry a point beyond its neighbour.
    return min(between, high) if high >= low else max(between, high)


def read_table(
    path: str | Path,
    hw: HardwareSpec | None,
    versions: Mapping[str, str] | None,
    allow_mismatch: bool,
) -> ProfileTable:
    """A table by its name or from a file, if it is of the machine that is asked about.

    See :meth:`CostModel.from_profile`.
    """
    if isinstance(path, str):
        require_profile(path)
    named = isinstance(path, str) and path in profiles()
    table = ProfileTable.from_name(str(path)) if named else ProfileTable.load(path)
    if not allow_mismatch:
        if hw is None and not named:
            hw = HardwareSpec.detect()
            versions = table.installed_versions() if versions is None else versions
        table.check(hw or table.machine, versions or {})
    return table
