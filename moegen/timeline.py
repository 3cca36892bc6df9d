"""Timeline: when every task of a run began and ended, simulated or measured."""

from __future__ import annotations

import html
from collections.abc import Collection, Mapping, Sequence
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

import numpy as np

from moegen.errors import InvalidInput
from moegen.graph.files import read_json, write_json
from moegen.graph.shape import Shape
from moegen.graph.task import Edge, EdgeKind, Lane, Reason, Task, TaskGraph, TaskId, Work
from moegen.units import format_seconds

if TYPE_CHECKING:
    import pandas as pd
    from matplotlib.axes import Axes

    from moegen.sim.recorded import Recorded

Source = Literal["simulated", "measured"]
#: What a source is called where the two are shown together.
SOURCES = {"simulated": "predicted (simulated)", "measured": "measured"}
#: Lanes as people want to see them: what computes first, then what moves data.
LANES = (Lane.GPU, Lane.CPU, Lane.BULK, Lane.KV, Lane.ACT)
_WORK = ("flops", "gpu_bytes", "h2d_bytes", "d2h_bytes", "host_bytes", "rows", "launches")
# When several edges released a task at the same moment, the one that says most.
_TELLING = {EdgeKind.DATA: 0, EdgeKind.BUFFER: 1, EdgeKind.LANE: 2}


