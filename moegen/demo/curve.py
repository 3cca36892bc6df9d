"""Decode throughput over ω at the settings of a run: predicted, and measured at some points."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import moegen as mg
from moegen.errors import Infeasible
from moegen.sim.bounds import bound

if TYPE_CHECKING:
    import pandas as pd

PREDICTED = tuple(i / 20 for i in range(21))
MEASURED = (0.0, 0.25, 0.5, 0.75, 1.0)
# Of those simulated or run at each point: the first finds nothing prefetched, the last has none
# after it, and those between count.
STEPS = 4


def over_omega(
    engine: mg.Engine,
    plan: mg.Plan,
    work: mg.Workload,
    lengths: Sequence[int],
) -> pd.DataFrame:
    """One row a point and clock.

    Parameters
    ----------
    engine : Engine
        Runs the measured points, on made-up rows.
    plan : Plan
        Of the run; ω of its decode strategy takes other values here.
    work : Workload
        What must fit memory by the plan. Values of ω by which it does not are left out.
    lengths : sequence of int, shape [rows]
        Tokens that each row has in its KV.

    Returns
    -------
    DataFrame
        ``omega``; ``source``, "predicted" or "measured"; ``decode_tokens_per_s``;
        ``period_s`` of a step; ``bound_s``, what no schedule can beat, and what ``binds`` there.
    """
    import pandas as pd

    cost = mg.CostModel.roofline(engine.hardware)
    rows: list[dict[str, Any]] = []

    def add(omega: float, source: str, timeline: mg.Timeline, graph: mg.TaskGraph) -> None:
        limit = bound(graph, cost)
        rows.append(
            {
                "omega": omega,
                "source": source,
                "decode_tokens_per_s": len(lengths) / timeline.period_s,
                "period_s": timeline.period_s,
                "bound_s": limit.seconds,
                "binds": limit.binds,
            }
        )

    for omega in sorted({*PREDICTED, *MEASURED, plan.decode.omega}):
        s = plan.decode.with_(omega=omega)
        try:
            engine.prepared.with_plan(replace(plan, decode=s)).resolve(work)
        except Infeasible:
            continue
        graph = mg.build(engine.model, s.with_(B=len(lengths)), "decode", lengths=list(lengths))
        add(omega, "predicted", mg.simulate(graph, cost, steps=STEPS), graph)
        if omega in (*MEASURED, plan.decode.omega):
            add(omega, "measured", engine.execute(graph, steps=STEPS), graph)
    return pd.DataFrame(rows)
