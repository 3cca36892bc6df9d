"""Timelines as JSON."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import numpy as np

from moegen.errors import InvalidInput, MoegenError
from moegen.graph.io import from_dict as graph_from_dict
from moegen.graph.io import read_task_id
from moegen.graph.task import TaskGraph
from moegen.timeline import Timeline

if TYPE_CHECKING:
    from moegen.sim.recorded import Recorded

FORMAT = "moegen.timeline/1"


def to_dict(timeline: Timeline) -> dict[str, Any]:
    """Plain data, the graph included; and what tasks cost, of a simulated run."""
    data: dict[str, Any] = {
        "format": FORMAT,
        "source": timeline.source,
        "meta": timeline.meta,
        "graph": timeline.graph.to_dict(),
        "ids": [list(i) for i in timeline.ids],
        "start_s": timeline.start_s.tolist(),
        "end_s": timeline.end_s.tolist(),
        "ready_s": timeline.ready_s.tolist(),
        "tokens_actual": [None if np.isnan(x) else float(x) for x in timeline.tokens_actual],
        "provenance": list(timeline.provenance),
    }
    if timeline.cost is not None:
        data["cost"] = timeline.cost.to_dict()
    return data


def from_dict(data: Mapping[str, Any]) -> Timeline:
    """Inverse of :func:`to_dict`.

    Raises
    ------
    InvalidInput
        If the data are not a timeline, or are damaged.
    """
    if not isinstance(data, Mapping) or data.get("format") != FORMAT:
        raise InvalidInput(f"not a timeline: its format is not {FORMAT!r}")
    try:
        graph, cost = graph_from_dict(data["graph"]), data.get("cost")
        timeline = Timeline(
            graph,
            [read_task_id(i) for i in data["ids"]],
            data["start_s"],
            data["end_s"],
            data["ready_s"],
            source=data["source"],
            tokens_actual=[np.nan if x is None else x for x in data["tokens_actual"]],
            provenance=data["provenance"],
            meta=data["meta"],
            cost=None if cost is None else _recorded(graph, cost),
        )
        if timeline.shapes and len(timeline.shapes) != len(timeline.steps):
            raise InvalidInput(
                f"it has {len(timeline.shapes)} shapes for {len(timeline.steps)} steps"
            )
    except MoegenError as e:
        raise InvalidInput(f"the timeline is damaged: {e}") from e
    except (KeyError, TypeError, ValueError, AttributeError) as e:
        raise InvalidInput(f"the timeline is damaged: {type(e).__name__}: {e}") from e
    return timeline


def _recorded(graph: TaskGraph, data: Any) -> Recorded:
    # Here alone: this module is loaded where the simulator is not (see pyproject.toml).
    from moegen.sim.recorded import Recorded

    return Recorded.from_dict(graph, data)
