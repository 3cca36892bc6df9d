"""The executor's issuing thread, simulated: one thread that hands every lane's tasks over.

A task's kernels cannot start before the thread has turned to the task, and its last one not
before the thread is through with it. The thread goes on to what it can hand over next, as
`moegen.exec.issue` does it: a stream waits by itself for what has been handed over to another
stream, while for what the host must know, and for the CPU's results, the thread waits until they
are there, which it notices a little later. Steps are bound one after the other, once the host
knows the tokens of the one before; weights may be copied one step ahead of that.
"""

from __future__ import annotations

from collections.abc import Generator, Sequence
from typing import NamedTuple

import simpy

from moegen.graph.latencies import Latencies
from moegen.graph.task import EdgeKind, Lane, TaskGraph

# Who is looked at first, as in the executor.
_URGENCY = (Lane.BULK, Lane.ACT, Lane.KV, Lane.CPU, Lane.GPU)


class _Wait(NamedTuple):
    """Wait for the task at ``position``, ``distance`` steps back.

    ``notice_s`` is how long after its end it is noticed; below 0 if it is enough that it has
    been handed over.
    """

    position: int
    distance: int
    notice_s: float


_HANDED_OVER = -1.0


class Issuing:
    """The thread, for one run.

    Parameters
    ----------
    env : Environment
    g : TaskGraph
    issue_s : sequence of float, shape [steps * n]
        What each task takes of the thread.
    latencies : Latencies
    ended : sequence of bool, shape [steps * n]
        Filled by the lanes.
    end_s : sequence of float, shape [steps * n]
        Likewise.

    Attributes
    ----------
    begun : sequence of bool, shape [steps * n]
        Whether the thread has turned to a task.
    done_s : sequence of float, shape [steps * n]
        When it is through with it.
    """

    def __init__(
        self,
        env: simpy.Environment,
        g: TaskGraph,
        issue_s: Sequence[float],
        latencies: Latencies,
        ended: Sequence[int],
        end_s: Sequence[float],
    ) -> None:
        self._env, self._n, self._issue_s = env, len(g), issue_s
        self._latencies, self._ended, self._end_s = latencies, ended, end_s
        self.begun = bytearray(len(issue_s))
        self.done_s = [0.0] * len(issue_s)
        self._events: dict[int, simpy.Event] = {}
        self._bell: simpy.Event | None = None
        lanes = list(g.lanes)
        self._lanes, self._tasks = lanes, g.tasks
        order = sorted(range(len(lanes)), key=lambda i: _URGENCY.index(lanes[i]))
        self._queues = [(lanes[i] is Lane.GPU, g.structure.lanes[i]) for i in order]
        self._waits = _waits(g, latencies)
        # Whose ends the thread itself waits for, and how long it takes to notice.
        self._noticed_s = {
            w.position: w.notice_s for waits in self._waits for w in waits if w.notice_s >= 0
        }

    def event(self, at: int) -> simpy.Event:
        """Fires when the thread turns to a task."""
        event = self._events.get(at)
        if event is None:
            event = self._events[at] = simpy.Event(self._env)
        return event

    def notice_s(self, lane: int) -> dict[int, float]:
        """How late each task of a lane notices that those it waits for have ended."""
        # Streams wait for each other at once; the CPU's thread is woken.
        late_s = self._latencies.gpu_to_cpu_s if self._lanes[lane] is Lane.CPU else 0.0
        return {i: late_s for i, t in enumerate(self._tasks) if t.lane is self._lanes[lane]}

    def ended(self, at: int) -> None:
        """A task has ended; lets the thread look again if it may have waited for that."""
        notice_s = self._noticed_s.get(at % self._n)
        if notice_s is not None:
            simpy.Timeout(self._env, notice_s).callbacks.append(self._ring)

    def _ring(self, _: simpy.Event) -> None:
        if self._bell is not None and not self._bell.triggered:
            self._bell.succeed()

    def run(self) -> Generator[simpy.Event, object, None]:
        """The thread's own process."""
        env, total = self._env, len(self.begun)
        steps = total // max(1, self._n)
        heads = [0] * len(self._queues)  # how many tasks of each lane have been handed over
        left = total
        while left:
            moved = False
            for i, (on_gpu, queue) in enumerate(self._queues):
                while heads[i] < steps * len(queue):
                    step, place = divmod(heads[i], len(queue))
                    at = step * self._n + queue[place]
                    if not self._may_go(step, queue[place]):
                        break
                    heads[i] += 1
                    left -= 1
                    moved = True
                    self.begun[at] = 1
                    self.done_s[at] = env.now + self._issue_s[at]
                    if at in self._events:
                        self._events.pop(at).succeed()
                    if self._issue_s[at] > 0:
                        yield simpy.Timeout(env, self._issue_s[at])
                    if on_gpu:
                        break  # its launches are slow: see what others can do meanwhile
            if not moved and left:
                self._bell = simpy.Event(env)
                yield self._bell
                self._bell = None

    def _may_go(self, step: int, position: int) -> bool:
        for w in self._waits[position]:
            if step < w.distance:
                continue
            at = (step - w.distance) * self._n + w.position
            if w.notice_s < 0:
                if not self.begun[at]:
                    return False
            elif not self._ended[at] or self._end_s[at] + w.notice_s > self._env.now + 1e-12:
                return False
        return True


def _waits(g: TaskGraph, latencies: Latencies) -> list[tuple[_Wait, ...]]:
    """What the thread waits for before it hands each task over."""
    place = {t.id: i for i, t in enumerate(g.tasks)}
    binder = _binder(g)
    found: list[dict[tuple[Lane, int, float], _Wait]] = [{} for _ in g.tasks]

    def add(v: int, u: int, distance: int, notice_s: float) -> None:
        key = (g.tasks[u].lane, distance, notice_s)
        if key not in found[v] or found[v][key].position < u:
            found[v][key] = _Wait(u, distance, notice_s)

    for e in g.edges:
        u, v = place[e.src], place[e.dst]
        src, dst = g.tasks[u].lane, g.tasks[v].lane
        if e.reason.kind is EdgeKind.LANE or (src is dst and not e.reason.host):
            continue
        notice_s = _HANDED_OVER
        if src is Lane.CPU and dst is not Lane.CPU:
            notice_s = latencies.cpu_to_host_s
        elif e.reason.host:
            notice_s = latencies.gpu_to_host_s
        add(v, u, e.reason.distance, notice_s)
    if binder is not None:
        for v, t in enumerate(g.tasks):
            if v != binder:
                add(v, binder, 1 if _is_ahead(g, v, t.lane) else 0, _HANDED_OVER)
    return [tuple(sorted(waits.values())) for waits in found]


def _binder(g: TaskGraph) -> int | None:
    """The task with which a step begins: it needs what the step before left on the host."""
    for e in g.edges:
        if e.reason.host and e.reason.distance:
            return next(i for i, t in enumerate(g.tasks) if t.id == e.dst)
    return None


def _is_ahead(g: TaskGraph, v: int, lane: Lane) -> bool:
    """Whether a task needs nothing of its step: weights that are copied whoever is chosen."""
    return lane is Lane.BULK and not any(e.reason.host for e in g.preds[g.tasks[v].id])
