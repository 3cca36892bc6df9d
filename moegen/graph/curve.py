"""A measured curve: seconds over a grid of what an op's time depends on."""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, get_args

import numpy as np

from moegen.errors import InvalidInput
from moegen.graph.checks import number
from moegen.graph.features import FEATURES_OF
from moegen.graph.layer import Phase

# Two means of the same numbers may differ by so much of them.
_ROUNDING = 1e-9


@dataclass(frozen=True)
class Curve:
    """Seconds of some ops over a grid of their features.

    Parameters
    ----------
    ops : sequence of str
        Ops that it is of, all with the same features.
    axes : mapping of str to sequence of float
        The values of each feature that were measured, rising; in the order of
        `moegen.graph.features.FEATURES_OF`.
    seconds : nested sequence of float, shape [values of the first axis, of the second, ...]
        Of one kernel or copy; of all that the op launches where ``launches`` is an axis.
    source : str
        How it was measured.
    phase : {"prefill", "decode"}, optional
        The one that it is of; both unless given.
    spread : nested sequence of float, shape as seconds, optional
        Relative standard deviation of the repeated measurements of each point.
    issue_s : nested sequence of float, shape as seconds, optional
        What the executor's issuing thread, warm, takes for one kernel or copy; for all that the
        op launches where ``launches`` is an axis.
    turn_s : nested sequence of float, shape as seconds, optional
        What it takes before, for a task: putting waits before it, binding its step.
    more_s : float, optional
        What the issuing thread takes for each kernel or copy of a task beyond the first; as much
        as for that unless given.
    once_s : float, optional
        Of ``seconds``, what a task does once, however many kernels it launches; 0 unless given.
    beside_copies : nested sequence of float, shape as seconds, optional
        Seconds of one kernel while weights are copied all the time, where that slows it.
    crowded : nested sequence of float, shape as seconds, optional
        Seconds of one kernel while zero-copy kernels are at work beside it all the time, be it
        that they read or write host memory, and however little of the link they use. Several
        kernels of a task wait for either once.

    Raises
    ------
    InvalidInput
        If ops, features or the phase are not known, axes are in another order, a number is not
        finite and positive (a spread, issue_s, turn_s: not negative), an axis does not rise,
        seconds fall along the first one, once_s is above the least of them, or seconds beside
        others are below them.
    """

    ops: tuple[str, ...]
    axes: Mapping[str, tuple[float, ...]]
    seconds: tuple[Any, ...]
    source: str
    phase: Phase | None = None
    spread: tuple[Any, ...] | None = None
    issue_s: tuple[Any, ...] | None = None
    turn_s: tuple[Any, ...] | None = None
    more_s: float | None = None
    once_s: float | None = None
    beside_copies: tuple[Any, ...] | None = None
    crowded: tuple[Any, ...] | None = None

    def __post_init__(self) -> None:
        ops = tuple(self.ops) if isinstance(self.ops, (list, tuple)) else ()
        if not ops or not all(isinstance(op, str) for op in ops):
            raise InvalidInput(f"a curve must name its ops in a list, got {self.ops!r}")
        unknown = [op for op in ops if op not in FEATURES_OF]
        if unknown:
            raise InvalidInput(f"unknown op {unknown[0]!r}; known are {', '.join(FEATURES_OF)}")
        name, features = ops[0], FEATURES_OF[ops[0]]
        other = [op for op in ops if FEATURES_OF[op] != features]
        if other:
            raise InvalidInput(
                f"{name} and {other[0]} cannot share a curve: the one depends on "
                f"{', '.join(features)}, the other on {', '.join(FEATURES_OF[other[0]])}"
            )
        if not isinstance(self.axes, Mapping) or set(self.axes) != set(features):
            raise InvalidInput(
                f"{name}: axes must be {', '.join(features)}, got "
                f"{', '.join(self.axes) if isinstance(self.axes, Mapping) else self.axes!r}"
            )
        if tuple(self.axes) != features:
            raise InvalidInput(
                f"{name}: axes must be in the order {', '.join(features)}, as seconds and all "
                f"else by point are read, got {', '.join(self.axes)}"
            )
        if not isinstance(self.source, str) or not self.source:
            raise InvalidInput(f"{name}: source must say how it was measured, got {self.source!r}")
        if self.phase not in (None, *get_args(Phase)):
            raise InvalidInput(
                f"{name}: phase must be one of {', '.join(get_args(Phase))}, or left out if the "
                f"curve is of both, got {self.phase!r}"
            )
        axes = {key: _axis(self.axes[key], f"{name}: {key}") for key in features}
        shape = [len(values) for values in axes.values()]
        seconds = _grid(self.seconds, shape, f"{name}: seconds", above=0)
        for field, value in (("ops", ops), ("axes", axes), ("seconds", seconds)):
            object.__setattr__(self, field, value)
        for field in ("spread", "issue_s", "turn_s"):
            if (value := getattr(self, field)) is not None:
                value = _grid(value, shape, f"{name}: {field}", at_least=0)
                object.__setattr__(self, field, value)
        for field in ("beside_copies", "crowded"):
            if (value := getattr(self, field)) is not None:
                value = _grid(value, shape, f"{name}: {field}", above=0)
                object.__setattr__(self, field, value)
        for field in ("more_s", "once_s"):
            if (value := getattr(self, field)) is not None:
                value = number(value, f"{name}: {field}", at_least=0)
                object.__setattr__(self, field, value)
        least_s = float(np.min(seconds))
        if self.once_s is not None and self.once_s > least_s:
            raise InvalidInput(
                f"{name}: once_s is {self.once_s:g}, and is part of the seconds, of which the "
                f"least are {least_s:g}"
            )
        self._check_rising()
        self._check_slower(self.beside_copies, "beside copies")
        self._check_slower(self.crowded, "crowded")

    def _check_rising(self) -> None:
        # More of the same takes no less. Other features may: many short prompts, say, take longer
        # than few long ones of as many tokens.
        feature = next(iter(self.axes))
        values = np.array(self.seconds)
        falls = np.argwhere(np.diff(values, axis=0) < 0)
        if len(falls):
            at = falls[0].tolist()
            after = [at[0] + 1, *at[1:]]
            raise InvalidInput(
                f"{self.describe(after)}: {values[tuple(after)]:g} s, less than the "
                f"{values[tuple(at)]:g} s at a smaller {feature}: seconds must not fall along it"
            )

    def _check_slower(self, beside: Any, how: str) -> None:
        if beside is None:
            return
        alone, slower = np.array(self.seconds), np.array(beside)
        less = np.argwhere(slower < alone * (1.0 - _ROUNDING))
        if len(less):
            at = less[0].tolist()
            raise InvalidInput(
                f"{self.describe(at)}: {slower[tuple(at)]:g} s {how}, less than the "
                f"{alone[tuple(at)]:g} s alone: nothing is faster for what is at work beside it"
            )

    def describe(self, index: Sequence[int]) -> str:
        """A point of the grid, for a person."""
        at = ", ".join(
            f"{key}={values[i]:g}"
            for (key, values), i in zip(self.axes.items(), index, strict=True)
        )
        return f"{self.ops[0]} at {at}"

    def points(self) -> Iterator[tuple[tuple[int, ...], dict[str, float], float]]:
        """Each point's place in the grid, its features and its seconds."""
        for index in itertools.product(*(range(len(v)) for v in self.axes.values())):
            at = {k: v[i] for (k, v), i in zip(self.axes.items(), index, strict=True)}
            seconds: Any = self.seconds
            for i in index:
                seconds = seconds[i]
            yield index, at, seconds


def _axis(values: Any, where: str) -> tuple[float, ...]:
    if not isinstance(values, (list, tuple)) or not values:
        raise InvalidInput(f"{where} must be a list of numbers, got {values!r}")
    axis = tuple(number(v, f"{where}[{i}]", above=0) for i, v in enumerate(values))
    for i, (a, b) in enumerate(itertools.pairwise(axis)):
        if a >= b:
            raise InvalidInput(f"{where} must rise, and [{i + 1}] is {b:g} after {a:g}")
    return axis


def _grid(values: Any, shape: Sequence[int], where: str, **limit: float) -> tuple[Any, ...]:
    if not isinstance(values, (list, tuple)) or len(values) != shape[0]:
        got = f"{len(values)}" if isinstance(values, (list, tuple)) else repr(values)
        raise InvalidInput(f"{where} must have {shape[0]} entries, as its axis has, got {got}")
    if len(shape) == 1:
        return tuple(number(v, f"{where}[{i}]", **limit) for i, v in enumerate(values))
    return tuple(_grid(v, shape[1:], f"{where}[{i}]", **limit) for i, v in enumerate(values))
