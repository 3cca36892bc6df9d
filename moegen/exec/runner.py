"""execute: run a task graph, each lane in its order, waiting only on edges.

One issuing thread a lane walks the lane's tasks step after step. Before it issues a task
it makes the two waits of an edge: the *host* waits until the producer's event has been
recorded in the step meant, then the *stream* waits on that event. Issue runs as far ahead
of execution as the edges let it; weights of the next step are copied while this one ends.
"""

from __future__ import annotations

import itertools
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Generic, Protocol, TypeVar

import torch

from moegen.errors import DeadlockError
from moegen.exec.lanes import (
    Clock,
    Event,
    Stream,
    UnrecordedEvent,
    Worker,
    enter,
    open_streams,
)
from moegen.graph.task import EdgeKind, Lane, Task, TaskGraph, TaskId

STALL_S = 600.0
# A Python thread may keep the interpreter for this long before another gets it: lanes
# hand over to each other many times a step.
SWITCH_INTERVAL_S = 2e-4
# Steps whose events are kept: edges reach one step back, issue runs at most one ahead.
WINDOW = 4

StepT = TypeVar("StepT")


class Kernels(Protocol[StepT]):
    """What the runner asks of whoever does the work."""

    def next_step(self, index: int) -> StepT | None:
        """Bind step ``index``; None ends the run. Called once the one before is known."""
        ...

    def needs_step(self, task: Task) -> bool:
        """Whether a task can be issued only once its step is bound."""
        ...

    def host_value(self, task: Task, step: StepT) -> None:
        """Read what ``task`` needs on the host; its producer has finished."""
        ...

    def is_empty(self, task: Task, step: StepT | None) -> bool:
        """Whether there is nothing to do in this step."""
        ...

    def run(self, task: Task, index: int, step: StepT | None) -> None:
        """Do the work of ``task`` (on the calling thread, or launched on its stream)."""
        ...


class Delays(Protocol):
    """Seconds by which a test holds a task back."""

    def issue_s(self, task: Task, index: int) -> float: ...
    def run_s(self, task: Task, index: int) -> float: ...


@dataclass(frozen=True)
class _Wait:
    """Wait for ``position`` of ``lane``, ``distance`` steps back."""

    lane: Lane
    position: int
    distance: int
    host: bool


@dataclass
class Record:
    """When a task ran: events until resolved, seconds after."""

    task: Task
    start: Event | None
    end: Event


class _Progress:
    """How far something has come; others wait here for it to come further.

    One thread advances it. Most waits find that it is far enough already, and most advances
    find nobody waiting: neither then takes the lock.
    """

    def __init__(self) -> None:
        self.done = 0
        self._waiting = 0
        self._changed = threading.Condition()

    def advance(self) -> None:
        self.done += 1
        if self._waiting:
            self.wake()

    def wake(self) -> None:
        with self._changed:
            self._changed.notify_all()

    def wait_for(self, need: int, over: Callable[[], bool]) -> bool:
        """Wait until it has come to ``need`` or all is over; False after `STALL_S`."""
        if self.done >= need:
            return True
        with self._changed:
            # Announced before the look below, so that an advance in between is not missed.
            self._waiting += 1
            try:
                return self._changed.wait_for(lambda: self.done >= need or over(), STALL_S)
            finally:
                self._waiting -= 1


class _Stop(Exception):
    """The run is over, or failed elsewhere: leave quietly."""


