"""Tasks that run at the same time and share resources, as flows of changing speed."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

import simpy
from simpy.events import EventPriority

from moegen.sim.clock import LAST, Clock
from moegen.sim.cost import Cost, CostModel
from moegen.sim.sharing import speeds_of

# Of events at one moment simpy takes those of low numbers first: 0 urgent, 1 normal.
_AFTER_ALL_ELSE = EventPriority(2)
_NONE = -1


class _Flow:
    """What runs on a lane: what is left of it, and how fast it goes since when."""

    __slots__ = ("at", "end_s", "ends", "lane", "left_s", "since_s", "speed")

    ends: simpy.Event

    def __init__(self, lane: int) -> None:
        self.lane, self.at = lane, _NONE
        self.left_s = 0.0  # at `since_s`, in seconds at full speed
        self.since_s = 0.0
        self.speed = 0.0
        self.end_s = math.inf  # if speeds stay as they are


class _Flows:
    """The tasks that run now, and the speeds at which they do."""

    def __init__(
        self,
        cost: CostModel,
        costs: Sequence[Cost],
        kinds: Sequence[int],
        seconds: Sequence[float],
        lane_of: Sequence[int],
    ) -> None:
        self._cost, self._costs, self._kinds = cost, costs, kinds
        self._seconds = seconds
        self._lane_of = lane_of
        # A lane runs one task at a time, so its place tells which; _NONE where it runs none.
        n_lanes = max(lane_of, default=-1) + 1
        self._flows = [_Flow(lane) for lane in range(n_lanes)]
        self._running = [_NONE] * n_lanes
        self._speeds: dict[tuple[int, ...], list[tuple[_Flow, float]]] = {}
        # Kinds that draw alike go at the same speeds, however long they take.
        self._draw_of: list[int] = [_NONE] * len(costs)
        self._draws: dict[tuple[tuple[tuple[str, float], ...], ...], int] = {}

    def _put(self, at: int, now: float) -> _Flow:
        """Let a task run from now on, at a speed that is yet to be set."""
        kind, lane = self._kinds[at], self._lane_of[at]
        draw = self._draw_of[kind]
        if draw == _NONE:
            draw = self._draw_of[kind] = self._draw(kind)
        self._running[lane] = draw
        flow = self._flows[lane]
        flow.at, flow.left_s, flow.since_s, flow.speed = at, self._seconds[at], now, 0.0
        flow.end_s = math.inf
        return flow

    def _set_speeds(self, now: float) -> tuple[float, list[_Flow]]:
        """Set all speeds: when the next end is, if they stay, and whose it is."""
        draws = tuple(self._running)
        speeds = self._speeds.get(draws)
        if speeds is None:
            speeds = self._speeds[draws] = self._share(draws)
        following, last = math.inf, []
        for flow, speed in speeds:
            if speed != flow.speed:  # a task never slowed ends at start + seconds exactly
                left_s = flow.left_s - flow.speed * (now - flow.since_s)
                flow.left_s, flow.since_s, flow.speed = max(0.0, left_s), now, speed
                flow.end_s = now + flow.left_s / speed
            end_s = flow.end_s
            if end_s < following:
                following, last = end_s, [flow]
            elif end_s == following:
                last.append(flow)
        return following, last

    def _draw(self, kind: int) -> int:
        """The number of what a kind of task draws on the resources."""
        cost = self._costs[kind]
        draw = tuple(self._cost.loads(cost).items()), tuple(cost.keeps.items())
        return self._draws.setdefault(draw, len(self._draws))

    def _share(self, draws: Sequence[int]) -> list[tuple[_Flow, float]]:
        """Of each lane that runs something its flow, and the speed at which that goes."""
        known = list(self._draws)
        running = [i for i, draw in enumerate(draws) if draw != _NONE]
        loads = [dict(known[draws[i]][0]) for i in running]
        keeps = [dict(known[draws[i]][1]) for i in running]
        speeds = speeds_of(loads, self._cost, keeps)
        return [(self._flows[i], x) for i, x in zip(running, speeds, strict=True) if x]


class Fluid(_Flows):
    """Flows where a task begins only as another ends.

    So speeds change only when a task ends: others begin at the same moment, and once all have,
    speeds are set and the next end is known.
    """

    def __init__(self, env: simpy.Environment, *of: Any) -> None:
        super().__init__(*of)
        self._env, self._now = env, 0.0
        self._settle_last(0.0)

    def begin(self, at: int, now: float) -> simpy.Event:
        """Begin a task; the event fires when it is through."""
        flow = self._put(at, now)
        flow.ends = event = simpy.Event(self._env)
        return event

    def _settle_last(self, delay_s: float) -> None:
        """Settle so much later, when nothing else is left to happen at that moment."""
        event = simpy.Event(self._env)
        event._ok, event._value = True, None
        event.callbacks.append(self._settle)
        self._env.schedule(event, _AFTER_ALL_ELSE, delay_s)

    def _ended(self, _: simpy.Event) -> None:
        # The lanes that the end sets going have begun their next tasks by now, unless they
        # wait for events of this moment that are still to come.
        if self._env.peek() <= self._env.now:
            self._settle_last(0.0)
        else:
            self._settle()

    def _settle(self, _: simpy.Event | None = None) -> None:
        """Set all speeds, and let the tasks that end next do so."""
        now = self._now
        following, last = self._set_speeds(now)
        if not last:
            return
        self._now = following
        for flow in last:
            self._running[flow.lane] = _NONE
            ends = flow.ends
            ends._ok, ends._value = True, following  # as a Timeout does
            self._env.schedule(ends, delay=following - now)
        if len(last) == 1:  # by then all who wait for it have joined its callbacks
            last[0].ends.callbacks.append(self._ended)
        else:
            self._settle_last(following - now)


class InterruptibleFluid(_Flows):
    """Flows where tasks may begin at any moment: an end that was foreseen may then move.

    Parameters
    ----------
    clock : Clock
    ended : callable
        Called with those that are through, at that moment.
    *of
        As for the others: the cost model, costs, kinds, seconds, and each task's lane.
    """

    def __init__(self, clock: Clock, ended: Callable[[list[int]], None], *of: Any) -> None:
        super().__init__(*of)
        self._clock, self._ended = clock, ended
        self._last: list[_Flow] = []  # whose end is next
        self._unsettled = self._asked = False

    def begin(self, at: int) -> None:
        """Begin a task; `settle` once all that begin at this moment have."""
        self._put(at, self._clock.now)
        self._unsettled = True

    def settle(self) -> None:
        """Set speeds, now or when nothing else is left to happen at this moment."""
        if not self._unsettled or self._asked:
            return
        if self._clock.more_now:
            self._asked = True
            self._clock.at(self._clock.now, self._settle, LAST)
        else:
            self._settle()

    def _settle(self) -> None:
        self._unsettled = self._asked = False
        following, self._last = self._set_speeds(self._clock.now)
        self._clock.foresee(following, self._end)

    def _end(self) -> None:
        for flow in self._last:
            self._running[flow.lane] = _NONE
        self._unsettled = True
        self._ended([flow.at for flow in self._last])
