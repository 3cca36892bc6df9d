"""The executor's issuing thread, simulated: one thread that hands every lane's tasks over.

A task's kernels cannot start before the thread has turned to the task, and its last one not
before the thread is through with it. The thread goes from lane to lane as `moegen.exec.issue`
does: a stream waits by itself for what has been handed over to another stream, while for what the
host must know, and for the CPU's results, the thread leaves a lane alone until they are there,
which it notices a little later. Nor does it hand more over to a lane that has much before it
(`moegen.graph.ahead`). Steps are bound one after the other, once the host knows the tokens of the
one before; weights may be copied one step ahead of that. After a rest it is slower
(`moegen.graph.latencies.Rest`). What else the thread does, such as reading clocks while there is
nothing to hand over, takes no time here, and it disturbs nobody.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence

from moegen.graph.ahead import MOST_AHEAD
from moegen.graph.latencies import Latencies, Rest
from moegen.graph.task import Lane, TaskGraph, TaskId
from moegen.sim.clock import THEN, Clock
from moegen.sim.handover import rules

# Who is looked at first, as in the executor.
URGENCY = (Lane.BULK, Lane.ACT, Lane.KV, Lane.CPU, Lane.GPU)
# At one moment the thread looks when all that ends then has ended.
_AFTER_ENDS = THEN
_IDLE = math.inf


class _Queue:
    """A lane's tasks, step after step, and how far they have been handed over."""

    __slots__ = (
        "awaits", "base", "lane", "most", "number", "of", "place", "positions", "step", "waited"
    )  # fmt: skip

    def __init__(self, number: int, lane: Lane, positions: Sequence[int]) -> None:
        self.number, self.lane, self.positions = number, lane, positions
        self.step = self.base = self.place = 0  # of the task at the head; base is step * n
        self.most = MOST_AHEAD.get(lane)
        self.waited = 0  # waits that it has behind it
        # What it was last found to wait for: a place in an array of what has been handed over,
        # or has ended.
        self.awaits: Sequence[int] = b"\1"
        self.of = 0

    def advance(self, n: int) -> None:
        self.waited = 0
        self.place += 1
        if self.place == len(self.positions):
            self.place, self.step, self.base = 0, self.step + 1, self.base + n


