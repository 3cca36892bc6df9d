"""Cost models: they turn a task's work into seconds and into draws on shared resources."""

from __future__ import annotations

import enum
import math
import sys
from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from moegen.errors import InvalidInput
from moegen.graph.checks import number
from moegen.graph.company import Company
from moegen.graph.latencies import Latencies
from moegen.graph.task import Task, TaskGraph, TaskId
from moegen.sim.capacities import NOTHING, InUse

if TYPE_CHECKING:
    import pandas as pd

    from moegen.graph.hardware import HardwareSpec
    from moegen.sim.corrected import Corrected
    from moegen.sim.fixed import Fixed
    from moegen.sim.measured import Measured
    from moegen.sim.roofline import Roofline
    from moegen.timeline import Timeline

# An int may be larger than any float.
_LARGEST = sys.float_info.max


class Provenance(enum.StrEnum):
    """Where a duration comes from, the surest first."""

    MEASURED = "measured"  # at this very point
    INTERPOLATED = "interpolated"  # between points that were measured
    EXTRAPOLATED = "extrapolated"  # beyond them, as the roofline goes on
    ROOFLINE = "roofline"  # from rates alone
    GIVEN = "given"  # by the caller


@dataclass(frozen=True, slots=True)
class Cost:
    """What one task costs when nothing else runs.

    Attributes
    ----------
    seconds : float
        Duration of the task alone on the machine.
    provenance : str
        Where the number comes from: a `Provenance`, or a word of the caller's.
    demands : mapping of str to float
        Units of each shared resource that the task uses up over its run.
    issue_s : float
        What the executor's issuing thread takes to hand the task over, where it has not rested.
    turn_s : float
        What that thread takes before, likewise, once nothing keeps it from handing the task over.
    keeps : mapping of str to float
        Of its own speed, what the task keeps while others use a resource fully: kernels are
        slower beside some that they share nothing with but the GPU. One kernel that writes to host
        memory counts as using ``zero_copy`` fully (`moegen.sim.sharing`).

    Raises
    ------
    InvalidInput
        If a number is NaN, infinite or negative, or what is kept is more than all.
    """

    seconds: float
    provenance: str
    demands: Mapping[str, float] = field(default_factory=dict)
    issue_s: float = 0.0
    turn_s: float = 0.0
    keeps: Mapping[str, float] = field(default_factory=dict)

    def __post_init__(self) -> None:
        # Made for every task of every strategy that a search weighs: what is right passes quickly.
        if not (type(self.seconds) is float and 0 <= self.seconds < math.inf):
            object.__setattr__(self, "seconds", number(self.seconds, "a duration", at_least=0))
        for name, units in self.demands.items():
            if not (type(units) in (float, int) and 0 <= units <= _LARGEST):
                number(units, f"the demand on {name}", at_least=0)
        for name in ("issue_s", "turn_s"):
            value = getattr(self, name)
            if not (type(value) is float and 0 <= value < math.inf):
                object.__setattr__(self, name, number(value, name, at_least=0))
        for name, share in self.keeps.items():
            if not (type(share) is float and 0 < share <= 1):
                if number(share, f"what is kept beside {name}", above=0) > 1:
                    raise InvalidInput(f"what is kept beside {name} is at most 1, got {share!r}")


