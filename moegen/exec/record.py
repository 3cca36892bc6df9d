"""From a run's records to a Timeline: the last few steps, and what they really handled."""

from __future__ import annotations

import datetime
from collections import deque
from typing import TYPE_CHECKING

import torch

from moegen.exec.issue import Times
from moegen.exec.lanes import gpu_name
from moegen.exec.step import Step
from moegen.graph.detect import cpu_name
from moegen.graph.hardware import CPU_LANES
from moegen.graph.task import TaskGraph, TaskId

if TYPE_CHECKING:
    from moegen.timeline import Timeline


class Recorder:
    """Keeps the times of the last ``keep`` steps of a run, so that long runs do not grow."""

    def __init__(self, graph: TaskGraph, keep: int, device: torch.device) -> None:
        self.graph, self.device = graph, device
        self._times: deque[tuple[int, list[Times]]] = deque(maxlen=keep)
        self._delayed_s: deque[tuple[int, dict[str, float]]] = deque(maxlen=keep)
        self._steps: dict[int, Step] = {}
        self._keep = keep

    def bound(self, index: int, step: Step) -> None:
        """Step ``index`` works on ``step``."""
        self._steps[index] = step
        # Issue runs one step ahead and times are resolved two behind.
        self._steps.pop(index - self._keep - 4, None)

    def add(self, index: int, times: list[Times]) -> None:
        """Times of every task of step ``index``."""
        self._times.append((index, times))

    def delayed(self, index: int, delayed_s: dict[str, float]) -> None:
        """Seconds by which tasks of each op were held back in step ``index``."""
        self._delayed_s.append((index, delayed_s))

    def timeline(self) -> Timeline:
        """The kept steps, numbered from 0, the first task starting at 0.

        ``meta`` says where and when: ``device``, ``machine``, by ``gpu_name`` and ``cpu_name``,
        and ``date``; and ``shapes``, what each step worked on.

        ``meta["delayed_s"]`` is there if tasks were held back on their lanes: for how long those
        of each op were in each step, all of them together.
        """
        from moegen.timeline import Timeline

        ids: list[TaskId] = []
        start: list[float] = []
        end: list[float] = []
        tokens: list[float] = []
        shapes = [self._steps[index].shape() for index, _ in self._times]
        for k, ((_, times), shape) in enumerate(zip(self._times, shapes, strict=True)):
            actual = self.graph.bind(shape)
            for task_id, a, b, *_ in times:
                work = actual[task_id._replace(step=0)].work
                ids.append(task_id._replace(step=k))
                start.append(a)
                end.append(b)
                tokens.append(float("nan") if work is None else work.tokens)
        origin = min(start, default=0.0)
        meta = {
            "device": self.device.type,
            "machine": _machine(self.device),
            "date": datetime.date.today().isoformat(),
            "shapes": [s.to_dict() for s in shapes],
        }
        if self._delayed_s:
            of = dict(self._delayed_s)
            ops = dict.fromkeys(op for delayed in of.values() for op in delayed)
            steps = [of.get(index, {}) for index, _ in self._times]
            meta["delayed_s"] = {op: [step.get(op, 0.0) for step in steps] for op in ops}
        return Timeline(
            self.graph,
            ids,
            [a - origin for a in start],
            [b - origin for b in end],
            source="measured",
            tokens_actual=tokens,
            meta=meta,
        )


def _machine(device: torch.device) -> dict[str, str]:
    gpu = gpu_name(device) if device.type == "cuda" else CPU_LANES
    return {"gpu_name": gpu, "cpu_name": cpu_name()}