class Timeline:
    """Start and end of every task of one or more steps.

    Parameters
    ----------
    graph : TaskGraph
        The structure of one step (``ids`` carry the step), or the unrolled graph.
    ids : sequence of TaskId, length n
        One entry a task and step.
    start_s, end_s : array_like, shape [n]
        Seconds from the beginning of the run.
    ready_s : array_like, shape [n], optional
        When each task's inputs were there. By default the latest end of the tasks that its
        DATA edges name.
    source : {"simulated", "measured"}
        Which clock.
    tokens_actual : array_like, shape [n], optional
        Tokens that each task really handled; NaN where unknown.
    provenance : str or sequence of str, length n, optional
        Where the durations come from. By default the source.
    meta : mapping, optional
        Whatever else is worth keeping, JSON-safe.
    cost : CostModel, optional
        What the tasks of a simulated run cost and how they shared the machine: `simulate` gives
        it, and it is saved with the timeline. None for measured ones.

    Raises
    ------
    InvalidInput
        If lengths differ, a task is not in the graph or twice here, a time is not finite, or
        a task ends before it starts.
    """

    def __init__(
        self,
        graph: TaskGraph,
        ids: Sequence[TaskId],
        start_s: Any,
        end_s: Any,
        ready_s: Any = None,
        *,
        source: Source = "simulated",
        tokens_actual: Any = None,
        provenance: str | Sequence[str] | None = None,
        meta: Mapping[str, Any] | None = None,
        cost: Recorded | None = None,
    ) -> None:
        if source not in ("simulated", "measured"):
            raise InvalidInput(f'source must be "simulated" or "measured", got {source!r}')
        self.graph = graph
        self.ids = tuple(TaskId(*i) for i in ids)
        self.source: Source = source
        self.meta = dict(meta or {})
        self.cost = cost
        n = len(self.ids)
        if len(set(self.ids)) != n:
            raise InvalidInput("a task appears twice in the timeline")
        one_step = graph.n_steps == 1
        self.tasks = tuple(self._task(i._replace(step=0) if one_step else i) for i in self.ids)
        self.start_s = _column(start_s, n, "start_s")
        self.end_s = _column(end_s, n, "end_s")
        for i in np.flatnonzero(self.end_s < self.start_s)[:1]:
            raise InvalidInput(
                f"{self.ids[i]} ends at {self.end_s[i]} s, before it starts at {self.start_s[i]} s"
            )
        if tokens_actual is None:
            tokens_actual = np.full(n, np.nan)
        self.tokens_actual = _column(tokens_actual, n, "tokens_actual", finite=False)
        if provenance is None:
            provenance = source
        self.provenance = (
            (provenance,) * n if isinstance(provenance, str) else tuple(map(str, provenance))
        )
        if len(self.provenance) != n:
            raise InvalidInput(f"provenance has {len(self.provenance)} entries for {n} tasks")
        if ready_s is not None:
            self.ready_s = _column(ready_s, n, "ready_s")

    @classmethod
    def of_steps(
        cls,
        graph: TaskGraph,
        start_s: Sequence[float],
        end_s: Sequence[float],
        *,
        provenance: Sequence[str],
        meta: Mapping[str, Any],
        cost: Recorded | None = None,
    ) -> Timeline:
        """Simulated times of every task of ``graph``, in program order, step after step.

        Not checked, as a simulator's need not be; ids are made when somebody asks for them.
        """
        timeline = object.__new__(cls)
        timeline.graph, timeline.source, timeline.meta = graph, "simulated", dict(meta)
        timeline.cost = cost
        timeline.start_s, timeline.end_s = np.array(start_s), np.array(end_s)
        timeline.tokens_actual = np.full(len(timeline.start_s), np.nan)
        timeline.provenance = tuple(provenance)
        return timeline

    @cached_property
    def ids(self) -> tuple[TaskId, ...]:
        """The task of each entry, with its step."""
        ids = tuple(t.id for t in self.graph.tasks)
        more = range(1, self.start_s.size // max(1, len(ids)))
        return ids + tuple(i._replace(step=k) for k in more for i in ids)

    @cached_property
    def tasks(self) -> tuple[Task, ...]:
        """The graph's task of each entry."""
        n = len(self.graph)
        return self.graph.tasks * (self.start_s.size // n if n else 0)

    def _task(self, task_id: TaskId) -> Task:
        if task_id not in self.graph:
            raise InvalidInput(f"{task_id} is no task of the timeline's graph {self.graph!r}")
        return self.graph[task_id]

    # What is derived from it.

    @cached_property
    def ready_s(self) -> np.ndarray:
        """When each task's inputs were there, shape [n]; 0 where it has none."""
        ready = np.zeros(len(self.ids))
        for i, task_id in enumerate(self.ids):
            for e in incoming(self.graph, task_id):
                if e.reason.kind is EdgeKind.DATA and e.src in self.row:
                    ready[i] = max(ready[i], self.end_s[self.row[e.src]])
        return ready

    @cached_property
    def row(self) -> dict[TaskId, int]:
        """Position of each task in the arrays."""
        return {task_id: i for i, task_id in enumerate(self.ids)}

    @cached_property
    def steps(self) -> tuple[int, ...]:
        """The steps that the run went through."""
        return tuple(sorted({i.step for i in self.ids}))

    def waits_for(self, task_id: TaskId) -> list[Edge]:
        """What a task of the run waited for: its edges, and the task ahead of it in its lane."""
        edges = incoming(self.graph, task_id)
        ahead = self._ahead.get(task_id if self.graph.n_steps > 1 else task_id._replace(step=0))
        if ahead is not None and task_id.step >= ahead[1]:
            src, distance = ahead
            if self.graph.n_steps == 1:
                src = src._replace(step=task_id.step - distance)
            edges.append(Edge(src, task_id, Reason(EdgeKind.LANE, distance)))
        return [e for e in edges if e.src in self.row]

    @cached_property
    def _ahead(self) -> dict[TaskId, tuple[TaskId, int]]:
        """The task ahead of each one in its lane, and how many steps before."""
        ahead: dict[TaskId, tuple[TaskId, int]] = {}
        for queue in self.graph.lanes.values():
            for u, v in zip(queue, queue[1:], strict=False):
                ahead[v.id] = (u.id, 0)
            if self.graph.n_steps == 1:
                ahead[queue[0].id] = (queue[-1].id, 1)
        return ahead

    @property
    def makespan_s(self) -> float:
        """End of the last task, in seconds after the beginning of the first."""
        return float(self.end_s.max() - self.start_s.min()) if self.ids else 0.0

    @property
    def step_end_s(self) -> np.ndarray:
        """When the last task of each step ended, shape [steps]."""
        of = np.array([i.step for i in self.ids])
        return np.array([self.end_s[of == k].max() for k in self.steps])

    @property
    def period_s(self) -> float:
        """Time from one step to the next: the mean over ``counted_steps``."""
        begin_s, end_s = self.counted_window_s
        if len(self.steps) < 2:
            return end_s - begin_s
        return (end_s - begin_s) / (self.counted_steps[-1] - self.steps[0])

    @property
    def counted_steps(self) -> tuple[int, ...]:
        """The steps that a mean is over.

        Not the first, which found nothing prefetched, nor the last, which shares the machine
        with none after it and is too short. Of two steps the second; the only one of one.
        """
        return self.steps[1:-1] or self.steps[-1:]

    @property
    def counted_window_s(self) -> tuple[float, float]:
        """Begin and end of ``counted_steps``: from the end of the first step to that of the last
        that counts, each the end of its last task. The whole run if it is one step.
        """
        if len(self.steps) < 2:
            begin_s = float(self.start_s.min()) if self.ids else 0.0
            return begin_s, begin_s + self.makespan_s
        ends = self.step_end_s.tolist()
        return ends[0], ends[max(1, len(ends) - 2)]

    def to_frame(self) -> pd.DataFrame:
        """One row a task: its id, lane, times in seconds, work, tokens and provenance.

        ``wait_s`` is how long a task's inputs lay ready before it began. Work is that which
        was done: of a measured run what each step really handled, by its ``shapes``, else
        what the graph planned; NaN where the graph has no shape.
        """
        import pandas as pd

        frame = pd.DataFrame(list(self.ids), columns=list(TaskId._fields))
        frame["lane"] = [t.lane.value for t in self.tasks]
        frame["start_s"] = self.start_s
        frame["end_s"] = self.end_s
        frame["duration_s"] = self.end_s - self.start_s
        frame["ready_s"] = self.ready_s
        frame["wait_s"] = self.start_s - self.ready_s
        frame["tokens_planned"] = [_of(t.work, "tokens") for t in self.tasks]
        frame["tokens_actual"] = self.tokens_actual
        for name in _WORK:
            frame[name] = [_of(work, name) for work in self.work_done]
        frame["provenance"] = list(self.provenance)
        return frame

    @cached_property
    def shapes(self) -> tuple[Shape, ...]:
        """What each step of a measured run really worked on; empty where unknown."""
        return tuple(Shape.from_dict(s) for s in self.meta.get("shapes", ()))

    @cached_property
    def work_done(self) -> tuple[Work | None, ...]:
        """Each task's work in the step that it ran in."""
        if not self.shapes:
            return tuple(t.work for t in self.tasks)
        bound = dict(zip(self.steps, map(self.graph.bind, self.shapes), strict=True))
        return tuple(bound[i.step][i._replace(step=0)].work for i in self.ids)

    def utilization(self) -> pd.DataFrame:
        """How busy each lane was: ``tasks``, ``busy_s``, ``idle_s`` and ``share`` of the makespan.

        Times at which measured tasks of one lane overlap count once.
        """
        import pandas as pd

        rows = []
        for lane, members in self.by_lane.items():
            busy = self.busy_s(members)
            share = busy / self.makespan_s if self.makespan_s else 0.0
            rows.append((lane.value, len(members), busy, self.makespan_s - busy, share))
        frame = pd.DataFrame(rows, columns=["lane", "tasks", "busy_s", "idle_s", "share"])
        return frame.set_index("lane")

    def provenance_shares(self) -> dict[str, float]:
        """How far to trust the durations: the share of all tasks' time by where it comes from.

        Returns
        -------
        dict of str to float
            By provenance, the largest first; the shares add up to 1. Empty if no task takes time.
        """
        seconds: dict[str, float] = {}
        for provenance, lasted in zip(self.provenance, self.end_s - self.start_s, strict=True):
            seconds[provenance] = seconds.get(provenance, 0.0) + float(lasted)
        total = sum(seconds.values())
        largest = sorted(seconds.items(), key=lambda item: -item[1])
        return {provenance: s / total for provenance, s in largest if s > 0}

    def busy_s(self, members: Sequence[int]) -> float:
        """Seconds in which any of a lane's tasks ran; ``members`` in the order of ``by_lane``."""
        return sum(end - begin for begin, end in self.spans_s(members))

    def spans_s(
        self, members: Sequence[int], begin_s: float = -np.inf, end_s: float = np.inf
    ) -> list[tuple[float, float]]:
        """Begin and end of what tasks fill of a window together; those that touch are one.

        ``members`` in the order of ``by_lane``.
        """
        joined: list[tuple[float, float]] = []
        starts = self.start_s[members].clip(begin_s, end_s).tolist()
        ends = self.end_s[members].clip(begin_s, end_s).tolist()
        for start, end in zip(starts, ends, strict=True):
            if joined and start <= joined[-1][1]:
                joined[-1] = (joined[-1][0], max(joined[-1][1], end))
            elif end > start:
                joined.append((start, end))
        return joined

    @cached_property
    def by_lane(self) -> dict[Lane, list[int]]:
        """Positions of each lane's tasks, by start; lanes in the order of ``LANES``."""
        members: dict[Lane, list[int]] = {}
        for i, t in enumerate(self.tasks):
            members.setdefault(t.lane, []).append(i)
        return {
            lane: sorted(members[lane], key=lambda i: (self.start_s[i], self.end_s[i]))
            for lane in LANES
            if lane in members
        }

    def critical_path(self) -> pd.DataFrame:
        """The chain of tasks that led to the last end, first task first.

        Each row is a task and what released it: of the tasks it waited for, the one that
        ended last. ``edge`` is the kind of that edge, ``buffer`` its buffer, ``slack_s``
        the time from that end to the task's start (in a simulation what handing the task over
        takes, and latencies; else 0). The first task has no edge.
        """
        import pandas as pd

        rows = []
        here = max(self.ids, key=lambda i: (self.end_s[self.row[i]], self.row[i]), default=None)
        while here is not None:
            i = self.row[here]
            released = self._released_by(here)
            freed_s = 0.0 if released is None else self.end_s[self.row[released.src]]
            rows.append(
                {
                    **here._asdict(),
                    "lane": self.tasks[i].lane.value,
                    "start_s": self.start_s[i],
                    "end_s": self.end_s[i],
                    "duration_s": self.end_s[i] - self.start_s[i],
                    "edge": "" if released is None else released.reason.kind.value,
                    "buffer": "" if released is None else released.reason.buffer,
                    "slack_s": self.start_s[i] - freed_s,
                }
            )
            here = None if released is None else released.src
        columns = [*TaskId._fields, "lane", "start_s", "end_s", "duration_s"]
        return pd.DataFrame(rows[::-1], columns=[*columns, "edge", "buffer", "slack_s"])

    def _released_by(self, task_id: TaskId) -> Edge | None:
        return min(
            self.waits_for(task_id),
            key=lambda e: (-self.end_s[self.row[e.src]], _TELLING[e.reason.kind]),
            default=None,
        )

    # Views of it.

    def plot(
        self,
        ax: Axes | None = None,
        *,
        steps: int | Collection[int] | None = None,
        layers: int | Collection[int] | None = None,
    ) -> Axes:
        """A Gantt chart, lanes as rows; see :func:`moegen.plot.gantt`."""
        from moegen.plot import gantt

        return gantt(self, ax=ax, steps=steps, layers=layers)

    def to_perfetto(self, path: str | Path) -> None:
        """Write a trace for ui.perfetto.dev or chrome://tracing."""
        from moegen.trace import write_perfetto

        write_perfetto(path, self)

    def __len__(self) -> int:
        return len(self.ids)

    def __repr__(self) -> str:
        n = len(self.steps)
        lanes = ", ".join(f"{lane} {share:.0%}" for lane, share in self._shares())
        period = f", period {format_seconds(self.period_s)}" if n > 1 else ""
        return (
            f"<Timeline {self.source} {self.name}: {len(self)} tasks, {n} step(s), "
            f"makespan {format_seconds(self.makespan_s)}{period}; busy {lanes}>"
        )

    def _repr_html_(self) -> str:
        bars = "".join(
            f"<tr><td>{lane}</td><td style='width:20em;background:#eee;padding:0'>"
            f"<div style='width:{100 * share:.1f}%;background:#4c78a8'>&nbsp;</div></td>"
            f"<td>{share:.1%}</td></tr>"
            for lane, share in self._shares()
        )
        n = len(self.steps)
        return (
            f"<div><b>Timeline</b>, {self.source}, {html.escape(self.name)}: {len(self)} tasks, "
            f"{n} step(s), makespan {format_seconds(self.makespan_s)}, "
            f"period {format_seconds(self.period_s)}<table>{bars}</table></div>"
        )

    @property
    def name(self) -> str:
        """Model and phase, for people."""
        model = self.graph.model
        return f"{model.name if model is not None else 'hand-made'} {self.graph.phase}"

    def _shares(self) -> list[tuple[str, float]]:
        share = self.utilization()["share"]
        return list(zip(map(str, share.index), share.tolist(), strict=True))

    # On disk.

    def to_dict(self) -> dict[str, Any]:
        """Plain data, the graph included."""
        from moegen.timeline_file import to_dict

        return to_dict(self)

    @classmethod
    def from_dict(cls, data: Mapping[str, Any]) -> Timeline:
        """Inverse of :meth:`to_dict`.

        Raises
        ------
        InvalidInput
            If the data are not a timeline, or are damaged.
        """
        from moegen.timeline_file import from_dict

        return from_dict(data)

    def save(self, path: str | Path) -> None:
        """Write the timeline as JSON; :meth:`load` gives back an equal one.

        Raises
        ------
        InvalidInput
            If no file can be of that name, or ``meta`` is not JSON.
        MachineError
            If it cannot be written.
        """
        write_json(path, self.to_dict(), "the timeline")

    @classmethod
    def load(cls, path: str | Path) -> Timeline:
        """Read a timeline that :meth:`save` wrote.

        Raises
        ------
        InvalidInput
            If the file is missing or holds no timeline.
        """
        return cls.from_dict(read_json(path, "the timeline"))


def incoming(graph: TaskGraph, task_id: TaskId) -> list[Edge]:
    """Edges that end at a task of any step, each source in the step that is meant.

    The same as unrolling a graph of one step and asking it, without the unrolled graph.
    """
    if graph.n_steps > 1:
        return list(graph.preds[task_id])
    step = task_id.step
    return [
        Edge(e.src._replace(step=step - e.reason.distance), task_id, e.reason)
        for e in graph.preds[task_id._replace(step=0)]
        if step >= e.reason.distance
    ]


def _of(work: Work | None, name: str) -> float:
    return np.nan if work is None else getattr(work, name)


def _column(values: Any, n: int, name: str, *, finite: bool = True) -> np.ndarray:
    try:
        column = np.asarray(values)
    except ValueError as e:  # lists of different lengths
        raise InvalidInput(f"{name} must be a list of numbers: {e}") from e
    if column.size and column.dtype.kind not in "iuf":
        raise InvalidInput(f"{name} must hold numbers, got {column.ravel().tolist()[:3]}")
    column = column.astype(float)
    if column.shape != (n,):
        raise InvalidInput(f"{name} has shape {list(column.shape)} for {n} tasks")
    if finite and not np.isfinite(column).all():
        raise InvalidInput(f"{name} holds {column[~np.isfinite(column)][0]}: times must be finite")
    return column
