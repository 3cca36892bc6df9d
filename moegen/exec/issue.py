"""Issuing: one thread hands every lane's tasks to its stream, as soon as edges allow.

A task at the head of its lane's queue can be issued once each of its producers has been issued
(its event has been recorded; a wait for an event that has not been recorded protects nothing),
and once what the host itself must know has come: the tokens that say what the step is, the
routing that says which experts it needs. The stream then waits for the events. Nothing here
blocks: a lane that cannot go on is looked at again when something has changed. One thread,
because threads that issue side by side spend their time waiting for Python's lock.
"""

from __future__ import annotations

import itertools
import threading
import time
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass
from typing import Generic, NamedTuple, Protocol, TypeVar

import torch

from moegen.errors import DeadlockError
from moegen.exec.delays import Delays
from moegen.exec.lanes import Event, Stream, UnrecordedEvent, enter
from moegen.exec.threads import short_sleeps
from moegen.graph.ahead import MOST_AHEAD
from moegen.graph.task import EdgeKind, Lane, Task, TaskGraph, TaskId

STALL_S = 600.0
# Events of a GPU are asked for, since it does not call: how often.
POLL_S = 20e-6
# Steps whose events are kept: edges reach one step back, issue runs at most one ahead.
WINDOW = 4
# Steps that may be bound before the times of the first of them are known: more than that, and
# records pile up where steps are short.
UNRESOLVED = 4
# Who is looked at first when something has changed. What the link is to carry next is urgent, for
# it must not idle; the GPU's queue is long, and its kernels take longest to launch.
_URGENCY = (Lane.BULK, Lane.ACT, Lane.KV, Lane.CPU, Lane.GPU)

StepT = TypeVar("StepT")
Streams = Mapping[Lane, Stream]


class Kernels(Protocol[StepT]):
    """What is asked of whoever does the work."""

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


class _Wait(NamedTuple):
    """Wait for ``position`` of ``lane``, ``distance`` steps back."""

    lane: Lane
    position: int
    distance: int
    host: bool


@dataclass
class Record:
    """When a task ran: events until resolved, seconds after.

    ``held`` is where its delay began, which ends where the task starts; None if it had none.
    ``issue`` is when the issuing thread turned to it, when it began to hand it over (nothing was
    left to wait for), and when it was through, by the host's clock.
    """

    task: Task
    start: Event | None
    end: Event
    issue: tuple[float, float, float]
    held: Event | None = None


class Times(NamedTuple):
    """When a task ran, and when the issuing thread turned to it, began to hand it over and was
    through, in seconds of the run's clock."""

    task: TaskId
    start_s: float
    end_s: float
    turned_s: float
    issue_s: float
    issued_s: float

    @property
    def worked(self) -> bool:
        """Whether it had anything to do."""
        return self.end_s > self.start_s

    @property
    def late(self) -> bool:
        """Whether its lane came to it before the thread was through."""
        return self.start_s < self.issued_s


class _Queue:
    """One lane's tasks, step after step, and how far they have been issued."""

    def __init__(self, lane: Lane, tasks: tuple[Task, ...], waits: list[tuple[_Wait, ...]]) -> None:
        self.lane, self.tasks, self.waits = lane, tasks, waits
        self.issued = 0  # tasks, of all steps
        self.ended = 0  # tasks of all steps that are known to have ended
        self.index = self.position = 0  # of the task at the head
        self.records: dict[int, list[Record]] = {}
        # (step, event) of each task, for the last few steps.
        self.ends: list[list[tuple[int, Event] | None]] = [
            [None] * len(tasks) for _ in range(WINDOW)
        ]
        # Of the task at the head: until when a test holds it back, the waits that it has behind
        # it, whether it has a value to read on the host.
        self.held_until: float | None = None
        self.waited = 0
        self.reads_host = False

    def advance(self) -> None:
        self.issued += 1
        self.position += 1
        if self.position == len(self.tasks):
            self.index, self.position = self.index + 1, 0
        self.held_until, self.waited, self.reads_host = None, 0, False


