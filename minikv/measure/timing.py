"""How everything here is timed: warm up, repeat, report the median and the spread, never a single
lucky number."""

from __future__ import annotations

import gc
import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from minikv.device import synchronize

# an idle GPU takes milliseconds of work to reach its clocks: the first figure was 8 % too slow
RAMP_SECONDS = 0.02


@dataclass(frozen=True)
class Timing:
    """Seconds of one call.

    Attributes
    ----------
    median, low, high
        The median of all samples, and their 10th and 90th percentile.
    samples
        How many samples there are.
    """

    median: float
    low: float
    high: float
    samples: int

    @property
    def us(self) -> float:
        """The median in microseconds."""
        return self.median * 1e6

    @property
    def spread(self) -> float:
        """Distance of the percentiles as a fraction of the median."""
        return (self.high - self.low) / self.median if self.median else 0.0

    @classmethod
    def of(cls, seconds: Sequence[float]) -> Timing:
        """Summarise samples.

        Examples
        --------
        >>> Timing.of([3.0, 1.0, 2.0])
        Timing(median=2.0, low=1.0, high=3.0, samples=3)
        """
        ordered = sorted(seconds)
        tenth = len(ordered) // 10
        return cls(statistics.median(ordered), ordered[tenth], ordered[-1 - tenth], len(ordered))


def measure(
    fn: Callable[[], Any],
    *,
    device: torch.device | str = "cpu",
    warmup: int = 3,
    samples: int = 20,
    min_seconds: float = 1e-3,
) -> Timing:
    """Time of one call of `fn`, its work on `device` included.

    Parameters
    ----------
    fn
        What to time; calls may follow each other at once.
    device
        On the CPU wall time is taken, on CUDA the time between two events on the stream.
    warmup
        Calls before the first sample (compilation, caches, clocks).
    samples
        Samples taken; each is the mean of so many calls in a row that it lasts `min_seconds`.
    min_seconds
        Shortest sample.

    Returns
    -------
    Timing
        Seconds per call.
    """
    for _ in range(max(warmup, 1)):
        fn()
    synchronize(device)
    started = time.perf_counter()
    fn()
    synchronize(device)
    calls = max(1, int(min_seconds / max(time.perf_counter() - started, 1e-9)))
    on_cuda, seconds = torch.device(device).type == "cuda", []
    for _ in range(samples):
        if on_cuda:
            seconds.append(_event_seconds(lambda: [fn() for _ in range(calls)]) / calls)
        else:
            started = time.perf_counter()
            for _ in range(calls):
                fn()
            seconds.append((time.perf_counter() - started) / calls)
    return Timing.of(seconds)


def measure_host(
    fn: Callable[[], Any],
    *,
    device: torch.device | str,
    warmup: int = 20,
    samples: int = 200,
    burst: int = 8,
) -> Timing:
    """Time until a call of `fn` returns to Python, whatever it left to do on the device.

    The device is idle before each sample of `burst` calls, so that its queue never makes the host
    wait.
    """
    for _ in range(warmup):
        fn()
    seconds = []
    collecting = gc.isenabled()
    gc.disable()
    try:
        for _ in range(samples):
            synchronize(device)
            started = time.perf_counter()
            for _ in range(burst):
                fn()
            seconds.append((time.perf_counter() - started) / burst)
    finally:
        if collecting:
            gc.enable()
    synchronize(device)
    return Timing.of(seconds)


def measure_graph(
    calls: Sequence[Callable[[], Any]], *, warmup: int = 3, samples: int = 20
) -> Timing:
    """Device time of one call without the host's share: all `calls` in one CUDA graph, replays
    timed by events.

    Parameters
    ----------
    calls
        The same work on rotated inputs (more bytes than the L2 cache holds, where it reads much).
        They must neither wait for the device nor allocate outside PyTorch.
    warmup, samples
        Replays before the first sample (more, until clocks have had time to rise), and samples.

    Returns
    -------
    Timing
        Seconds per call: a replay divided by the number of calls.
    """
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        for call in calls:
            call()
    torch.cuda.current_stream().wait_stream(side)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for call in calls:
            call()
    started = time.perf_counter()
    while warmup > 0 or time.perf_counter() - started < RAMP_SECONDS:
        graph.replay()
        torch.cuda.synchronize()
        warmup -= 1
    seconds = [_event_seconds(graph.replay) / len(calls) for _ in range(samples)]
    del graph
    return Timing.of(seconds)


def _event_seconds(fn: Callable[[], Any]) -> float:
    start, stop = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
    start.record()
    fn()
    stop.record()
    stop.synchronize()
    return start.elapsed_time(stop) * 1e-3
