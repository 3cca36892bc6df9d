"""Lanes as they run: a worker thread on the CPU, a stream on CUDA.

Both have two sides. The *issuing* side (`moegen.exec.issue`) hands work over in program order;
the *executing* side does it in that order. Events join them, with the semantics of CUDA: waiting
on an event that has not been recorded protects nothing. CUDA lets it pass in silence; the CPU
lanes raise, so tests without a GPU find the fault.

Apart from `moegen.exec.pinning`, this is the only module that names ``torch.cuda``.
"""

from __future__ import annotations

import queue
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import lru_cache
from typing import NamedTuple, Protocol

import torch

from moegen.errors import MachineError, MoegenError
from moegen.exec.threads import Worker
from moegen.graph.task import Lane


class UnrecordedEvent(MoegenError):
    """A wait for an event that nobody has recorded: on CUDA it would protect nothing."""


class Event(Protocol):
    """A point in a lane's execution.

    ``rings`` says whether the issuing thread is told when the lane has come to it.
    """

    rings: bool

    def ready(self) -> bool:
        """Whether the lane has come to this point."""
        ...

    def synchronize(self) -> None:
        """Block the calling thread until the lane has come to this point."""
        ...

    def time_s(self) -> float:
        """When the lane came to this point, in seconds of the run's clock."""
        ...


class Stream(Protocol):
    """The executing side of a lane."""

    def submit(self, work: Callable[[], None]) -> None: ...
    def record(self) -> Event: ...
    def can_wait(self, event: Event) -> bool:
        """Whether `wait` would not block the calling thread."""
        ...

    def wait(self, event: Event) -> None:
        """Let what is submitted from here on begin after ``event``."""
        ...

    def delay(self, seconds: float) -> None:
        """Let what is submitted from here on begin so much later; the caller goes on at once."""
        ...

    def pulse(self) -> int:
        """A number that another call finds changed if the lane has been at work meanwhile, or
        still is. A thread that waits for another lane is not at work; a CUDA stream cannot
        tell, but only waits for what has been issued."""
        ...

    def synchronize(self) -> None: ...
    def close(self) -> None: ...


ANCHOR_S = 20.0


class Clock:
    """One time line for CPU threads and CUDA streams: seconds since the run began."""

    def __init__(self, device: torch.device) -> None:
        self.origin_event: torch.cuda.Event | None = None
        if device.type == "cuda":
            torch.cuda.synchronize(device)
            self.origin_event = torch.cuda.Event(enable_timing=True)
            self.origin_event.record()
            self.origin_event.synchronize()
        self.origin = time.perf_counter()
        self._anchor_s = 0.0

    def now(self) -> float:
        return time.perf_counter() - self.origin

    def time_of(self, event: torch.cuda.Event) -> float:
        """Seconds of a CUDA event that has completed; called from one thread, in order.

        CUDA counts in float32 milliseconds, which are coarse after an hour: the anchor that
        it counts from moves along.
        """
        assert self.origin_event is not None
        since_s = self.origin_event.elapsed_time(event) / 1e3
        time_s = self._anchor_s + since_s
        if since_s > ANCHOR_S:
            self.origin_event, self._anchor_s = event, time_s
        return time_s


class CpuEvent:
    """An event of a CPU lane; it raises where CUDA would silently not wait."""

    rings = True

    def __init__(self, clock: Clock, wake: Callable[[], None]) -> None:
        self._clock, self._wake = clock, wake
        self._reached = threading.Event()
        self._time_s = float("nan")

    def reach(self) -> None:
        self._time_s = self._clock.now()
        self._reached.set()
        self._wake()

    def ready(self) -> bool:
        return self._reached.is_set()

    def synchronize(self) -> None:
        self._reached.wait()

    def time_s(self) -> float:
        return self._time_s


class _Wait(NamedTuple):
    event: Event

    def __call__(self) -> None:
        self.event.synchronize()