class Issuer(Generic[StepT]):
    """Issues the tasks of a graph, step after step.

    Parameters
    ----------
    graph : TaskGraph
        One step's structure.
    kernels : Kernels
    delays : Delays, optional
    on_bound : callable, optional
        Called as each step is bound.
    meanwhile : callable, optional
        Called when there is nothing to issue: does a little of what can wait, and says whether
        there was any.

    Attributes
    ----------
    bound : int
        Steps bound so far.
    over : bool
        Whether nothing more will be issued.
    """

    def __init__(
        self,
        graph: TaskGraph,
        kernels: Kernels[StepT],
        *,
        delays: Delays | None = None,
        on_bound: Callable[[], None] | None = None,
        meanwhile: Callable[[], bool] | None = None,
    ) -> None:
        self.kernels, self.delays = kernels, delays
        self.on_bound, self.meanwhile = on_bound, meanwhile
        self.steps: dict[int, StepT] = {}
        self.bound = 0
        self.over = False
        self._stop_at: int | None = None
        self._stopped = False
        self._forgotten = 0  # steps whose records are gone
        place = {t.id: (lane, i) for lane, ts in graph.lanes.items() for i, t in enumerate(ts)}
        self._queues = {
            lane: _Queue(lane, tasks, [_waits(graph, t, place) for t in tasks])
            for lane, tasks in sorted(graph.lanes.items(), key=lambda x: _URGENCY.index(x[0]))
        }
        self._needs_step = {t.id: kernels.needs_step(t) for t in graph.tasks}
        self._bell = _Bell()
        self._idle = False
        self._look_at_s: float | None = None  # when to look again, though no bell rings

    # -- called from other threads ---------------------------------------------------------

    def wake(self) -> None:
        """Something has changed: look at the lanes again."""
        if self._idle:
            self._bell.ring()

    def stop(self) -> None:
        """Issue nothing more."""
        self._stopped = True
        self._bell.ring()

    def records_of(self, index: int) -> list[Record]:
        """What has been issued of step ``index``, lane by lane."""
        return list(
            itertools.chain.from_iterable(q.records.get(index, ()) for q in self._queues.values())
        )

    def n_recorded(self, index: int) -> int:
        """How many tasks of step ``index`` have been issued."""
        return sum(len(q.records.get(index, ())) for q in self._queues.values())

    def forget(self, index: int) -> None:
        """Let go of the records of step ``index``, whose times are known."""
        for q in self._queues.values():
            q.records.pop(index, None)
        self._forgotten = index + 1

    def let_go(self) -> None:
        """Forget all events and whom to call: they refer to each other, and to the buffers."""
        self.on_bound = self.meanwhile = None
        for q in self._queues.values():
            q.records.clear()
            q.ends.clear()

    def standing(self) -> str:
        """Where each lane stands, for a person."""
        said = []
        for q in self._queues.values():
            task, waits = q.tasks[q.position], q.waits[q.position]
            what = "to be issued"
            if q.waited < len(waits):
                w = waits[q.waited]
                producer = self._queues[w.lane].tasks[w.position]
                what = f"for {producer.id} of step {q.index - w.distance}"
            elif self._step_missing(q, task):
                what = "for the step to be bound"
            said.append(f"{q.lane}: {task.id} of step {q.index} waits {what}")
        return "; ".join(said)

    # -- the issuing thread ----------------------------------------------------------------

    def run(self, device: torch.device, streams: Streams) -> None:
        """Issue until the run is over, failed or stopped.

        Raises
        ------
        DeadlockError
            If nothing moved for `STALL_S` seconds.
        Exception
            Whatever a kernel raised while it was being launched.
        """
        try:
            with torch.inference_mode():
                enter(device)
                short_sleeps()
                self._bind(0)
                self._loop(streams)
        finally:
            self.over = True

    def _loop(self, streams: Streams) -> None:
        urgent = list(self._queues.values())
        quiet = _Quiet()
        while not self._stopped and any(self._is_open(q) for q in urgent):
            self._look_at_s = None
            moved = False
            for q in urgent:
                while not self._stopped and self._is_open(q) and self._try(q, streams[q.lane]):
                    moved = True
                    if q.lane is Lane.GPU:
                        break  # its launches are slow: see what others can do meanwhile
            if moved:
                quiet.over()
                self._idle = False
            elif not self._idle:
                self._idle = True  # from here on the bell rings; what came before is seen now
            else:
                self._rest(quiet, streams)

    def _is_open(self, q: _Queue) -> bool:
        return self._stop_at is None or q.index < self._stop_at

    def _try(self, q: _Queue, stream: Stream) -> bool:
        """Issue the task at the head of a queue, if it can be."""
        began = time.perf_counter()
        task, index = q.tasks[q.position], q.index
        if self.delays is not None and self._is_held(q, task):
            return False
        if self._far_ahead(q):
            return False
        waits = q.waits[q.position]
        while q.waited < len(waits):
            w = waits[q.waited]
            if index >= w.distance and not self._pass(w, q, stream):
                return False
            q.waited += 1
        if self._step_missing(q, task):
            return False
        step = self.steps[index] if self._needs_step[task.id] else None
        if q.reads_host and step is not None:
            self.kernels.host_value(task, step)
        self._issue(q, stream, task, step, began)
        return True

    def _issue(
        self, q: _Queue, stream: Stream, task: Task, step: StepT | None, began: float
    ) -> None:
        index, start, held = q.index, None, None
        begun = time.perf_counter()
        if self.delays is not None and (s := self.delays.run_s(task, index)):
            held = stream.record()  # behind the waits: the delay itself is what is timed
            stream.delay(s)
        if not self.kernels.is_empty(task, step):
            start = stream.record()
            stream.submit(lambda: self.kernels.run(task, index, step))
        end = stream.record()
        q.ends[index % WINDOW][q.position] = (index, end)
        issue = began, begun, time.perf_counter()
        q.records.setdefault(index, []).append(Record(task, start, end, issue, held))
        q.advance()

    def _pass(self, w: _Wait, q: _Queue, stream: Stream) -> bool:
        """Put one wait behind the task at the head; False if it is too early for it."""
        index = q.index - w.distance
        if not self._has_recorded(w, index):
            return False
        event = self._recorded(w, index, q)
        if not w.host:
            if not stream.can_wait(event):
                return self._later(event)
            stream.wait(event)
            return True
        if not event.ready():
            return self._later(event)
        if w.distance:
            if self.bound - self._forgotten >= UNRESOLVED:
                self._look_again(time.perf_counter() + POLL_S)
                return False
            # What the step before left on the host says what this one is.
            self._bind(q.index)
            return self._stop_at is None
        q.reads_host = True
        return True

    def _far_ahead(self, q: _Queue) -> bool:
        """Whether a lane has so much before it that nothing is to be added."""
        most = MOST_AHEAD.get(q.lane)
        if most is None or (k := q.issued - most) < q.ended:
            return False
        index, position = divmod(k, len(q.tasks))
        found = q.ends[index % WINDOW][position]
        if found is not None and found[0] == index:
            event = found[1]
            if not event.ready():
                self._later(event)
                return True
        q.ended = k + 1
        return False

    def _has_recorded(self, w: _Wait, index: int) -> bool:
        of = self._queues[w.lane]
        return of.issued > index * len(of.tasks) + w.position

    def _recorded(self, w: _Wait, index: int, q: _Queue) -> Event:
        """The producer's event of step ``index``."""
        of = self._queues[w.lane]
        found = of.ends[index % WINDOW][w.position]
        if found is None or found[0] != index:
            raise UnrecordedEvent(
                f"{q.tasks[q.position].id} of step {q.index} needs the event of "
                f"{of.tasks[w.position].id} of step {index}, and finds that of step "
                f"{found[0] if found else 'none'}"
            )
        return found[1]

    def _later(self, event: Event) -> bool:
        if not event.rings:
            self._look_again(time.perf_counter() + POLL_S)
        return False

    def _look_again(self, at_s: float) -> None:
        self._look_at_s = at_s if self._look_at_s is None else min(at_s, self._look_at_s)

    def _step_missing(self, q: _Queue, task: Task) -> bool:
        # Work that needs no step (weights) may be one step ahead of what is known.
        need = q.index + 1 if self._needs_step[task.id] else q.index
        return self.bound < need

    def _bind(self, index: int) -> None:
        step = self.kernels.next_step(index)
        self._idle = False  # that changes what there is to do, for lanes looked at before too
        if step is None:
            self._stop_at = index
            return
        self.steps[index] = step
        self.steps.pop(index - WINDOW, None)
        self.bound = index + 1
        if self.on_bound is not None:
            self.on_bound()

    def _is_held(self, q: _Queue, task: Task) -> bool:
        assert self.delays is not None
        if q.held_until is None:
            q.held_until = time.perf_counter() + self.delays.issue_s(task, q.index)
        held = time.perf_counter() < q.held_until
        if held:
            self._look_again(q.held_until)
        return held

    def _rest(self, quiet: _Quiet, streams: Streams) -> None:
        """Wait until the bell rings, or it is time to look again."""
        if self.meanwhile is not None and self.meanwhile():
            return
        left_s = quiet.left_s(lambda: self._moves(streams))
        if left_s <= 0:
            raise DeadlockError(f"nothing moved for {STALL_S:.0f} s: {self.standing()}")
        if self._look_at_s is not None:
            left_s = min(left_s, max(0.0, self._look_at_s - time.perf_counter()))
        self._bell.wait(left_s)

    def _moves(self, streams: Streams) -> int:
        """A number that has changed if a stream has moved since, or is at work."""
        return sum(s.pulse() for s in streams.values())


