"""A Timeline as a chrome trace, for ui.perfetto.dev and chrome://tracing."""

from __future__ import annotations

from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any

from moegen.errors import GraphError
from moegen.graph.files import write_json
from moegen.graph.task import EdgeKind

if TYPE_CHECKING:
    from moegen.timeline import Timeline

_PID = 1


def write_perfetto(timeline: Timeline, path: str | Path) -> None:
    """Write ``timeline`` to ``path``: a thread a lane, an arrow a DATA edge between lanes.

    Times are whole nanoseconds after the start of the first task, so that slices which touch
    do not overlap by rounding: two that overlap on one thread would hide each other.

    Raises
    ------
    GraphError
        If tasks of a lane overlap in a simulation. In a measured run the clock's noise may
        make them: there a slice begins where the one before it ended.
    InvalidInput
        If the file cannot be written.
    """
    trace = {
        "traceEvents": [*_names(timeline), *_slices_and_flows(timeline)],
        "displayTimeUnit": "ms",
        "otherData": {"source": timeline.source, **timeline.meta},
    }
    write_json(path, trace, "the trace", default=str)


def _names(timeline: Timeline) -> list[dict[str, Any]]:
    model = timeline.graph.model
    title = f"{model.name if model is not None else 'moegen'} {timeline.graph.phase}"
    events = [_meta("process_name", 0, name=f"{title} ({timeline.source})")]
    for tid, lane in enumerate(timeline.by_lane, start=1):
        events.append(_meta("thread_name", tid, name=lane.value))
        events.append(_meta("thread_sort_index", tid, sort_index=tid))
    return events


def _meta(kind: str, tid: int, **args: Any) -> dict[str, Any]:
    return {"ph": "M", "name": kind, "pid": _PID, "tid": tid, "args": args}


def _slices_and_flows(timeline: Timeline) -> list[dict[str, Any]]:
    spans, tids = _spans_ns(timeline)
    events = []
    for i in sorted(range(len(spans)), key=lambda i: (spans[i][0], tids[i], spans[i][1])):
        begin, end = spans[i]
        events.append(
            {
                "ph": "X",
                "name": _label(timeline, i),
                "cat": timeline.ids[i].op,
                "pid": _PID,
                "tid": tids[i],
                "ts": begin / 1000,
                "dur": (end - begin) / 1000,
                "args": _args(timeline, i),
            }
        )
    number = 0
    for i, task_id in enumerate(timeline.ids):
        sources = {
            timeline.row[e.src]: e.reason.buffer
            for e in timeline.waits_for(task_id)
            if e.reason.kind is EdgeKind.DATA
        }
        for j, buffer in sources.items():
            if tids[j] == tids[i]:
                continue
            number += 1
            arrives = spans[i][0]
            # An arrow leaves from inside its slice, or the viewer finds no slice to tie it to.
            leaves = max(spans[j][0], min(spans[j][1] - 1, arrives))
            common = {"name": buffer or "data", "cat": "DATA", "id": number, "pid": _PID}
            events.append({"ph": "s", "tid": tids[j], "ts": leaves / 1000, **common})
            arrives = max(arrives, leaves)
            events.append({"ph": "f", "bp": "e", "tid": tids[i], "ts": arrives / 1000, **common})
    return events


def _spans_ns(timeline: Timeline) -> tuple[list[tuple[int, int]], list[int]]:
    """Begin and end of each task in whole nanoseconds, and its thread."""
    spans = [(0, 0)] * len(timeline)
    tids = [0] * len(timeline)
    zero = float(timeline.start_s.min()) if len(timeline) else 0.0
    for tid, members in enumerate(timeline.by_lane.values(), start=1):
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
    task_id, work = timeline.ids[i], timeline.tasks[i].work
    args: dict[str, Any] = {k: v for k, v in task_id._asdict().items() if v != -1}
    if any(e.reason.kind is EdgeKind.DATA for e in timeline.waits_for(task_id)):
        # A copy of weights has no inputs: it would seem to wait since the run began.
        args["wait_us"] = float(timeline.start_s[i] - timeline.ready_s[i]) * 1e6
    args["provenance"] = timeline.provenance[i]
    if work is not None:
        args |= {name: value for name, value in asdict(work).items() if value}
    if timeline.tokens_actual[i] == timeline.tokens_actual[i]:
        args["tokens_actual"] = float(timeline.tokens_actual[i])
    return args