class Issuing:
    """The thread, for one run.

    Parameters
    ----------
    clock : Clock
    g : TaskGraph
    issue_s : sequence of float, shape [steps * n]
        What handing each task over takes of the thread.
    turn_s : sequence of float, shape [steps * n]
        What the thread does before that, once nothing keeps it from handing the task over.
    latencies : Latencies
    ended : sequence of bool, shape [steps * n]
        Filled by the lanes.
    end_s : sequence of float, shape [steps * n]
        Likewise.
    handed : callable
        Called with a lane's number when its next task has been handed over.
    rests : callable
        Called when the thread rests, or is busy for a while.

    Attributes
    ----------
    begun : sequence of bool, shape [steps * n]
        Whether the thread hands a task over, or has done so.
    begun_s : sequence of float, shape [steps * n]
        When it began to.
    done_s : sequence of float, shape [steps * n]
        When it is through with it.
    """

    def __init__(
        self,
        clock: Clock,
        g: TaskGraph,
        issue_s: Sequence[float],
        turn_s: Sequence[float],
        latencies: Latencies,
        ended: Sequence[int],
        end_s: Sequence[float],
        handed: Callable[[int], None],
        rests: Callable[[], None],
    ) -> None:
        self._clock, self._n, self._issue_s, self._turn_s = clock, len(g), issue_s, turn_s
        self._ended, self._end_s, self._handed, self._rests = ended, end_s, handed, rests
        self.begun = bytearray(len(issue_s))
        self.begun_s, self.done_s = [0.0] * len(issue_s), [0.0] * len(issue_s)
        self._tasks, self._n_steps = g.tasks, len(issue_s) // max(1, len(g))
        lanes = zip(g.lanes, g.structure.lanes, strict=True)
        self._queues = [_Queue(i, lane, queue) for i, (lane, queue) in enumerate(lanes)]
        self._queues.sort(key=lambda q: URGENCY.index(q.lane))
        self._rules = rules(g)
        # How late the thread notices the ends that it waits for.
        cpu_s, gpu_s = latencies.cpu_to_host_s, latencies.gpu_to_host_s
        self._late_s = {
            at: cpu_s if on_cpu else gpu_s for at, on_cpu in self._rules.from_cpu.items()
        }
        self._room_late_s = gpu_s
        self._rest, self._ops = Rest(), [t.id.op for t in g.tasks]
        self._rested_issue, self._rested_turn = latencies.rested_issue, latencies.rested_turn
        self._room: set[int] = set()  # whose ends lanes wait for that have so much before them
        self._bound = 1 if self._rules.binds else math.inf
        self._resting = False
        self._turns = self._run()

    def start(self) -> None:
        """Begin at this moment."""
        self._clock.at(self._clock.now, self._turn, _AFTER_ENDS)

    def ended(self, at: int) -> None:
        """A task has ended; lets the thread look again if it may have waited for that."""
        late_s = self._late_s.get(at % self._n)
        if late_s is not None:
            self._clock.at(self._end_s[at] + late_s, self._ring, _AFTER_ENDS)
        if at in self._room:
            self._room.discard(at)
            self._clock.at(self._end_s[at] + self._room_late_s, self._ring, _AFTER_ENDS)

    def _ring(self) -> None:
        if self._resting:
            self._turn()

    def _turn(self) -> None:
        """Go on until there is nothing to hand over, or handing over takes a while."""
        until_s = next(self._turns, _IDLE)
        self._resting = until_s == _IDLE
        if not self._resting:
            self._clock.at(until_s, self._turn, _AFTER_ENDS)
        self._rests()

    def _run(self) -> Iterator[float]:
        """What the thread does: until when it is busy, or `_IDLE`, each time."""
        clock, n, n_steps = self._clock, self._n, self._n_steps
        issue_s, turn_s, rest = self._issue_s, self._turn_s, self._rest
        left, free_s = len(self.begun), clock.now
        while left:
            moved, bound = False, self._bound
            for q in self._queues:
                while q.awaits[q.of] and q.step < n_steps and self._may_go(q):
                    position = q.positions[q.place]
                    at = q.base + position
                    q.advance(n)
                    cold = rest.before(clock.now - free_s, self._ops[position])
                    if turn_s[at] > 0:
                        yield clock.now + turn_s[at] * (1 + self._rested_turn * cold)
                    left -= 1
                    moved = True
                    self.begun[at], self.begun_s[at] = 1, clock.now
                    took_s = issue_s[at] * (1 + self._rested_issue * cold)
                    self.done_s[at] = free_s = until_s = clock.now + took_s
                    rest.handed_over()
                    self._handed(q.number)
                    if until_s > clock.now:
                        yield until_s
                    if q.lane is Lane.GPU:
                        break  # its launches are slow: see what others can do meanwhile
            if not moved and self._bound == bound:
                yield _IDLE

    def _may_go(self, q: _Queue) -> bool:
        """Whether the task at the head of a queue can be handed over now."""
        if q.most is not None and not self._has_room(q, q.most):
            return False
        of, position = self._rules, q.positions[q.place]
        waits = of.waits[position]
        while q.waited < len(waits):
            at, ends, binds = waits[q.waited]
            at += q.base
            if at >= 0:
                q.awaits, q.of = self._ended if ends else self.begun, at
                if not q.awaits[at] or (ends and self._noticed_s(at) > self._clock.now):
                    return False
                if binds:
                    self._bound = max(self._bound, q.step + of.steps[position] + 1)
            q.waited += 1
        return self._bound >= q.step + of.needs[position]

    def _has_room(self, q: _Queue, most: int) -> bool:
        """Whether the thread has noticed that the lane's task ``most`` before this has ended."""
        k = q.step * len(q.positions) + q.place - most
        if k < 0:
            return True
        step, place = divmod(k, len(q.positions))
        at = step * self._n + q.positions[place]
        q.awaits, q.of = self._ended, at
        if not self._ended[at]:
            self._room.add(at)
            return False
        noticed_s = self._end_s[at] + self._room_late_s
        if noticed_s > self._clock.now:
            self._clock.at(noticed_s, self._ring, _AFTER_ENDS)
            return False
        return True

    def _noticed_s(self, at: int) -> float:
        return self._end_s[at] + self._late_s[at % self._n]

    def standing(self) -> list[str]:
        """What the thread waits for, lane by lane, where that never came."""
        said = []
        for q in self._queues:
            if q.step == self._n_steps:
                continue
            position = q.positions[q.place]
            waits, what = self._rules.waits[position], "what tells its step"
            if q.waited < len(waits):
                w = waits[q.waited]
                what = f"{self._id(q.base + w.at)} to {'end' if w.ends else 'be handed over'}"
            held = self._id(q.base + position)
            said.append(f"  the issuing thread holds back {held}: it waits for {what}")
        return said

    def _id(self, at: int) -> TaskId:
        step, position = divmod(at, self._n)
        of = self._tasks[position].id
        return of._replace(step=step) if self._n_steps > 1 else of