class _Bell:
    """Wakes one thread; rung before it waits, it does not wait.

    A lock, which takes timeouts of microseconds: ``queue.SimpleQueue`` of CPython, asked to wait
    for so short a time, now and then waits for ever.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._lock.acquire()

    def ring(self) -> None:
        with suppress(RuntimeError):  # it has been rung already
            self._lock.release()

    def wait(self, timeout_s: float) -> None:
        self._lock.acquire(timeout=timeout_s)


class _Quiet:
    """For how long nothing has moved. A long task is no deadlock: one is when nobody has moved
    and nobody is at work."""

    def __init__(self) -> None:
        self._since: float | None = None
        self._moves = 0

    def over(self) -> None:
        self._since = None

    def left_s(self, moves: Callable[[], int]) -> float:
        """Seconds until it is a deadlock; at most 0 if it is one."""
        now = time.perf_counter()
        if self._since is None:
            self._since, self._moves = now, moves()
        left_s = self._since + STALL_S - now
        if left_s <= 0 and (found := moves()) != self._moves:
            self._since, self._moves = now, found
            left_s = STALL_S
        return left_s


def _waits(
    graph: TaskGraph, task: Task, place: Mapping[TaskId, tuple[Lane, int]]
) -> tuple[_Wait, ...]:
    """The waits an edge makes, one per lane and distance: lanes are in order, so the last
    producer of a lane stands for those before it."""
    latest: dict[tuple[Lane, int, bool], int] = {}
    for e in graph.preds[task.id]:
        lane, position = place[e.src]
        if e.reason.kind is EdgeKind.LANE or (lane is task.lane and not e.reason.host):
            continue
        key = (lane, e.reason.distance, e.reason.host)
        latest[key] = max(latest.get(key, -1), position)
    return tuple(_Wait(lane, p, d, host) for (lane, d, host), p in sorted(latest.items()))
