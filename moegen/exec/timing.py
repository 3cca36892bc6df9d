"""Timing work on the lanes of a device, alone or in company."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from functools import partial
from typing import Any

import torch

from moegen.exec.lanes import Clock, enter, open_streams, own_current_stream, settle
from moegen.exec.threads import Worker
from moegen.graph.task import Lane

Work = Callable[[], Any]
SPAN_S = 0.15  # what a measurement lasts, about
MOST_RUNS = 200
_MOST_QUEUED, _MOST_BETWEEN = 32, 8  # while a stream is held back; with other work between
_MOST_HELD_S = 0.03


class Bench:
    """The lanes of a device, to time work on.

    Use it as a context; at the end the lanes have done everything and their threads are gone.
    """

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self._failed: list[BaseException] = []
        self._launch_s = 0.0  # of a run, on the host
        enter(device)
        self.streams = open_streams(device, Clock(device), self._failed.append)

    def __enter__(self) -> Bench:
        return self

    def __exit__(self, *exc: object) -> None:
        for stream in self.streams.values():
            stream.close()

    def seconds(
        self,
        lane: Lane,
        work: Work,
        *,
        beside: tuple[Lane, Work] | None = None,
        each_with: tuple[Lane, Work] | None = None,
        span_s: float = SPAN_S,
    ) -> float:
        """Seconds of ``work`` on a lane, undisturbed; otherwise as `spans`."""
        spans = self.spans(lane, work, beside=beside, each_with=each_with, span_s=span_s)
        return max(1e-9, undisturbed(spans))

    def spans(
        self,
        lane: Lane,
        work: Work,
        *,
        beside: tuple[Lane, Work] | Sequence[tuple[Lane, Work]] | None = None,
        each_with: tuple[Lane, Work] | None = None,
        span_s: float = SPAN_S,
        between: Work | None = None,
        queued: bool = False,
    ) -> list[float]:
        """Seconds of each run of ``work`` on a lane, over and over for about ``span_s``.

        ``beside`` keeps another lane, or several, busy all the time; ``each_with`` begins another
        lane's work with each run, and the next run waits for it; ``between`` runs on the same lane
        before each run and is not timed. ``queued`` holds a stream back until all runs have been
        issued, so that what the host takes to launch them is not in them.

        Raises
        ------
        Exception
            Whatever the work raised.
        """
        settle(self.device)  # what the work reads was made on a stream that no lane waits for
        others: Any = beside or []
        if others and isinstance(others[0], Lane):
            others = [others]
        with own_current_stream(self.device), ExitStack() as stack:
            for lane_of, other in others:
                stack.enter_context(self._busy(lane_of, other))
            once = self._spans(lane, work, 2, each_with, between)[-1]
            n = int(min(MOST_RUNS, max(2, span_s / max(once, 1e-6))))
            held_s = 0.0
            if between is not None:
                n = max(4, min(n, _MOST_BETWEEN))
            elif queued and once < 2 * self._launch_s:
                # Again, for what compiles or loads only once.
                self._spans(lane, work, 2, each_with, between)
                n = max(4, min(n, _MOST_QUEUED))
                held_s = min(_MOST_HELD_S, 2 * n * self._launch_s)
            spans = self._spans(lane, work, n, each_with, between, held_s)
        self._raise()
        return spans

    def _spans(
        self,
        lane: Lane,
        work: Work,
        n: int,
        each_with: tuple[Lane, Work] | None,
        between: Work | None = None,
        held_s: float = 0.0,
    ) -> list[float]:
        stream, events = self.streams[lane], []
        if held_s and self.device.type == "cuda" and lane is not Lane.CPU:
            stream.delay(held_s)
        began = time.perf_counter()
        for _ in range(n):
            if between is not None:
                stream.submit(partial(without_grad, between))
            begin, done = stream.record(), None
            if each_with is not None:
                other = self.streams[each_with[0]]
                other.wait(begin)
                other.submit(partial(without_grad, each_with[1]))
                done = other.record()
            stream.submit(partial(without_grad, work))
            events.append((begin, stream.record()))
            if done is not None:
                stream.wait(done)
        self._launch_s = (time.perf_counter() - began) / n
        stream.synchronize()
        self._raise()
        times = [(begin.time_s(), end.time_s()) for begin, end in events]
        return [end - begin for begin, end in times]

    def _raise(self) -> None:
        if self._failed:
            raise self._failed[0]

    @contextmanager
    def _busy(self, lane: Lane, work: Work) -> Iterator[None]:
        """Keep a lane at ``work``, always with the next one queued."""
        stream, over, begun = self.streams[lane], threading.Event(), threading.Event()

        def feed() -> None:
            try:
                enter(self.device)
                before = stream.record()
                while not over.is_set():
                    stream.submit(partial(without_grad, work))
                    after = stream.record()
                    before.synchronize()
                    before = after
                    begun.set()
                stream.synchronize()
            except BaseException as e:
                self._failed.append(e)
            finally:
                begun.set()

        thread = Worker("moegen-beside", feed)
        thread.start()
        try:
            begun.wait()
            yield
        finally:
            over.set()
            thread.wait()


def undisturbed(spans: Sequence[float]) -> float:
    """A time that most of ``spans`` exceed: other processes make some longer, none shorter."""
    return sorted(spans)[len(spans) // 8]


def without_grad(work: Work) -> None:
    with torch.inference_mode():
        work()
