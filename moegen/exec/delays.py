"""Delays that a caller gives: refused by name where they are none."""

from __future__ import annotations

import math
from typing import Any, Protocol

from moegen.errors import InvalidInput
from moegen.graph.checks import number
from moegen.graph.task import Task


class Delays(Protocol):
    """Seconds by which a task is held back: before it is issued, or on its lane before it runs.

    On its lane it holds back what is behind it too, and neither the issuing thread nor others.
    """

    def issue_s(self, task: Task, index: int) -> float: ...
    def run_s(self, task: Task, index: int) -> float: ...


class Checked:
    """The same delays; one that is not finite, or below 0, ends the run.

    Raises
    ------
    InvalidInput
        If ``delays`` has not the two functions; from these, if what they give is no time.
    """

    def __init__(self, delays: Delays) -> None:
        for name in ("issue_s", "run_s"):
            if not callable(getattr(delays, name, None)):
                raise InvalidInput(
                    f"delays must have issue_s(task, index) and run_s(task, index), which give "
                    f"seconds, got {delays!r}"
                )
        self._of = delays

    def issue_s(self, task: Task, index: int) -> float:
        return _seconds(self._of.issue_s(task, index), "before it is issued", task, index)

    def run_s(self, task: Task, index: int) -> float:
        return _seconds(self._of.run_s(task, index), "on its lane", task, index)


def _seconds(given: Any, where: str, task: Task, index: int) -> float:
    # The issuing thread has no time for words that nobody reads.
    if type(given) is float and 0.0 <= given < math.inf:
        return given
    what = f"the delay of {task.id} in step {index}, in seconds {where},"
    return number(given, what, at_least=0)