class Runner(Generic[StepT]):
    """One run of a graph over many steps.

    Parameters
    ----------
    graph : TaskGraph
        One step's structure.
    kernels : Kernels
        Binds steps and does the work.
    device : torch.device
    delays : Delays, optional
        Hold tasks back, on the issuing and on the executing side.
    on_records : callable, optional
        Gets each step's records once all of them have finished.
    along : callable, optional
        Called on the caller's thread as steps go by, and once at the end, also that of a run
        that failed: the place for what lanes should not wait for.
    """

    def __init__(
        self,
        graph: TaskGraph,
        kernels: Kernels[StepT],
        device: torch.device,
        *,
        delays: Delays | None = None,
        on_records: Callable[[int, list[tuple[TaskId, float, float]]], None] | None = None,
        along: Callable[[], None] | None = None,
    ) -> None:
        self.graph, self.kernels, self.delays = graph, kernels, delays
        self.on_records, self.along = on_records, along
        self.device = device
        self.clock = Clock(device)
        self.lanes = graph.lanes
        self.progress = {lane: _Progress() for lane in self.lanes}
        self.steps: dict[int, StepT] = {}
        self.bound = _Progress()  # steps bound so far
        self.stop_at: int | None = None
        self.error: BaseException | None = None
        self.records: dict[Lane, dict[int, list[Record]]] = {lane: {} for lane in self.lanes}
        self.resolved = 0  # steps whose times are known
        self.where: dict[Lane, tuple[object, ...]] = {}
        self._position = {
            t.id: (lane, i) for lane, tasks in self.lanes.items() for i, t in enumerate(tasks)
        }
        self._waits = {t.id: self._waits_of(t) for t in graph.tasks}
        self._streams: dict[Lane, Stream] = {}
        # (step, event) of each task, for the last few steps.
        self._ends: dict[Lane, list[list[tuple[int, Event] | None]]] = {
            lane: [[None] * len(tasks) for _ in range(WINDOW)] for lane, tasks in self.lanes.items()
        }

    def _waits_of(self, task: Task) -> tuple[_Wait, ...]:
        """The waits an edge makes, one per lane and distance: lanes are in order, so the
        last producer of a lane stands for those before it."""
        latest: dict[tuple[Lane, int, bool], int] = {}
        for e in self.graph.preds[task.id]:
            lane, position = self._position[e.src]
            if e.reason.kind is EdgeKind.LANE or (lane is task.lane and not e.reason.host):
                continue
            key = (lane, e.reason.distance, e.reason.host)
            latest[key] = max(latest.get(key, -1), position)
        return tuple(_Wait(lane, p, d, host) for (lane, d, host), p in sorted(latest.items()))

    def run(self) -> None:
        """Run until ``kernels.next_step`` says that it is over.

        Raises
        ------
        DeadlockError
            If nothing moved for `STALL_S` seconds; it names where each lane stands.
        Exception
            Whatever the first failing task raised.
        """
        streams = self._streams = open_streams(self.device, self.clock, self._fail)
        threads = [Worker("moegen-bind", self._bind_first)]
        threads += [Worker(f"issue-{lane}", self._walk, lane, streams[lane]) for lane in self.lanes]
        with _quick_handover():
            try:
                for t in threads:
                    t.start()
                self._resolve_along()
            except BaseException as e:  # Ctrl-C while waiting: the lanes must leave first
                self._fail(e)
            for t in threads:
                if t.ident is not None:  # it was started
                    self._leave(t.wait)
        for s in streams.values():
            self._leave(s.close)
        self._streams = {}  # they refer to this runner, and through it to the buffers
        try:
            if self.along is not None:
                self.along()
        except BaseException as e:
            self._fail(e)
        if self.error is not None:
            raise self.error
        self._resolve(self.bound.done)
        if self.resolved < self.bound.done:
            raise DeadlockError(
                f"step {self.resolved} ended before all of its tasks had run: {self._standing()}"
            )

    def _leave(self, last: Callable[[], None]) -> None:
        """Do one of the last things, whatever happens: lanes still use memory that the caller
        is about to free. A second Ctrl-C, or a CUDA fault that shows up here, comes after."""
        while True:
            try:
                last()
            except KeyboardInterrupt as e:
                self._fail(e)
                continue
            except BaseException as e:
                self._fail(e)
            return

    # -- issuing ---------------------------------------------------------------------

    def _bind_first(self) -> None:
        """Bind step 0; the tasks that wait for the step before bind the others."""
        try:
            self._bind(0)
        except _Stop:
            return
        except BaseException as e:
            self._fail(e)

    def _bind(self, index: int) -> None:
        step = self.kernels.next_step(index)
        if step is None:
            self.stop_at = index
            self._wake()
            raise _Stop
        self.steps[index] = step
        self.steps.pop(index - WINDOW, None)
        self.bound.advance()

    def _walk(self, lane: Lane, stream: Stream) -> None:
        index = 0
        try:
            enter(self.device)
            while True:
                for position, task in enumerate(self.lanes[lane]):
                    self._issue(lane, stream, task, position, index)
                index += 1
        except _Stop:
            return
        except BaseException as e:
            self._fail(e)

    def _issue(self, lane: Lane, stream: Stream, task: Task, position: int, index: int) -> None:
        if self.delays is not None and (s := self.delays.issue_s(task, index)):
            threading.Event().wait(s)
        host = False
        for w in self._waits[task.id]:
            if index < w.distance:
                continue
            event = self._recorded(w, index - w.distance, task, index)
            if w.host:
                event.synchronize()
                self._check(index)
                if w.distance:
                    self._bind(index)  # what the step before left on the host says what this is
                else:
                    host = True
            else:
                stream.wait(event)
        # Work that needs no step (weights) may be one step ahead of what is known.
        step = self._step(index, task) if self.kernels.needs_step(task) else None
        if step is None and index > 0:
            self._step(index - 1, task)
        if host and step is not None:
            self.kernels.host_value(task, step)
        self._check(index)
        start = None
        if self.delays is not None and (s := self.delays.run_s(task, index)):
            stream.delay(s)
        if not self.kernels.is_empty(task, step):
            start = stream.record()
            stream.submit(lambda: self.kernels.run(task, index, step))
        end = stream.record()
        self._ends[lane][index % WINDOW][position] = (index, end)
        self.records[lane].setdefault(index, []).append(Record(task, start, end))
        self.progress[lane].advance()

    def _recorded(self, w: _Wait, index: int, task: Task, at: int) -> Event:
        """The producer's event, once it has been recorded in step ``index``."""
        need = index * len(self.lanes[w.lane]) + w.position + 1
        self.where[task.lane] = (task.id, at, self.lanes[w.lane][w.position].id, index)
        self._await(self.progress[w.lane], need, at)
        found = self._ends[w.lane][index % WINDOW][w.position]
        if found is None or found[0] != index:
            raise UnrecordedEvent(
                f"{task.id} of step {at} needs the event of {self.lanes[w.lane][w.position].id} of "
                f"step {index}, and finds that of step {found[0] if found else 'none'}"
            )
        return found[1]

    def _step(self, index: int, task: Task) -> StepT:
        self.where[task.lane] = (task.id, index)
        self._await(self.bound, index + 1, index)
        return self.steps[index]

    def _await(self, progress: _Progress, need: int, index: int) -> None:
        before = self._moves()
        while not progress.wait_for(need, lambda: self._over(index)):
            # A long step is no deadlock: one is when nobody has moved and nobody is at work.
            now = self._moves()
            if now == before:
                raise DeadlockError(f"nothing moved for {STALL_S:.0f} s: {self._standing()}")
            before = now
        self._check(index)

    def _moves(self) -> int:
        """A number that has changed if anything has moved since, or is at work."""
        issued = sum(p.done for p in (self.bound, *self.progress.values()))
        return issued + sum(s.pulse() for s in self._streams.values())

    def _standing(self) -> str:
        """Where each lane stands, for a person."""
        said = []
        for lane, (task, step, *producer) in sorted(self.where.items()):
            what = "for the step to be bound"
            if producer:
                what = f"for {producer[0]} of step {producer[1]}"
            said.append(f"{lane}: {task} of step {step} waited last {what}")
        return "; ".join(said)

    def _ended(self) -> bool:
        return self.error is not None or self.stop_at is not None

    def _over(self, index: int) -> bool:
        return self.error is not None or (self.stop_at is not None and index >= self.stop_at)

    def _check(self, index: int) -> None:
        if self._over(index):
            raise _Stop

    def _fail(self, error: BaseException) -> None:
        if self.error is None:
            self.error = error
        self._wake()

    def _wake(self) -> None:
        for p in (self.bound, *self.progress.values()):
            p.wake()

    # -- times -----------------------------------------------------------------------

    def _resolve_along(self) -> None:
        """Resolve times on this thread, off the lanes' own, until the run is over."""
        while not self._ended():
            # A step's tasks have all finished once the one after the next is bound.
            self.bound.wait_for(self.resolved + 3, self._ended)
            known = self.resolved
            self._resolve(self.bound.done - 2)
            if self.resolved == known:
                time.sleep(1e-3)  # a late task is waited for; the lanes need the interpreter
            if self.along is not None:
                self.along()

    def _resolve(self, upto: int) -> None:
        """Turn the events of steps before ``upto`` into seconds."""
        for index in range(self.resolved, upto):
            found = [of_lane.get(index, []) for of_lane in self.records.values()]
            if sum(map(len, found)) < len(self.graph.tasks):
                return  # a task that nothing waits for may be late
            times = []
            for r in itertools.chain.from_iterable(found):
                r.end.synchronize()
                end = r.end.time_s()
                start = end if r.start is None else r.start.time_s()
                times.append((r.task.id._replace(step=index), start, end))
            for of_lane in self.records.values():
                del of_lane[index]
            if self.on_records is not None:
                self.on_records(index, times)
            self.resolved = index + 1


@contextmanager
def _quick_handover() -> Iterator[None]:
    before = sys.getswitchinterval()
    sys.setswitchinterval(min(before, SWITCH_INTERVAL_S))
    try:
        yield
    finally:
        sys.setswitchinterval(before)
