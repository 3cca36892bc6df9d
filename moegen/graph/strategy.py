"""Strategy: the paper's six knobs and the few that its text leaves implicit."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from typing import Any, Literal

from moegen.errors import InvalidInput
from moegen.graph.checks import number, whole

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
class Plan:
    """The strategies of a job's two phases."""

    prefill: Strategy
    decode: Strategy

    def __post_init__(self) -> None:
        for phase in ("prefill", "decode"):
            if not isinstance(getattr(self, phase), Strategy):
                raise InvalidInput(f"{phase} must be a Strategy, got {getattr(self, phase)!r}")
