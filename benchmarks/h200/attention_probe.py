"""The engine's own decode attention on the CPU, over a KV store of its own, to be timed."""

from __future__ import annotations

from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor

import torch

import moegen as mg
from moegen.exec.kv import KVStore


class Probe:
    """Rows of made-up KV in one layer, as the engine's CPU lane attends to them.

    Parameters
    ----------
    engine : Engine
    lengths : sequence of int
        Tokens of each row, the new one included.
    """

    def __init__(self, engine: mg.Engine, lengths: Sequence[int]) -> None:
        family, self.machinery = engine.machinery.family, engine.machinery
        attention = engine.model.layers[0].attention
        pin = engine.device.type == "cuda"
        one = engine.model.with_(n_layers=1)
        self.store = KVStore(one, sum(lengths), family.dtype, pin=pin)
        self.kv = kv = self.store.layers[0]
        pattern = torch.randn(997, kv.shape[1]).to(kv.dtype)
        for at in range(0, len(kv), len(pattern)):
            kv[at : at + len(pattern)] = pattern[: len(kv) - at]
        self.lengths = list(lengths)
        self._views = list(kv.split(self.lengths))
        self._q = torch.randn(len(lengths), attention.q_width("decode")).to(kv.dtype)
        # As in the CPU lane: one thread that hands rows out, torch's own threads off.
        self._lane = ThreadPoolExecutor(1, initializer=torch.set_num_threads, initargs=(1,))

    @property
    def nbytes(self) -> int:
        """KV bytes that a call reads."""
        return self.kv.nbytes

    def attend(self) -> None:
        """One call, as the CPU lane makes it."""
        m = self.machinery
        self._lane.submit(m.family.attn_decode, self._q, self._views, m.pool, m.threads).result()

    def close(self) -> None:
        self._lane.shutdown()
        self.store.close()
