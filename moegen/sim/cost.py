"""Cost models: they turn a task's work into seconds and into draws on shared resources."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Collection, Mapping
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any

from moegen.errors import GraphError, InvalidInput
from moegen.graph.checks import number
from moegen.graph.task import Lane, Task, TaskId, Work

if TYPE_CHECKING:
    from moegen.graph.hardware import HardwareSpec

#: What lanes share. GPU, CPU and the executor's host code ("issue") are counted in seconds of the
#: whole, the rest in bytes.
RESOURCES = ("gpu", "h2d", "d2h", "host_memory", "cpu", "issue")
# A task of so many times the host code's own time hides it.
_HIDES = 4


@dataclass(frozen=True)
class Cost:
    """What one task costs when nothing else runs.

    Attributes
    ----------
    seconds : float
        Duration of the task alone on the machine.
    provenance : str
        Where the number comes from: ``"roofline"``, ``"measured"``, ``"given"`` and so on.
    demands : mapping of str to float
        Units of each shared resource that the task uses up over its run.

    Raises
    ------
    InvalidInput
        If a number is NaN, infinite or negative.
    """

    seconds: float
    provenance: str
    demands: Mapping[str, float] = field(default_factory=dict)

    def __post_init__(self) -> None:
        object.__setattr__(self, "seconds", number(self.seconds, "a duration", at_least=0))
        for name, units in self.demands.items():
            number(units, f"the demand on {name}", at_least=0)


class CostModel(ABC):
    """Turns the work of a task into time. Subclasses give ``estimate`` and ``capacities``.

    Attributes
    ----------
    by_work : bool
        Whether op, lane and work are all that an estimate depends on. Tasks that have them in
        common are then estimated once.
    """

    by_work = False

    @abstractmethod
    def estimate(self, task: Task) -> Cost:
        """Seconds, their provenance and the demands on resources of ``task`` run alone."""

    @abstractmethod
    def capacities(self, in_use: Collection[str] = ()) -> Mapping[str, float]:
        """Units per second of each shared resource while those ``in_use`` are drawn on.

        The set matters where a resource gives less in company: a link's direction does
        when the other direction is in use.
        """

    def seconds(self, task: Task) -> float:
        """Duration of ``task`` run alone."""
        return self.estimate(task).seconds

    def physical(self) -> CostModel:
        """The same without what is the executor's own: what bounds are measured against."""
        return self

    def loads(self, cost: Cost) -> dict[str, float]:
        """Units per second that a task of this cost draws at full speed.

        Never more than the resource gives to it alone, so that a task alone takes exactly
        its seconds even where its duration was measured a little better than nominal.
        """
        if cost.seconds == 0:
            return {}
        used = {r: units for r, units in cost.demands.items() if units > 0}
        capacity = self.capacities(used)
        return {
            r: min(units / cost.seconds, capacity[r]) for r, units in used.items() if r in capacity
        }

    @staticmethod
    def roofline(hw: HardwareSpec) -> Roofline:
        """Time from FLOPs, bytes and the rates of ``hw``."""
        return Roofline(hw)

    @staticmethod
    def fixed(
        durations: Mapping[TaskId | str, float],
        *,
        demands: Mapping[TaskId | str, Mapping[str, float]] | None = None,
        capacities: Mapping[str, float] | None = None,
        duplex: float | None = None,
        provenance: str = "given",
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
        duplex : float, optional
            Limit of ``h2d`` and of ``d2h`` while both are in use, bytes per second.
        """
        return Fixed(durations, demands or {}, capacities or {}, duplex, provenance)


class Roofline(CostModel):
    """Every task at the speed of whichever part of the machine limits it.

    A GPU op takes max(FLOPs / (peak x efficiency(tokens a kernel)), bytes / HBM rate) plus a
    launch for each kernel; a bulk copy its latency plus bytes over the link; a zero-copy kernel
    (lanes KV and ACT) a launch plus bytes at the zero-copy rate, never above the link's;
    CPU attention the longer of reading its KV and of its arithmetic, and what each call costs.
    Whatever touches host memory, copies too, is never faster than host memory gives its bytes.
    Where the machine's ``task_s`` is known, no task is shorter, and short ones share the one
    thread that it takes with those of all lanes.

    Parameters
    ----------
    hw : HardwareSpec
        The machine. ``hw.with_(...)`` replaces single rates, by measured ones for example.
    """

    by_work = True

    def __init__(self, hw: HardwareSpec) -> None:
        self.hw = hw
        self._full = {
            "gpu": 1.0,
            "h2d": float(hw.h2d_bytes_per_s),
            "d2h": float(hw.d2h_bytes_per_s),
            "host_memory": float(hw.host_bytes_per_s),
            "cpu": 1.0,
            "issue": 1.0,
        }
        self._duplex = _with_duplex(self._full, hw.duplex_bytes_per_s)

    def __repr__(self) -> str:
        return f"CostModel.roofline({self.hw.name})"

    def capacities(self, in_use: Collection[str] = ()) -> Mapping[str, float]:
        return self._duplex if "h2d" in in_use and "d2h" in in_use else self._full

    def physical(self) -> CostModel:
        return self if self.hw.task_s is None else Roofline(replace(self.hw, task_s=None))

    def estimate(self, task: Task) -> Cost:
        work = task.work
        if work is None:
            raise GraphError(
                f"{task.id} has no work yet, so it has no cost: give the graph a shape with "
                f"g.bind(shape), or build it with kv_len= or prompt_len="
            )
        if work.empty:
            return Cost(0.0, "roofline")
        seconds = self._overhead(task, work) + max(self._terms(task, work))
        issue_s = self.hw.task_s or 0.0
        # A longer task is issued while the one before it runs, and slows nobody.
        issues = seconds < _HIDES * issue_s
        seconds = max(seconds, issue_s)
        demands = {
            "issue": issue_s if issues else 0.0,
            "h2d": work.h2d_bytes,
            "d2h": work.d2h_bytes,
            "host_memory": work.host_bytes + work.h2d_bytes + work.d2h_bytes,
        }
        if task.lane is Lane.GPU:
            demands["gpu"] = seconds
        elif task.lane is Lane.CPU:
            demands["cpu"] = seconds
        return Cost(seconds, "roofline", demands)

    def _overhead(self, task: Task, work: Work) -> float:
        hw = self.hw
        call_s = hw.cpu_call_s if task.lane is Lane.CPU else hw.gpu_call_s
        calls_s = work.calls * (call_s or 0.0)
        if task.lane is Lane.CPU:
            return calls_s
        each = hw.copy_latency_s if task.lane is Lane.BULK else hw.launch_s
        return work.launches * each + calls_s

    def _terms(self, task: Task, work: Work) -> list[float]:
        """Time that each part of the machine needs for its share of the work, in seconds."""
        hw = self.hw
        if task.lane is Lane.CPU:
            attends = task.id.op == "attn_cpu"
            flops_per_s = hw.cpu_attn_flops if attends else hw.cpu_flops
            host_bytes_per_s = hw.cpu_attn_bytes_per_s if attends else hw.host_bytes_per_s
        else:
            flops_per_s = hw.gpu_flops * hw.efficiency(work.tokens / work.launches)
            host_bytes_per_s = hw.host_bytes_per_s
        link = self.capacities([r for r in ("h2d", "d2h") if getattr(work, f"{r}_bytes")])
        up, down = link["h2d"], link["d2h"]
        if task.lane in (Lane.KV, Lane.ACT):
            up, down = min(up, hw.zero_copy_bytes_per_s), min(down, hw.zero_copy_bytes_per_s)
        return [
            work.flops / flops_per_s,
            work.gpu_bytes / hw.gpu_bytes_per_s,
            work.host_bytes / host_bytes_per_s,
            # A copy reads or writes host memory too: it is no faster than that.
            (work.host_bytes + work.h2d_bytes + work.d2h_bytes) / hw.host_bytes_per_s,
            work.h2d_bytes / up,
            work.d2h_bytes / down,
        ]


class Fixed(CostModel):
    """Durations by task or by op. Made by :meth:`CostModel.fixed`."""

    def __init__(
        self,
        durations: Mapping[TaskId | str, float],
        demands: Mapping[TaskId | str, Mapping[str, float]],
        capacities: Mapping[str, float],
        duplex: float | None,
        provenance: str,
    ) -> None:
        self._durations = {
            k: number(v, f"the duration of {k}", at_least=0) for k, v in durations.items()
        }
        self._demands = dict(demands)
        self._provenance = provenance
        for name, rate in capacities.items():
            number(rate, f"the capacity of {name}", above=0)
        if duplex is not None:
            number(duplex, "duplex", above=0)
        asked = {r for d in self._demands.values() for r in d}
        if not asked <= capacities.keys():
            missing = ", ".join(sorted(asked - capacities.keys()))
            raise InvalidInput(f"tasks draw on {missing}, whose capacity is not given")
        self._full = {name: float(rate) for name, rate in capacities.items()}
        self._duplex = _with_duplex(self._full, duplex)

    def __repr__(self) -> str:
        return f"CostModel.fixed({len(self._durations)} durations)"

    def capacities(self, in_use: Collection[str] = ()) -> Mapping[str, float]:
        return self._duplex if "h2d" in in_use and "d2h" in in_use else self._full

    def estimate(self, task: Task) -> Cost:
        seconds = _lookup(self._durations, task.id)
        if seconds is None:
            if task.work is not None and task.work.empty:
                return Cost(0.0, self._provenance)
            raise InvalidInput(
                f"no duration is given for {task.id}: give one for its id or its op {task.id.op!r}"
            )
        return Cost(seconds, self._provenance, _lookup(self._demands, task.id) or {})


def _lookup(table: Mapping[TaskId | str, Any], task_id: TaskId) -> Any:
    for key in (task_id, task_id._replace(step=0), task_id.op):
        if key in table:
            return table[key]
    return None


def _with_duplex(capacities: Mapping[str, float], limit: float | None) -> dict[str, float]:
    """The same capacities while both directions of the link are in use."""
    both = dict(capacities)
    if limit is not None:
        for name in ("h2d", "d2h"):
            if name in both:
                both[name] = min(both[name], float(limit))
    return both
