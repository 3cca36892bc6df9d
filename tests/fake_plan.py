"""A stand-in for plan(): its answers are a formula of what is asked, and it keeps the questions."""

from __future__ import annotations

from dataclasses import dataclass

import moegen as mg


@dataclass
class Calls:
    """Plans that are a formula of what they were asked for, and a record of who asked."""

    calls: list

    def plan(self, model, hw, work, cost=None, **fixed):
        self.calls.append((model, hw, work, cost, fixed))
        B, omega = fixed.get("B", 100), fixed.get("omega", 0.5)
        if B > 5000:
            raise mg.Infeasible("does not fit host memory: 7 GiB too much", line="host")
        rate = B * (1 - (omega - 0.6) ** 2) * hw.h2d_bytes_per_s / 25e9
        decode = mg.Strategy(**{"B": B, "b_a": 10, "b_e": 8192, "omega": omega, **fixed})
        time_s = work.gen_tokens / rate
        return found(decode, rate, time_s)


@dataclass(frozen=True)
class Found:
    """What a plan says of itself."""

    prefill: mg.Strategy
    decode: mg.Strategy
    decode_tokens_per_s: float | None
    prefill_tokens_per_s: float
    throughput: float
    time_s: float
    prefill_s: float
    decode_s: float
    load_s: float
    binds: dict
    bound_share: dict
    notes: tuple[str, ...] = ("made up", "by a formula")


def found(decode, rate, time_s):
    binds = {"decode": "chain" if decode.omega > 0.6 else "resource h2d", "prefill": "lane GPU"}
    share = {"decode": 0.9, "prefill": 0.8}
    prefill = mg.Strategy(B=64, b_a=4, b_e=8192)
    return Found(prefill, decode, rate, 2e3, rate, time_s, 1.0, time_s - 1, 0.5, binds, share)