class CpuStream:
    """A worker thread that runs what it is given, in order.

    After a failure it drops the work that follows but still reaches its events, so that
    nobody hangs; ``on_error`` hears of the failure at once, ``wake`` of every event reached.
    ``torch_threads`` limits the threads that torch starts for one operation; its own choice
    unless given.
    """

    def __init__(
        self,
        name: str,
        clock: Clock,
        on_error: Callable[[BaseException], None],
        wake: Callable[[], None] = lambda: None,
        *,
        torch_threads: int | None = None,
    ) -> None:
        self.clock = clock
        self._on_error, self._wake = on_error, wake
        self._failed = False
        self._working = False
        self._pulse = 0
        self._queue: queue.SimpleQueue[Callable[[], None] | CpuEvent | _Wait | None]
        self._queue = queue.SimpleQueue()
        self._thread = Worker(f"moegen-{name}", self._work, torch_threads=torch_threads)
        try:
            self._thread.start()
        except BaseException:
            self._queue.put(None)  # after an interrupt the thread may be there, or be yet to come
            if self._thread.ident is not None:
                self._thread.wait()
            raise

    @torch.inference_mode()
    def _work(self) -> None:
        while (item := self._queue.get()) is not None:
            if isinstance(item, CpuEvent):
                item.reach()
            elif not self._failed:
                # A thread that waits for another lane is not at work.
                self._working = not isinstance(item, _Wait)
                try:
                    item()
                except BaseException as e:
                    self._failed = True
                    self._on_error(e)
                self._pulse += self._working
                self._working = False

    def submit(self, work: Callable[[], None]) -> None:
        self._queue.put(work)

    def pulse(self) -> int:
        self._pulse += self._working
        return self._pulse

    def record(self) -> CpuEvent:
        event = CpuEvent(self.clock, self._wake)
        self._queue.put(event)
        return event

    def can_wait(self, event: Event) -> bool:
        return True

    def wait(self, event: Event | None) -> None:
        if event is None:
            raise UnrecordedEvent("a lane waits for an event that has not been recorded")
        self._queue.put(_Wait(event))

    def delay(self, seconds: float) -> None:
        self.submit(lambda: time.sleep(seconds))

    def synchronize(self) -> None:
        self.record().synchronize()

    def close(self) -> None:
        self._queue.put(None)
        self._thread.wait()


class CudaEvent:
    """A CUDA event with a time."""

    rings = False

    def __init__(self, clock: Clock, stream: torch.cuda.Stream) -> None:
        self._clock = clock
        # Blocking: a spinning host thread would take a core from the CPU's attention.
        self.event = torch.cuda.Event(enable_timing=True, blocking=True)
        self.event.record(stream)

    def ready(self) -> bool:
        return self.event.query()

    def synchronize(self) -> None:
        self.event.synchronize()

    def time_s(self) -> float:
        return self._clock.time_of(self.event)


class CudaStream:
    """A CUDA stream. It cannot wait for an event of a CPU lane: the issuing thread does.

    What is submitted leaves its stream current on the calling thread; `own_current_stream` puts
    back what was.
    """

    def __init__(self, device: torch.device, lane: Lane, clock: Clock) -> None:
        self.clock = clock
        self.stream = _cuda_stream(device, lane)
        self._pulse = 0

    def submit(self, work: Callable[[], None]) -> None:
        torch.cuda.set_stream(self.stream)
        work()

    def record(self) -> CudaEvent:
        return CudaEvent(self.clock, self.stream)

    def can_wait(self, event: Event) -> bool:
        return isinstance(event, CudaEvent) or event.ready()

    def wait(self, event: Event | None) -> None:
        if event is None:
            raise UnrecordedEvent("a lane waits for an event that has not been recorded")
        if isinstance(event, CudaEvent):
            self.stream.wait_event(event.event)
        else:
            event.synchronize()

    def delay(self, seconds: float) -> None:
        with torch.cuda.stream(self.stream):
            _hold(seconds)

    def pulse(self) -> int:
        self._pulse += not self.stream.query()
        return self._pulse

    def synchronize(self) -> None:
        self.stream.synchronize()

    def close(self) -> None:
        self.stream.synchronize()


def _hold(seconds: float) -> None:
    from moegen.exec.kernels.hold import hold  # Triton is there with CUDA alone

    hold(seconds)


def prepare_delays(device: torch.device) -> None:
    """Compile what a delay on ``device`` takes, so that the first one does not have to."""
    if device.type == "cuda":
        with torch.cuda.device(device):
            _hold(0.0)
        settle(device)


