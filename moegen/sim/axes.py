"""The axes of a sweep: what may be swept, which values are refused, and the points of the grid."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from itertools import product
from typing import Any

import numpy as np

from moegen.errors import InvalidInput
from moegen.graph.build import SCHEDULES
from moegen.graph.checks import MOST, whole
from moegen.graph.hardware import HardwareSpec
from moegen.graph.hardware import field_names as hardware_fields
from moegen.graph.model import ModelSpec
from moegen.graph.strategy import Strategy
from moegen.graph.workload import Workload
from moegen.sim.cost import CostModel
from moegen.sim.roofline import Roofline

STRATEGY = tuple(f.name for f in dataclasses.fields(Strategy))
WORK = ("n", "prompt_len", "gen_len")
# Names and a curve are no numbers: they are swept with the machine that has them.
_NOT_SWEPT = {"name", "gpu_name", "cpu_name", "gpu_efficiency"}
_BY_NAME: dict[str, tuple[type, Callable[[str], Any]]] = {
    "model": (ModelSpec, ModelSpec.from_pretrained),
    "hw": (HardwareSpec, HardwareSpec.from_name),
    "work": (Workload, Workload.preset),
}


@dataclass(frozen=True)
class Axis:
    """A parameter, its values, and what each is called in the frame.

    ``of`` says whose it is: "strategy", "hardware" or "work" for one of their fields, "object" for
    a whole one.
    """

    name: str
    of: str
    values: tuple[Any, ...]
    shown: tuple[Any, ...]


@dataclass(frozen=True)
class Point:
    """What is planned at a point of the grid, and what it is called in the frame."""

    shown: Mapping[str, Any]
    model: ModelSpec
    hw: HardwareSpec
    work: Workload
    cost: CostModel | None
    fixed: Mapping[str, Any]


def axes_of(given: Mapping[str, Any], hw: Any) -> list[Axis]:
    """The axes that keyword arguments name, in their order; ``hw`` is what is not swept of it.

    Raises
    ------
    InvalidInput
        If there is none, a name is unknown, an axis is empty, or a value is out of range.
    """
    numbers = [name for name in hardware_fields() if name not in _NOT_SWEPT]
    groups = {
        "strategy": STRATEGY,
        "hardware": tuple(numbers),
        "work": WORK,
        "object": (*_BY_NAME, "schedule"),
    }
    known = {name: of for of, names in groups.items() for name in names}
    if not given:
        raise InvalidInput("nothing is swept: name a parameter and its values, omega=[0, 0.5, 1]")
    axes = []
    for name, value in given.items():
        if name not in known:
            listed = "; ".join(f"of {of}: {', '.join(names)}" for of, names in groups.items())
            raise InvalidInput(f"there is no parameter {name!r} to sweep; there are, {listed}")
        values = tuple(_listed(value))
        if not values:
            raise InvalidInput(f"{name} has no values: an empty axis leaves no point to plan")
        values = tuple(_checked(name, known[name], v, hw) for v in values)
        axes.append(Axis(name, known[name], values, tuple(_named(values))))
    return axes


def _listed(value: Any) -> Iterable[Any]:
    if isinstance(value, np.ndarray):
        return value.ravel().tolist()
    if isinstance(value, (str, bytes, Mapping)) or not isinstance(value, Iterable):
        return [value]
    return value


def _checked(name: str, of: str, value: Any, hw: Any) -> Any:
    """A value as whoever takes it keeps it; refused here, before anything is planned."""
    if hasattr(value, "item") and not isinstance(value, (Workload, ModelSpec, HardwareSpec)):
        value = value.item()  # numpy's numbers
    if of == "strategy":
        return getattr(Strategy(B=1, b_a=1, b_e=1).with_(**{name: value}), name)
    if of == "hardware":
        # Of the machine that is not swept, so that what contradicts its other numbers shows.
        machine = hw if isinstance(hw, HardwareSpec) else HardwareSpec.from_name("c2")
        return getattr(machine.with_(**{name: value}), name)
    if of == "work":
        return whole(value, name, at_least=1, at_most=MOST)
    if name == "schedule":
        if value not in SCHEDULES:
            raise InvalidInput(f"schedule {value!r} is not there; known: {', '.join(SCHEDULES)}")
        return value
    kind, by_name = _BY_NAME[name]
    if isinstance(value, str):
        return by_name(value)
    if not isinstance(value, kind):
        raise InvalidInput(f"{name} takes {kind.__name__}s, or their names, got {value!r}")
    return value


def _named(values: Iterable[Any]) -> Iterator[Any]:
    """Values as the frame shows them: objects by name, those of one name with a number."""
    seen: dict[str, int] = {}
    for value in values:
        name = getattr(value, "name", None)
        if name is None:
            yield value
            continue
        seen[name] = seen.get(name, 0) + 1
        yield name if seen[name] == 1 else f"{name} #{seen[name]}"


class Grid:
    """The product of axes over what is not swept.

    Parameters
    ----------
    model, hw, work
        May be None where the whole object is swept.
    cost : CostModel or callable or None
        See :func:`moegen.sim.sweep.sweep`.
    given : mapping
        The axes' names and values.
    """

    def __init__(self, model: Any, hw: Any, work: Any, cost: Any, given: Mapping[str, Any]) -> None:
        self.axes = axes_of(given, hw)
        self._base = {"model": model, "hw": hw, "work": work}
        for name, (kind, _) in _BY_NAME.items():
            value = self._base[name]
            if name not in given and not isinstance(value, kind):
                raise InvalidInput(
                    f"{name} must be a {kind.__name__}, got {value!r}; or sweep it, {name}=[...]"
                )
        self._cost = self._cost_of(cost)

    def points(self) -> list[Point]:
        """Every point; the last axis varies fastest."""
        made: dict[HardwareSpec, CostModel | None] = {}
        return [
            self._point(places, made)
            for places in product(*(range(len(axis.values)) for axis in self.axes))
        ]

    def _point(self, places: tuple[int, ...], made: dict[HardwareSpec, Any]) -> Point:
        of: dict[str, dict[str, Any]] = {"strategy": {}, "hardware": {}, "work": {}, "object": {}}
        shown: dict[str, Any] = {}
        for axis, i in zip(self.axes, places, strict=True):
            of[axis.of][axis.name] = axis.values[i]
            shown[axis.name] = axis.shown[i]
        whole_ = self._base | of["object"]
        hw, work = whole_["hw"], whole_["work"]
        if of["hardware"]:
            hw = hw.with_(**of["hardware"])
        if of["work"]:
            work = _with_lengths(work, **of["work"])
        if hw not in made:
            made[hw] = self._cost(hw)
        return Point(shown, whole_["model"], hw, work, made[hw], of["strategy"])

    def _cost_of(self, cost: Any) -> Any:
        """Makes the cost model of a point's machine; None stands for its roofline."""
        if cost is None:
            return lambda _: None
        if not isinstance(cost, CostModel):
            if not callable(cost):
                raise InvalidInput(
                    f"cost must be a CostModel, or a function from a HardwareSpec to one, got "
                    f"{cost!r}"
                )
            return cost
        hw = self._base["hw"]
        if type(cost) is Roofline and cost.hw == hw:  # what was measured is no roofline
            return lambda _: None
        # What no duration depends on may change under any cost model.
        rates = [a.name for a in self.axes if a.name == "hw" or _is_rate(a, hw)]
        if rates:
            raise InvalidInput(
                f"{cost!r} is the cost of one machine, and {', '.join(rates)} is swept: leave "
                f"cost out for the roofline of each machine, or give a function that makes a "
                f"machine's, such as cost=mg.CostModel.roofline"
            )
        return lambda _: cost


def _is_rate(axis: Axis, hw: Any) -> bool:
    if axis.of != "hardware":
        return False
    return hw is None or any(axis.name in hw.with_(**{axis.name: v}).rates for v in axis.values)


def _with_lengths(
    work: Workload, n: int | None = None, prompt_len: int | None = None, gen_len: int | None = None
) -> Workload:
    """A workload with every prompt, or every answer, of one length; or with other rows."""
    groups = tuple((prompt_len or p, gen_len or g, rows) for p, g, rows in work.groups)
    lengths = sorted({(p, g) for p, g, _ in groups})
    if len(lengths) == 1:
        return Workload.uniform(n or work.n, *lengths[0])
    if n is not None:
        raise InvalidInput(
            f"n cannot be swept: rows of {work.name} have {len(lengths)} different lengths. "
            f"Sweep work=[...], or fix prompt_len= and gen_len= too"
        )
    return Workload(groups, name=work.name)
