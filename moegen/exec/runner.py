"""Running a graph: every lane runs its tasks in order and waits only on edges.

`moegen.exec.issue` hands the tasks over, on a thread of its own, which also reads the clocks of
finished steps when it has nothing to issue; what the caller wants to hear is told on his thread.
"""

from __future__ import annotations

import gc
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Generic

import torch

from moegen.errors import DeadlockError
from moegen.exec import issue
from moegen.exec.delays import Delays
from moegen.exec.issue import Issuer, Kernels, Record, StepT, Times
from moegen.exec.lanes import Clock, Stream, open_streams, prepare_delays
from moegen.exec.threads import Worker
from moegen.graph.task import Lane, TaskGraph

# A Python thread may keep the interpreter for this long before another gets it: the one that
# issues work must not wait for the one that reads clocks.
SWITCH_INTERVAL_S = 5e-5
# Collections of the middle generation that come before one of the oldest, in a run.
FULL_COLLECTION = 1000
# Times resolved before the lanes are looked at again.
_RESOLVE_AT_ONCE = 8


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
    on_delays : callable, optional
        Gets the seconds by which tasks of each op were held back on their lanes in a step.
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
        on_records: Callable[[int, list[Times]], None] | None = None,
        on_delays: Callable[[int, dict[str, float]], None] | None = None,
        along: Callable[[], None] | None = None,
    ) -> None:
        self.graph, self.kernels, self.device, self.delays = graph, kernels, device, delays
        self.on_records, self.on_delays, self.along = on_records, on_delays, along
        self.resolved = 0  # steps whose times are known
        self.error: BaseException | None = None
        self._changed = threading.Condition()
        # Of the step whose times are being read: what was recorded, and times so far.
        self._events: list[Record] = []
        self._times: list[Times] = []
        self._origin_s = 0.0
        self._delayed_s: dict[str, float] = {}
        self.issuer: Issuer[StepT] | None = None

    def run(self) -> None:
        """Run until ``kernels.next_step`` says that it is over.

        Raises
        ------
        DeadlockError
            If nothing moved for `issue.STALL_S` seconds; it names where each lane stands.
        Exception
            Whatever the first failing task raised.
        """
        if self.delays is not None:
            prepare_delays(self.device)
        clock = Clock(self.device)
        self._origin_s = clock.origin
        issuer = self.issuer = Issuer(
            self.graph,
            self.kernels,
            delays=self.delays,
            on_bound=self._wake,
            meanwhile=self._resolve_some,
        )
        streams: dict[Lane, Stream] = {}
        thread = Worker("moegen-issue", self._issue, issuer, streams)
        with undisturbed():
            try:
                open_streams(self.device, clock, self._fail, issuer.wake, streams)
                thread.start()
                self._tell_along(issuer)
            except BaseException as e:  # Ctrl-C while waiting: the lanes must leave first
                self._fail(e)
            if thread.ident is not None:  # it was started
                self._leave(thread.wait)
            for s in streams.values():
                self._leave(s.close)
        try:
            self._end(issuer)
        finally:
            issuer.let_go()

    def _end(self, issuer: Issuer[StepT]) -> None:
        try:
            if self.along is not None:
                self.along()
        except BaseException as e:
            self._fail(e)
        if self.error is not None:
            raise self.error
        while self._resolve_some(issuer.bound):
            pass
        if self.resolved < issuer.bound:
            raise DeadlockError(
                f"step {self.resolved} ended before all of its tasks had run: {issuer.standing()}"
            )

    def _issue(self, issuer: Issuer[StepT], streams: issue.Streams) -> None:
        try:
            issuer.run(self.device, streams)
        except BaseException as e:
            self._fail(e)
        self._wake()

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

    def _fail(self, error: BaseException) -> None:
        if self.error is None:
            self.error = error
        if self.issuer is not None:
            self.issuer.stop()
        self._wake()

    def _wake(self) -> None:
        with self._changed:
            self._changed.notify_all()

    def _tell_along(self, issuer: Issuer[StepT]) -> None:
        """Call ``along`` on this thread as steps are bound, until the run is over."""
        told = 0

        def news() -> bool:
            return issuer.over or issuer.bound > told

        while not issuer.over:
            with self._changed:
                self._changed.wait_for(news, issue.STALL_S)
            told = issuer.bound
            if self.along is not None:
                self.along()

    # -- times -----------------------------------------------------------------------

    def _resolve_some(self, upto: int | None = None) -> bool:
        """Turn a few events into seconds, of steps before ``upto``; False if there are none."""
        issuer, index = self.issuer, self.resolved
        assert issuer is not None
        # A step's tasks have all finished once the one after the next is bound, but for one
        # that nothing waits for.
        if index >= (issuer.bound - 2 if upto is None else upto):
            return False
        if not self._events:
            if issuer.n_recorded(index) < len(self.graph.tasks):
                return False
            self._events = issuer.records_of(index)
        done = len(self._times)
        for r in self._events[done : done + _RESOLVE_AT_ONCE]:
            if not r.end.ready():
                if upto is None:
                    return False
                # Only then: it lets go of the interpreter for a moment, and moments that follow
                # each other keep a CPU lane's thread from ever getting hold of it.
                r.end.synchronize()
            end = r.end.time_s()
            start = end if r.start is None else r.start.time_s()
            task = r.task.id._replace(step=index)
            self._times.append(Times(task, start, end, *(t - self._origin_s for t in r.issue)))
            if r.held is not None:
                op = r.task.id.op
                held_s = start - r.held.time_s()
                self._delayed_s[op] = self._delayed_s.get(op, 0.0) + held_s
        if len(self._times) == len(self._events):
            times, self._events, self._times = self._times, [], []
            issuer.forget(index)
            self.resolved = index + 1
            delayed_s, self._delayed_s = self._delayed_s, {}
            if self.on_records is not None:
                self.on_records(index, times)
            if self.on_delays is not None and delayed_s:
                self.on_delays(index, delayed_s)
        return True


class _Undisturbed:
    """What runs change in the interpreter while any of them is on: they may overlap."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._runs = 0
        self._switch_interval_s = 0.0
        self._thresholds = self._rarely = gc.get_threshold()

    @contextmanager
    def __call__(self) -> Iterator[None]:
        """Let threads hand over quickly, and the garbage collector look at what is young.

        Looking through all that a run keeps of its steps, or through all that torch and
        transformers make, takes a tenth of a second, in which nothing is issued. So it is not
        done until thousands of times as much has been made and kept as is young.
        """
        with self._lock:
            self._runs += 1
            if self._runs == 1:
                self._switch_interval_s = sys.getswitchinterval()
                sys.setswitchinterval(min(self._switch_interval_s, SWITCH_INTERVAL_S))
                self._thresholds = young, middle, old = gc.get_threshold()
                gc.set_threshold(young, middle, max(old, FULL_COLLECTION))
                self._rarely = gc.get_threshold()
        try:
            yield
        finally:
            with self._lock:
                self._runs -= 1
                if self._runs == 0:
                    sys.setswitchinterval(self._switch_interval_s)
                    if gc.get_threshold() == self._rarely:  # else the caller has set his own
                        gc.set_threshold(*self._thresholds)


undisturbed = _Undisturbed()
