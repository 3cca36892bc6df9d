"""Strategy: the paper's six knobs and the few that its text leaves implicit."""

from __future__ import annotations

import dataclasses
import html
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

from moegen.errors import InvalidInput
from moegen.graph.checks import number, whole
from moegen.units import format_bytes, format_seconds

Fetch = Literal["all", "routed"]
#: A decode batch is laid out anew once this share of the rows it was laid out for is left.
BARRIER_SHARE = 0.5


@dataclass(frozen=True)
class Strategy:
    """How one phase (prefill or decode) of a job is laid out on the machine.

    Parameters
    ----------
    B : int
        Accumulated batch: sequences in flight (decode), or sequences of a wave (prefill).
    b_a : int
        Attention micro-batch on the GPU, in sequences.
    b_e : int
        Expert micro-batch, in tokens: the tile of the loop inside an expert, or any other MLP.
    s_expert : int
        Bytes of GPU memory for prefetched experts; at least one slot is always there.
    s_params : int
        Bytes of weights kept on the GPU for good, spread evenly over the layers.
    omega : float
        Share of the decode attention's KV bytes that the CPU handles, in [0, 1].
    kv_slots, dense_slots : int
        Ring slots for KV staged on the GPU and for one layer's dense weights.
    expert_group : int
        Experts that are copied and computed as one task.
    fetch : {"all", "routed"}
        Copy every expert ahead of its use, or only those the router chose.

    Notes
    -----
    Symbols follow MoE-Gen (arXiv:2503.09716), section 4: B, b_a, b_e, S_Expert, S_Params, ω.
    """

    B: int
    b_a: int
    b_e: int
    s_expert: int = 0
    s_params: int = 0
    omega: float = 0.0
    kv_slots: int = 2
    dense_slots: int = 2
    expert_group: int = 1
    fetch: Fetch = "all"

    def __post_init__(self) -> None:
        lowest = dict.fromkeys(("s_expert", "s_params"), 0)
        lowest |= dict.fromkeys(("B", "b_a", "b_e", "kv_slots", "dense_slots", "expert_group"), 1)
        for name, least in lowest.items():
            object.__setattr__(self, name, whole(getattr(self, name), name, at_least=least))
        omega = number(self.omega, "omega")
        if not 0 <= omega <= 1:
            raise InvalidInput(
                f"omega is the CPU's share of decode attention and lies in [0, 1], got {omega}"
            )
        object.__setattr__(self, "omega", omega)
        if self.fetch not in ("all", "routed"):
            raise InvalidInput(f'fetch must be "all" or "routed", got {self.fetch!r}')

    def with_(self, **changes: Any) -> Strategy:
        """A copy with some fields changed."""
        unknown = changes.keys() - {f.name for f in dataclasses.fields(self)}
        if unknown:
            raise InvalidInput(f"Strategy has no field {', '.join(sorted(unknown))}")
        return dataclasses.replace(self, **changes)

    def to_dict(self) -> dict[str, Any]:
        """Plain data, for JSON."""
        return dataclasses.asdict(self)


@dataclass(frozen=True)
class Rejected:
    """Strategies that a search looked at and that do not fit, summed up.

    Attributes
    ----------
    phase : {"prefill", "decode"}
    section, line : str
        Memory that is short, ``"host"`` or ``"gpu"``, and the biggest line of the ledger there
        that a strategy can change, of the one that misses by least.
    count : int
        How many.
    shortfall_bytes : int
        How much too large the one that misses by least is.
    example : Strategy
        That one.
    """

    phase: str
    section: str
    line: str
    count: int
    shortfall_bytes: int
    example: Strategy

    def __str__(self) -> str:
        return (
            f"{self.count:,} for {self.phase} do not fit {self.section} memory (the nearest by "
            f"{format_bytes(self.shortfall_bytes)}: {self.line})"
        )


def _gain() -> Any:
    return field(default=None, compare=False)


@dataclass(frozen=True, repr=False)
class Plan:
    """The strategies of a job's two phases, and what a search found they would do.

    A plan made by hand has the two strategies alone. Two plans are equal if their strategies are.

    Parameters
    ----------
    prefill, decode : Strategy
    throughput : float, optional
        Tokens generated a second of the whole job: each row's first comes from prefill.
    prefill_tokens_per_s, decode_tokens_per_s : float, optional
        Prompt tokens a second of prefill; tokens a second that decode steps give, None if the
        job needs none.
    time_s, load_s, prefill_s, decode_s : float, optional
        Of the whole job, and of its parts; ``load_s`` is 0 where loading is left out.
    binds : dict of str to str, optional
        For each phase the part of :class:`moegen.sim.bounds.Bound` that limits a step with every
        row in it.
    bound_share : dict of str to float, optional
        How near such a step comes to that bound, at most 1.
    n_evaluated : int, optional
        Strategies that fit and whose time was estimated, of both phases.
    rejected : tuple of Rejected
    notes : tuple of str
        Why this choice, and what of the question had no effect on it.
    """

    prefill: Strategy
    decode: Strategy
    throughput: float | None = _gain()
    prefill_tokens_per_s: float | None = _gain()
    decode_tokens_per_s: float | None = _gain()
    time_s: float | None = _gain()
    load_s: float | None = _gain()
    prefill_s: float | None = _gain()
    decode_s: float | None = _gain()
    binds: Mapping[str, str] | None = _gain()
    bound_share: Mapping[str, float] | None = _gain()
    n_evaluated: int | None = _gain()
    rejected: tuple[Rejected, ...] = field(default=(), compare=False)
    notes: tuple[str, ...] = field(default=(), compare=False)

    def __post_init__(self) -> None:
        for phase in ("prefill", "decode"):
            if not isinstance(getattr(self, phase), Strategy):
                raise InvalidInput(f"{phase} must be a Strategy, got {getattr(self, phase)!r}")

    def to_dict(self) -> dict[str, Any]:
        """Plain data, for JSON."""
        return dataclasses.asdict(self)

    def __repr__(self) -> str:
        lines = [f"prefill  {self.prefill}", f"decode   {self.decode}"]
        if self.time_s is None:
            return "\n".join(["Plan", *(f"  {line}" for line in lines)])
        share = self.bound_share or {}
        for name, part in (self.binds or {}).items():
            lines.append(f"{name}: {part} binds, {share[name]:.0%} of the bound reached")
        head = f"Plan: {self.throughput:,.1f} tokens/s, {format_seconds(self.time_s)}"
        head += f", the best of {self.n_evaluated:,} strategies"
        return "\n".join([head, *(f"  {line}" for line in (*lines, *self.notes))])

    def _repr_html_(self) -> str:
        names = [f.name for f in dataclasses.fields(Strategy)]
        phases = (("prefill", self.prefill), ("decode", self.decode))
        head, *below = repr(self).splitlines()
        rows = "".join(
            f"<tr><th>{name}</th>" + "".join(f"<td>{getattr(s, name)}</td>" for _, s in phases)
            for name in names
        )
        said = "".join(f"<p>{html.escape(line.strip())}</p>" for line in below[2:])
        return (
            f"<p>{html.escape(head)}</p><table><tr><th></th>"
            + "".join(f"<th>{phase}</th>" for phase, _ in phases)
            + f"</tr>{rows}</table>{said}"
        )