class CostModel(ABC):
    """Turns the work of a task into time. Subclasses give ``estimate`` and ``capacities``.

    Attributes
    ----------
    by_work : bool
        Whether op, phase, lane and work are all that an estimate depends on. Tasks that have
        them in common are then estimated once.
    company : tuple of Company
        Which resources give less while which others are in use, where that was measured: what
        ``capacities`` rests on then.
    latencies : Latencies
        What passes between the issuing thread and who works for it, and what a rest costs that
        thread; see `moegen.sim.issued`.
    """

    by_work = False
    company: tuple[Company, ...] = ()
    latencies: Latencies = Latencies()

    @abstractmethod
    def estimate(self, task: Task) -> Cost:
        """Seconds, their provenance and the demands on resources of ``task`` run alone."""

    @abstractmethod
    def capacities(self, in_use: InUse = NOTHING) -> Mapping[str, float]:
        """Units per second of each shared resource while those ``in_use`` are drawn on.

        Parameters
        ----------
        in_use : mapping of str to sequence of float
            By resource, what each of the tasks that run would draw on it at full speed, 0 where
            one draws nothing, the tasks in one order for all. It matters where a resource gives
            less in company: a link's direction does when the other direction is in use.
        """

    def capacities_of_many(self, names: Sequence[str], draws: np.ndarray) -> np.ndarray:
        """The same for many sets of tasks at once.

        Parameters
        ----------
        names : sequence of str
            Resources.
        draws : ndarray, shape [sets, tasks, resources]
            Units per second that each task draws at full speed.

        Returns
        -------
        ndarray, shape [sets, resources]
            inf for a resource that there is always enough of.
        """
        rows = []
        for one in draws:
            in_use = {n: one[:, r].tolist() for r, n in enumerate(names) if one[:, r].any()}
            given = self.capacities(in_use)
            rows.append([given.get(name, np.inf) for name in names])
        return np.array(rows).reshape(len(draws), len(names))

    def seconds(self, task: Task) -> float:
        """Duration of ``task`` run alone."""
        return self.estimate(task).seconds

    def physical(self) -> CostModel:
        """The same without what is the executor's own: what bounds are measured against."""
        return self

    def spread(self, task: Task) -> float:
        """How much the seconds of ``task`` vary: their relative standard deviation, 0 if unknown.

        It is of repeated measurements of one kernel or copy; no prediction rests on it.
        """
        return 0.0

    def loads(self, cost: Cost) -> dict[str, float]:
        """Units per second that a task of this cost draws at full speed.

        Never more than the resource gives to it alone, so that a task alone takes exactly
        its seconds even where its duration was measured a little better than nominal.
        """
        if cost.seconds == 0:
            return {}
        used = {r: units for r, units in cost.demands.items() if units > 0}
        drawn = {r: units / cost.seconds for r, units in used.items()}
        capacity = self.capacities({r: (rate,) for r, rate in drawn.items()})
        return {r: min(rate, capacity[r]) for r, rate in drawn.items() if r in capacity}

    def corrected(self, measured: Timeline) -> Corrected:
        """The same, with the durations of each op as a run had them.

        Parameters
        ----------
        measured : Timeline
            A run of some steps; see :func:`moegen.sim.corrected.correct`.

        Raises
        ------
        InvalidInput
            If the timeline was not measured, or an op of it cannot be corrected.
        """
        from moegen.sim.corrected import correct

        return correct(self, measured)

    def domain(self) -> pd.DataFrame:
        """What was measured: a row for each curve, op and feature of its work.

        Returns
        -------
        DataFrame
            Columns ``op``, ``feature`` (see `moegen.graph.features`), ``low`` and ``high``, the
            ends of what was measured, and ``points``, how many values there are. Within, seconds
            are linear from point to point; ops without a row, and values outside, rest on the
            rates of the machine. A model without measurements has no rows.
        """
        import pandas as pd

        return pd.DataFrame(columns=["op", "feature", "low", "high", "points"])

    @staticmethod
    def roofline(hw: HardwareSpec) -> Roofline:
        """Time from FLOPs, bytes and the rates of ``hw``."""
        from moegen.sim.roofline import Roofline

        return Roofline(hw)

    @staticmethod
    def from_profile(
        path: str | Path,
        *,
        hw: HardwareSpec | None = None,
        versions: Mapping[str, str] | None = None,
        allow_mismatch: bool = False,
    ) -> Measured:
        """Time from a table of measurements, see `moegen.graph.profile_table`.

        Parameters
        ----------
        path : str or path
            A table that ships with moegen, by name (``"h200"``), or a file.
        hw : HardwareSpec, optional
            The machine that is asked about. By default, of a file, this machine, and of a table
            by name the one that it names.
        versions : mapping of str to str, optional
            Versions asked about, by package. By default those installed here if the machine is
            this one, else none.
        allow_mismatch : bool
            Take the table even if it was measured on another machine or with other versions.

        Raises
        ------
        InvalidInput
            If the file cannot be read or holds what cannot be, such as a copy faster than the
            link; or if it is of another machine or other versions.
        """
        from moegen.sim.measured import Measured, read_table

        return Measured(read_table(path, hw, versions, allow_mismatch))

    @staticmethod
    def fixed(
        durations: Mapping[TaskId | str, float],
        *,
        demands: Mapping[TaskId | str, Mapping[str, float]] | None = None,
        capacities: Mapping[str, float] | None = None,
        duplex: float | Mapping[str, float] | None = None,
        company: Sequence[Company] = (),
        provenance: str = Provenance.GIVEN,
    ) -> Fixed:
        """Durations given per task or per op: for graphs made by hand, and to replay a run.

        Parameters
        ----------
        durations : mapping of TaskId or str to float
            Seconds. A task is looked up by its id, then by its id in step 0, then by its op.
        demands : mapping, optional
            Units of each resource that a task uses up; looked up in the same way.
        capacities : mapping of str to float, optional
            Units per second of each resource; every resource demanded must be there.
        duplex : float or mapping, optional
            Limit of ``h2d`` and of ``d2h`` while both are in use, bytes per second: one for
            both, or a mapping with one for each.
        company : sequence of Company, optional
            What resources give less beside others, in place of ``duplex``.
        """
        from moegen.sim.fixed import Fixed

        return Fixed(durations, demands or {}, capacities or {}, duplex, provenance, company)


def checked_graph(g: Any) -> TaskGraph:
    """``g``, if it is a graph."""
    if not isinstance(g, TaskGraph):
        raise InvalidInput(f"a graph must be a TaskGraph, such as mg.build(...), got {g!r}")
    return g


def checked_cost(cost: Any) -> CostModel:
    """``cost``, if it is a cost model: a machine or its name is easily given in its place."""
    if not isinstance(cost, CostModel):
        raise InvalidInput(
            f"cost must be a CostModel, such as CostModel.roofline(hw), got {cost!r}"
        )
    return cost
