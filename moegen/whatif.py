"""what_if(): a measured run with one part changed, its durations otherwise as they were."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from moegen.errors import Infeasible, InvalidInput, MoegenError
from moegen.graph.hardware import HardwareSpec
from moegen.graph.memory import Ledger
from moegen.graph.run_memory import run_ledger
from moegen.graph.shape import Shape
from moegen.graph.task import TaskGraph
from moegen.sim.changes import Change
from moegen.sim.corrected import FAR, correct
from moegen.sim.cost import CostModel
from moegen.sim.other_machine import OtherMachine, machine_of
from moegen.sim.rebuilt import rebuilt
from moegen.sim.rerun import measured_run, rerun
from moegen.sim.scaled import OpTimes
from moegen.timeline import Timeline
from moegen.units import format_seconds

if TYPE_CHECKING:
    import pandas as pd

#: A difference that is said in whole percents is left out below this.
_SHOWN = 0.005


@dataclass(frozen=True)
class WhatIf:
    """What a change would do to a measured run; see :func:`what_if`.

    Attributes
    ----------
    question : str
        What is changed.
    base_s : float
        The period that the cost model predicts for the run as it was, with its durations.
    period_s : float
        The same with the change.
    measured_s : float
        The run's own period: what is left between it and ``base_s`` is time between tasks
        that the graph does not explain, and that no answer has in it.
    base_tokens, tokens : float
        New tokens of a step, in the mean, before and after.
    predicted : Timeline
        The simulation with the change.
    ledger : Ledger or None
        Of changed knobs: what the run's rows would put into the memory of the cost model's
        machine, each row as long as in these steps. None where no knob is changed, or the cost
        model is of no machine.
    misfit : str
        Which memory that does not fit, and by how much; empty where it fits or there is no
        ledger.
    doubt : str
        Which operations the run as simulated does not have as they were measured, where that is
        so much that the answer is not to be trusted; else empty.
    """

    question: str
    base_s: float
    period_s: float
    measured_s: float
    base_tokens: float
    tokens: float
    predicted: Timeline
    ledger: Ledger | None = None
    misfit: str = ""
    doubt: str = ""

    @property
    def change(self) -> float:
        """By which part of itself the period changes: -0.2 where it is a fifth shorter."""
        return self.period_s / self.base_s - 1 if self.base_s else 0.0

    @property
    def gain(self) -> float:
        """By which part of itself tokens a second rise: 0.25 where the period is a fifth less.

        Infinite where nothing takes time any more.
        """
        if not self.period_s:
            return math.inf if self.base_s else 0.0
        if not self.base_tokens:
            return self.base_s / self.period_s - 1
        return self.tokens / self.base_tokens * self.base_s / self.period_s - 1

    @property
    def answer(self) -> str:
        """What changes by how much, and whether it is in doubt or does not fit, in a few words."""
        said = self._changes + ("; in doubt" if self.doubt else "")
        return said + ("; does not fit" if self.misfit else "")

    @property
    def _changes(self) -> str:
        if math.isinf(self.gain):
            return "no time at all"
        return f"{_percent(self.change)} time, {_percent(self.gain)} tokens/s"

    def __str__(self) -> str:
        before, after = format_seconds(self.base_s), format_seconds(self.period_s)
        said = f"{self.question}: {before} -> {after} a step, {self._changes}"
        if abs(off := _off(self.base_s, self.measured_s)) >= _SHOWN:
            said += f"; measured {format_seconds(self.measured_s)}, replayed {before}, {off:+.0%}"
        if self.doubt:
            said += f"; not to be trusted: {self.doubt}"
        return f"{said}; {self.misfit}" if self.misfit else said

    def __repr__(self) -> str:
        return f"<WhatIf {self}>"


def what_if(measured: Timeline, cost: CostModel, **change: Any) -> WhatIf:
    """A measured run with a part changed: what its step would take.

    The cost model is corrected by the run (:meth:`CostModel.corrected`), so that durations are
    the measured ones in the mean, and the run is simulated with and without the change. Durations
    of tasks that a changed rate touches scale as the roofline says, others stay.

    Parameters
    ----------
    measured : Timeline
        Of a run; each step counts with the lengths and the routing that it had.
    cost : CostModel
        Of the machine that the run was on.
    **change
        What is changed, all of it together:

        - a knob of `Strategy`, as a value or relative to what it was: ``omega="+0.1"``,
          ``kv_slots=4``, ``B="x2"``, ``s_expert="+2GiB"``;
        - a rate of `HardwareSpec`: ``cpu_attn_bytes_per_s="x1.5"``, ``launch_s=1e-6``;
          ``link="x2"`` for all rates of the link;
        - ``op={"expert": 0.5}``: an op's durations times a factor.

    Returns
    -------
    WhatIf
        ``print`` it for a sentence. It says how far the run as simulated is from the run as
        measured, where that is half a percent or more, and of knobs whether they fit the memory
        of the cost model's machine: the answer stands, for a machine that has enough.

    Raises
    ------
    InvalidInput
        If a name is unknown, a value out of range, or a rate changed twice (``link`` is all of
        the link's); the timeline was not measured; a knob is changed and its graph is of no model
        or is unrolled; a rate, and the cost model is of no machine; an op, and the run has none.

    Warns
    -----
    UserWarning
        If operations take in the run as simulated not what they took as it was measured, and
        lanes are off by more than 6% of a step for that: the answer is not to be trusted.
    """
    return _Run(measured, cost).ask(change)


def what_ifs(
    measured: Timeline, cost: CostModel, changes: Sequence[Mapping[str, Any]]
) -> pd.DataFrame:
    """Several questions about one measured run, the one that gains most first.

    Parameters
    ----------
    measured, cost
        As for :func:`what_if`.
    changes : sequence of mapping
        A question each: ``[{"link": "x2"}, {"omega": "+0.1", "kv_slots": "+2"}]``.

    Returns
    -------
    DataFrame
        One row a question: ``question``; ``gain``, by which part of itself tokens a second rise,
        and ``change``, by which part of itself the time of a step does; ``period_s``,
        ``tokens_per_s``, ``base_s``, ``measured_s``; ``misfit``, which says what memory it does
        not fit; ``doubt``, which says why answers of this run are not to be trusted; ``error``,
        which says why a question has no answer, its numbers are NaN then; and ``answer``, as
        `WhatIf.answer` has it, or the error.
        :func:`moegen.plot.what_ifs` draws it. pandas leaves out columns that a terminal is too
        narrow for: print some, ``df[["question", "answer"]]``, or ``df.to_string()``.

    Raises
    ------
    InvalidInput
        If there is no question, or one names what is neither a knob, a rate nor ``op``. (An
        operation that the run has none of is the ``error`` of its question.)
    """
    import pandas as pd

    if (
        isinstance(changes, str)
        or not isinstance(changes, Sequence)
        or not all(isinstance(c, Mapping) for c in changes)
    ):
        raise InvalidInput(
            f'changes must be a list of mappings, [{{"link": "x2"}}], got {changes!r}'
        )
    if not changes:
        raise InvalidInput('there is no question: give at least one, [{"link": "x2"}]')
    for change in changes:
        Change.of(change)
    run = _Run(measured, cost)
    rows = []
    for change in changes:
        row = {"question": ", ".join(f"{k} {v}" for k, v in change.items())}
        row |= {"misfit": "", "doubt": run.doubt, "error": ""}
        row |= {"base_s": run.base_s, "measured_s": measured.period_s}
        try:
            told = run.ask(change)
        except MoegenError as e:
            row |= {"error": str(e), "answer": str(e)}
        else:
            row |= {"question": told.question, "answer": told.answer, "period_s": told.period_s}
            row |= {"change": told.change, "gain": told.gain, "misfit": told.misfit}
            if told.tokens and told.period_s:
                row["tokens_per_s"] = told.tokens / told.period_s
        rows.append(row)
    # A terminal that is too narrow shows the first and the last.
    columns = ["question", "gain", "change", "period_s", "tokens_per_s", "base_s", "measured_s"]
    frame = pd.DataFrame(rows, columns=[*columns, "misfit", "doubt", "error", "answer"])
    return frame.sort_values("gain", ascending=False, kind="stable", ignore_index=True)


class _Run:
    """A measured run, and the cost model that has its durations."""

    def __init__(self, measured: Timeline, cost: CostModel) -> None:
        self.measured = measured_run(measured)
        self.cost = correct(cost, measured)
        self.steps = len(measured.steps)
        self.base_s = rerun(measured.graph, measured.shapes, self.steps, self.cost).period_s
        self.doubt = self.cost.doubt
        if not self.doubt and abs(off := _off(self.base_s, measured.period_s)) > FAR:
            how = f"{abs(off):.0%} {'less' if off < 0 else 'more'}"
            self.doubt = f"replayed, a step takes {how} than it did, which no answer has in it"

    def ask(self, asked: Mapping[str, Any]) -> WhatIf:
        change, g = Change.of(asked), self.measured.graph
        ops = {t.id.op for t in g}
        if absent := [op for op in change.ops if op not in ops]:
            there = ", ".join(dict.fromkeys(t.id.op for t in g))
            raise InvalidInput(f"the run has no op {absent[0]!r}; it has {there}")
        cost: CostModel = self.cost
        hw: HardwareSpec | None = None
        if change.rates:
            hw = machine_of(cost)
            cost = OtherMachine(cost, change.machine(hw))
        if change.ops:
            cost = OpTimes(cost, change.ops)
        shapes = self.measured.shapes
        ledger, misfit = None, ""
        if change.knobs:
            g, shapes = rebuilt(g, shapes, change.strategy)
            ledger, misfit = self._room(g, shapes)
        predicted = rerun(g, shapes, self.steps, cost)
        return WhatIf(
            question=change.words(self.measured.graph.strategy, hw),
            base_s=self.base_s,
            period_s=predicted.period_s,
            measured_s=self.measured.period_s,
            base_tokens=_tokens(self.measured.graph, self.measured.shapes),
            tokens=_tokens(g, shapes),
            predicted=predicted,
            ledger=ledger,
            misfit=misfit,
            doubt=self.doubt,
        )

    def _room(self, g: TaskGraph, shapes: Sequence[Shape]) -> tuple[Ledger | None, str]:
        """What changed knobs put into memory, and in words what does not fit."""
        try:
            hw = machine_of(self.cost)
        except InvalidInput:  # durations given by hand: nobody knows what memory there is
            return None, ""
        ledger = run_ledger(g, shapes, hw)
        misfit = _misfit(ledger)
        if misfit and _misfit(run_ledger(self.measured.graph, self.measured.shapes, hw)):
            misfit += f" (by {hw.name}'s memory the run as it was does not fit either)"
        return ledger, misfit


def _misfit(ledger: Ledger | None) -> str:
    try:
        if ledger is not None:
            ledger.require()
    except Infeasible as error:
        return str(error).partition(";")[0]
    return ""


def _percent(part: float) -> str:
    """With a sign, but for what rounds to none."""
    return f"{part:+.0%}".replace("-0%", "+0%")


def _off(replayed_s: float, measured_s: float) -> float:
    """By which part of the measured period the replayed one is longer."""
    return replayed_s / measured_s - 1 if measured_s else 0.0


def _tokens(g: TaskGraph, shapes: Sequence[Shape]) -> float:
    shapes = shapes or ([g.shape] if g.shape is not None else [])
    return sum(shape.tokens for shape in shapes) / len(shapes) if shapes else 0.0