# KV and ACT kernels are short and someone waits for them: they go before large GEMMs.
_PRIORITY = {Lane.ACT: -2, Lane.KV: -1}


@lru_cache
def _cuda_stream(device: torch.device, lane: Lane) -> torch.cuda.Stream:
    # One for all runs: the allocator keeps a pool of memory for every stream it meets.
    return torch.cuda.Stream(device, priority=_PRIORITY.get(lane, 0))


def open_streams(
    device: torch.device,
    clock: Clock,
    on_error: Callable[[BaseException], None],
    wake: Callable[[], None] = lambda: None,
    streams: dict[Lane, Stream] | None = None,
) -> dict[Lane, Stream]:
    """The executing side of every lane on ``device``; the CPU lane is a thread on both.

    ``on_error`` hears of what fails on a CPU lane, ``wake`` whenever one has come to an event.
    ``streams`` gets them as they are made, so that an interrupt on the way loses none.
    """
    streams = {} if streams is None else streams
    cuda = device.type == "cuda"
    for lane in Lane:
        if cuda and lane is not Lane.CPU:
            streams[lane] = CudaStream(device, lane, clock)
        else:
            # Beside CUDA the attention's own pool has the cores: torch's threads would
            # spin between operations and take them away.
            one = 1 if cuda else None
            streams[lane] = CpuStream(lane.value, clock, on_error, wake, torch_threads=one)
    return streams


def enter(device: torch.device) -> None:
    """Make ``device`` the calling thread's."""
    if device.type == "cuda":
        torch.cuda.set_device(device)


@contextmanager
def own_current_stream(device: torch.device) -> Iterator[None]:
    """What is submitted inside changes the calling thread's current stream only until the end."""
    if device.type != "cuda":
        yield
        return
    with torch.cuda.stream(torch.cuda.current_stream(device)):
        yield


def pick_device(name: str | None) -> torch.device:
    """The device called ``name``; without a name, CUDA if there is one.

    Raises
    ------
    MachineError
        If CUDA is asked for and cannot be used.
    """
    if name is None:
        name = "cuda" if torch.cuda.is_available() else "cpu"
    device = torch.device(name)
    if device.type == "cuda":
        if not torch.cuda.is_available():
            raise MachineError(
                "device 'cuda' was asked for, but torch sees no CUDA device "
                f"(torch {torch.__version__}): install a CUDA build of torch and the driver, "
                "or use device 'cpu'"
            )
        device = torch.device("cuda", device.index or 0)
        torch.cuda.set_device(device)
    return device


def empty_host(*shape: int, dtype: torch.dtype, device: torch.device) -> torch.Tensor:
    """Host memory that ``device`` can reach: pinned for CUDA."""
    return torch.empty(*shape, dtype=dtype, pin_memory=device.type == "cuda")


def free_gpu_memory(device: torch.device) -> int:
    """Bytes of a GPU that this process may use: what is free, and what its allocator holds."""
    free, _ = torch.cuda.mem_get_info(device)
    return free + torch.cuda.memory_reserved(device) - torch.cuda.memory_allocated(device)


def peak_gpu_memory(device: torch.device) -> int:
    """The most bytes that the allocator has taken from the GPU."""
    return torch.cuda.max_memory_reserved(device)


def settle(device: torch.device) -> None:
    """Wait until ``device`` has done everything that was issued, on any stream."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def gpu_name(device: torch.device) -> str:
    """Name of a GPU."""
    return torch.cuda.get_device_properties(device).name


def gpu_identity(device: torch.device) -> str:
    """Name and UUID of a GPU."""
    return f"{gpu_name(device)} {torch.cuda.get_device_properties(device).uuid}"


def give_back_gpu_memory(device: torch.device) -> None:
    """Give back what the allocator holds and nobody uses; nothing to do on CPU lanes."""
    if device.type == "cuda":
        torch.cuda.empty_cache()


def forget_gpu_memory(device: torch.device) -> None:
    """Give back what the allocator holds and nobody uses, and count its peak anew.

    Workspaces of cuBLAS too: there is one for each stream that ever made a product, and a run
    plans for that of its own.
    """
    torch._C._cuda_clearCublasWorkspaces()
    give_back_gpu_memory(device)
    torch.cuda.reset_peak_memory_stats(device)
