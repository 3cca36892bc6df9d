"""Time from rates: every task at the speed of whichever part of the machine limits it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from types import MappingProxyType
from typing import NamedTuple

import numpy as np

from moegen.errors import GraphError, InvalidInput
from moegen.graph.hardware import HardwareSpec
from moegen.graph.task import Lane, Task, TaskId, Work, kernel_bytes
from moegen.sim.capacities import NOTHING, Capacities, Duplex, InUse
from moegen.sim.cost import Cost, CostModel, Provenance

# A task of so many times the host code's own time hides it.
_HIDES = 4


class Alone(NamedTuple):
    """What a task takes by itself; see `moegen.sim.cost.Cost`."""

    seconds: float
    provenance: Provenance
    issue_s: float = 0.0
    turn_s: float = 0.0
    keeps: Mapping[str, float] = MappingProxyType({})


class Roofline(CostModel):
    """Every task at the speed of whichever part of the machine limits it.

    A GPU op takes max(FLOPs / (peak x efficiency(tokens a kernel)), bytes / HBM rate) plus a
    launch for each kernel; a bulk copy its latency plus bytes over the link, and never less
    than a copy's floor; a zero-copy kernel (lane KV, and ACT up) a launch plus bytes at
    the zero-copy rate, never above the link's; CPU attention the longer of reading its KV and of
    its arithmetic, and what each call costs. Whatever touches host memory, copies too, is never
    faster than host memory gives its bytes. Where the machine's ``task_s`` is known, and nothing
    surer of a task, that is no shorter, and if short shares the one thread that it takes with
    those of all lanes.

    Parameters
    ----------
    hw : HardwareSpec
        The machine. ``hw.with_(...)`` replaces single rates, by measured ones for example.
    """

    by_work = True

    def __init__(self, hw: HardwareSpec) -> None:
        if not isinstance(hw, HardwareSpec):
            raise InvalidInput(f"hw must be a HardwareSpec, got {hw!r}")
        self.hw = hw
        full = {
            "gpu": 1.0,
            "h2d": float(hw.h2d_bytes_per_s),
            "d2h": float(hw.d2h_bytes_per_s),
            "zero_copy": float(hw.zero_copy_bytes_per_s),
            "host_memory": float(hw.host_bytes_per_s),
            "cpu": 1.0,
            "issue": 1.0,
        }
        down = hw.duplex_d2h_bytes_per_s or hw.duplex_bytes_per_s
        duplex = Duplex(full, {"h2d": hw.duplex_bytes_per_s, "d2h": down})
        self._full, self._both = duplex.full, duplex.both
        self._capacities: Capacities = duplex
        self._copy_floor_s = hw.copy_floor_s or 0.0
        self._issue_s = hw.task_s or 0.0
        self._cpu_call_s = hw.cpu_call_s or 0.0
        self._gpu_call_s = hw.gpu_call_s or 0.0

    def __repr__(self) -> str:
        return f"CostModel.roofline({self.hw.name})"

    def capacities(self, in_use: InUse = NOTHING) -> Mapping[str, float]:
        return self._capacities.of(in_use)

    def capacities_of_many(self, names: Sequence[str], draws: np.ndarray) -> np.ndarray:
        return self._capacities.of_many(names, draws)

    def physical(self) -> CostModel:
        return self if self.hw.task_s is None else Roofline(replace(self.hw, task_s=None))

    def estimate(self, task: Task) -> Cost:
        work, lane = bound_work(task), task.lane
        if work.launches == 0:
            return _NOTHING
        alone = self._alone(task.id, lane, work)
        seconds = alone.seconds
        demands: dict[str, float] = {}
        if seconds < _HIDES * self._issue_s and not alone.issue_s:
            # A longer task is issued while the one before it runs, and slows nobody.
            demands["issue"] = self._issue_s
            seconds = max(seconds, self._issue_s)
        if work.h2d_bytes:
            demands["h2d"] = work.h2d_bytes
        if work.d2h_bytes:
            demands["d2h"] = work.d2h_bytes
        self._add_memory(demands, lane, work)
        if lane is Lane.GPU:
            demands["gpu"] = seconds
        elif lane is Lane.CPU:
            demands["cpu"] = seconds
        return Cost(seconds, alone.provenance, demands, alone.issue_s, alone.turn_s, alone.keeps)

    def _add_memory(self, demands: dict[str, float], lane: Lane, work: Work) -> None:
        """What copies and the CPU's attention draw on host memory: all of their bytes."""
        host_bytes = work.host_bytes + work.h2d_bytes + work.d2h_bytes
        if host_bytes:
            demands["host_memory"] = host_bytes

    def _alone(self, task: TaskId, lane: Lane, work: Work) -> Alone:
        """What the task takes on the machine, and what is known of the executor's host code."""
        return Alone(self._physics(lane, work), Provenance.ROOFLINE)

    def _physics(self, lane: Lane, work: Work) -> float:
        """Seconds by the rates of the machine."""
        hw = self.hw
        if lane is Lane.CPU:
            flops_per_s = hw.cpu_attn_flops
            read_bytes_per_s = min(hw.cpu_attn_bytes_per_s, hw.host_bytes_per_s)
            overhead_s = work.calls * self._cpu_call_s
        else:
            share = hw.efficiency(work.tokens / work.launches) if work.flops else 1.0
            flops_per_s, read_bytes_per_s = hw.gpu_flops * share, hw.host_bytes_per_s
            each_s = hw.copy_latency_s if lane is Lane.BULK else hw.launch_s
            overhead_s = work.launches * each_s + work.calls * self._gpu_call_s
        seconds = overhead_s + max(
            work.flops / flops_per_s,
            work.gpu_bytes / hw.gpu_bytes_per_s,
            work.host_bytes / read_bytes_per_s,
            self._moved_s(lane, work) if work.h2d_bytes or work.d2h_bytes else 0.0,
        )
        return max(work.launches * self._copy_floor_s, seconds) if lane is Lane.BULK else seconds

    def _moved_s(self, lane: Lane, work: Work) -> float:
        """Seconds over the link, which reads or writes host memory too, and is no faster."""
        link = self._both if work.h2d_bytes and work.d2h_bytes else self._full
        up, down = link["h2d"], link["d2h"]
        if kernel_bytes(lane, work):
            most = self.hw.zero_copy_bytes_per_s
            up, down = min(up, most), min(down, most)
        host_bytes = work.host_bytes + work.h2d_bytes + work.d2h_bytes
        return max(work.h2d_bytes / up, work.d2h_bytes / down, host_bytes / link["host_memory"])


def bound_work(task: Task) -> Work:
    """The work of a task; GraphError if it has none yet."""
    if task.work is None:
        raise GraphError(
            f"{task.id} has no work yet, so it has no cost: give the graph a shape with "
            f"g.bind(shape), or build it with kv_len= or prompt_len="
        )
    return task.work


_NOTHING = Cost(0.0, Provenance.ROOFLINE)
