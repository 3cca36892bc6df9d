"""Timelines as a chrome trace, for ui.perfetto.dev and chrome://tracing."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import fields
from pathlib import Path
from typing import Any

from moegen.errors import GraphError, InvalidInput
from moegen.graph.files import write_json
from moegen.graph.task import EdgeKind, Work
from moegen.timeline import SOURCES, Timeline

_WORK = tuple(f.name for f in fields(Work))


def write_perfetto(
    path: str | Path,
    *timelines: Timeline,
    names: Sequence[str] | None = None,
    align_s: Sequence[float] | None = None,
    args: Sequence[Mapping[int, Mapping[str, Any]]] | None = None,
) -> None:
    """Write timelines to ``path``, one under the other: a process each, a thread a lane.

    An arrow stands for a DATA edge between lanes. Times are whole nanoseconds after the start
    of each timeline's first task, so that slices which touch do not overlap by rounding: two
    that overlap on one thread would hide each other.

    Parameters
    ----------
    path : str or Path
    *timelines : Timeline
        From top to bottom, all beginning at 0: a predicted one and a measured one for example.
    names : sequence of str, optional
        What each is called; by default its source, model and phase.
    align_s : sequence of float, optional
        Of each one the moment, in its own seconds, that is to lie above those of the others.
    args : sequence of mapping, optional
        Of each one what else its slices say, by the task's place in the timeline.

    Raises
    ------
    GraphError
        If tasks of a lane overlap in a simulation. In a measured run the clock's noise may
        make them: there a slice begins where the one before it ended.
    InvalidInput
        If there is no timeline, or no file may be at ``path``.
    MachineError
        If the machine cannot write it, as where the disk is full.
    """
    if not timelines:
        raise InvalidInput("a trace needs a timeline, and none was given")
    events: list[dict[str, Any]] = []
    others = []
    late_ns = _late_ns(timelines, align_s)
    first_tid = first_flow = 1
    for pid, timeline in enumerate(timelines, start=1):
        at = pid - 1
        process = _Process(
            timeline,
            pid,
            first_tid,
            name=f"{SOURCES[timeline.source]}: {timeline.name}" if names is None else names[at],
            late_ns=late_ns[at],
            args={} if args is None else args[at],
        )
        slices, flows = process.slices(), process.flows(first_flow)
        events += [*process.names(), *slices, *flows]
        others.append({"source": timeline.source, **timeline.meta})
        # Viewers tell threads and arrows apart by their numbers over the whole trace.
        first_tid += len(timeline.by_lane)
        first_flow += len(flows) // 2
    other = others[0] if len(others) == 1 else {"timelines": others}
    trace = {"traceEvents": events, "displayTimeUnit": "ms", "otherData": other}
    write_json(path, trace, "the trace", default=str)


class _Process:
    """The events of one timeline."""

    def __init__(
        self,
        timeline: Timeline,
        pid: int,
        first_tid: int,
        *,
        name: str,
        late_ns: int,
        args: Mapping[int, Mapping[str, Any]],
    ) -> None:
        self.timeline, self.pid, self.first_tid = timeline, pid, first_tid
        self.name, self.late_ns, self.args = name, late_ns, args
        self.spans, self.tids = _spans_ns(timeline, first_tid)

    def names(self) -> list[dict[str, Any]]:
        timeline = self.timeline
        events = [
            self._meta("process_name", 0, name=self.name),
            self._meta("process_sort_index", 0, sort_index=self.pid),
        ]
        for tid, lane in enumerate(timeline.by_lane, start=self.first_tid):
            events.append(self._meta("thread_name", tid, name=lane.value))
            events.append(self._meta("thread_sort_index", tid, sort_index=tid))
        return events

    def _meta(self, kind: str, tid: int, **args: Any) -> dict[str, Any]:
        return {"ph": "M", "name": kind, "pid": self.pid, "tid": tid, "args": args}

    def slices(self) -> list[dict[str, Any]]:
        timeline, spans, tids = self.timeline, self.spans, self.tids
        events = []
        for i in sorted(range(len(spans)), key=lambda i: (spans[i][0], tids[i], spans[i][1])):
            begin, end = spans[i]
            events.append(
                {
                    "ph": "X",
                    "name": _label(timeline, i),
                    "cat": timeline.ids[i].op,
                    "pid": self.pid,
                    "tid": tids[i],
                    "ts": (begin + self.late_ns) / 1000,
                    "dur": (end - begin) / 1000,
                    "args": {**_args(timeline, i), **self.args.get(i, {})},
                }
            )
        return events

    def flows(self, number: int) -> list[dict[str, Any]]:
        """A pair of events for each arrow; the first gets ``number``."""
        timeline, spans, tids = self.timeline, self.spans, self.tids
        events = []
        for i, task_id in enumerate(timeline.ids):
            sources = {
                timeline.row[e.src]: e.reason.buffer
                for e in timeline.waits_for(task_id)
                if e.reason.kind is EdgeKind.DATA
            }
            for j, buffer in sources.items():
                if tids[j] == tids[i]:
                    continue
                common = {"name": buffer or "data", "cat": "DATA", "id": number, "pid": self.pid}
                number += 1
                # An arrow leaves from inside its slice, or the viewer finds no slice to tie it to.
                leaves = max(spans[j][0], min(spans[j][1] - 1, spans[i][0]))
                arrives = max(spans[i][0], leaves)
                leaves_us, arrives_us = ((t + self.late_ns) / 1000 for t in (leaves, arrives))
                start = {"ph": "s", "tid": tids[j], "ts": leaves_us, **common}
                finish = {"ph": "f", "bp": "e", "tid": tids[i], "ts": arrives_us, **common}
                events += [start, finish]
        return events


def _late_ns(timelines: Sequence[Timeline], align_s: Sequence[float] | None) -> list[int]:
    """How much later than 0 each timeline begins, whole nanoseconds; the earliest at 0."""
    if align_s is None:
        return [0] * len(timelines)
    begin_s = [float(t.start_s.min()) if len(t) else 0.0 for t in timelines]
    after_s = [at - begin for at, begin in zip(align_s, begin_s, strict=True)]
    return [round((max(after_s) - s) * 1e9) for s in after_s]


def _spans_ns(timeline: Timeline, first_tid: int) -> tuple[list[tuple[int, int]], list[int]]:
    """Begin and end of each task in whole nanoseconds, and its thread."""
    spans = [(0, 0)] * len(timeline)
    tids = [0] * len(timeline)
    zero = float(timeline.start_s.min()) if len(timeline) else 0.0
    for tid, members in enumerate(timeline.by_lane.values(), start=first_tid):
        until = 0
        for i in members:
            begin = round((timeline.start_s[i] - zero) * 1e9)
            end = round((timeline.end_s[i] - zero) * 1e9)
            if begin < until and timeline.source == "simulated":
                raise GraphError(f"{timeline.ids[i]} starts before the task ahead of it ended")
            begin = max(begin, until)
            until = max(begin, end)
            spans[i], tids[i] = (begin, until), tid
    return spans, tids


def _label(timeline: Timeline, i: int) -> str:
    task_id = timeline.ids[i]
    parts = [task_id.op]
    for name, value in (("L", task_id.layer), ("m", task_id.microbatch), ("e", task_id.expert)):
        if value >= 0:
            parts.append(f"{name}{value}")
    return " ".join(parts)


def _args(timeline: Timeline, i: int) -> dict[str, Any]:
    task_id, work = timeline.ids[i], timeline.work_done[i]
    args: dict[str, Any] = {k: v for k, v in task_id._asdict().items() if v != -1}
    if any(e.reason.kind is EdgeKind.DATA for e in timeline.waits_for(task_id)):
        # A copy of weights has no inputs: it would seem to wait since the run began.
        args["wait_us"] = float(timeline.start_s[i] - timeline.ready_s[i]) * 1e6
    args["provenance"] = timeline.provenance[i]
    if work is not None:
        args |= {name: value for name in _WORK if (value := getattr(work, name))}
    if timeline.tokens_actual[i] == timeline.tokens_actual[i]:
        args["tokens_actual"] = float(timeline.tokens_actual[i])
    return args
