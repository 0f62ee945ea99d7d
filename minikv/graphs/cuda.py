"""Capture a step once per batch size as a CUDA graph, and replay it: one launch instead of
hundreds."""

from __future__ import annotations

import gc
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any
from weakref import WeakSet

import torch
from torch import Tensor
from torch.utils._pytree import tree_leaves, tree_map_only
from tqdm import tqdm

from minikv.device import memory_facts
from minikv.errors import StateError
from minikv.graphs.buffers import Buffer
from minikv.graphs.runner import GraphRunner, Hidden
from minikv.graphs.tape import TapeRecorder

WARM_UPS = 2  # compile, tune and allocate whatever a first run does
SHARED_BYTES = 1 << 16
"""From here on, outputs of smaller sizes go into the largest one's memory: a copy of less costs
more than it saves."""
_pools: dict[
    int, tuple[Any, WeakSet]
] = {}  # device -> memory pool of its graphs, and those that live


class CudaGraphRunner(GraphRunner):
    """Captures all sizes and variants when it is made, largest first, and replays them.

    A graph's temporary memory comes from one pool per device. A block that a larger size freed
    serves every smaller one, so all graphs together take little more than the largest; the other
    way round each would need new blocks. When capturing fails, its memory is given back, a warning
    says what to try, and every step runs eagerly.

    On CPU buffers the step is recorded and replayed operation by operation: the same logic, without
    the speed.

    Parameters
    ----------
    step, buffers, batch_sizes, options
        As for :class:`GraphRunner`.
    compile_up_to
        Sizes up to this one are compiled by ``torch.compile`` before they are captured.

    Examples
    --------
    >>> x = torch.zeros(4, 2)
    >>> double = lambda inputs, variant: inputs["x"] * 2
    >>> r = CudaGraphRunner(double, {"x": x}, [1, 2, 4], progress=False)
    >>> r({"x": torch.ones(3, 2)})
    tensor([[2., 2.],
            [2., 2.],
            [2., 2.]])
    >>> r.stats
    {'replays': 1, 'eager': 0, 'captures': 3, 'padded_rows': 1, 'graph_bytes': 0}
    """

    outputs_are_static = True

    def __init__(
        self,
        step: Callable[..., Any],
        buffers: Mapping[str, Buffer | Tensor],
        batch_sizes: Iterable[int],
        *,
        compile_up_to: int = 0,
        **options: Any,
    ) -> None:
        super().__init__(step, buffers, batch_sizes, **options)
        self.graphs: dict[tuple[str, int], tuple[Any, Any]] = {}  # what to replay, and its output
        self.compile_up_to, self._compiled = compile_up_to, step
        if compile_up_to:
            from minikv.graphs.compiled import compiled

            self._compiled = compiled(self.run_step, len(self.sizes) * len(self.variants))
        kind: Any = CudaRecorder if self.device.type == "cuda" else TapeRecorder
        self._recorder = kind(self.device)
        self._largest: dict[str, list[Any]] = {}  # output of the largest graph of each variant
        self._addresses: dict[str, int] = {}
        self._capture(self.hidden)

    def capture_order(self) -> list[int]:
        """Sizes as they are captured: largest first."""
        return self.sizes[::-1]

    def _make(self, variant: str, hidden: Hidden, layers: tuple[int, ...]) -> None:
        super()._make(variant, hidden, layers)
        if variant in self._waiting:
            self._record_all([variant])

    def _replay(self, variant: str, size: int, inputs: dict[str, Tensor]) -> Any:
        if self.debug:
            self._check_addresses()
        graph, out = self.graphs[variant, size]
        graph.replay()
        return out

    def _capture(self, hidden: Hidden) -> None:
        self.replays, self.hidden = True, hidden
        self._drop()
        self._waiting = set(self.later)
        self._record_all([v for v in self.variants if v not in self.later])

    @torch.inference_mode(False)  # tensors of a graph that is made within a step outlive it
    @torch.no_grad()
    def _record_all(self, variants: Sequence[str]) -> None:
        """Graphs of these variants in all sizes; if one fails, none of any variant are left."""
        self._loaded = None, 0
        self._waiting.difference_update(variants)
        held = self._recorder.held()
        failure, at = "", ("", 0)
        saved = {name: t.clone() for name, t in self.state.items()}
        sizes = tqdm(
            self.capture_order(), "capture", unit="graph", disable=None if self.progress else True
        )
        try:
            with _collector_frozen():
                for size in sizes:
                    free = memory_facts(self.device).free / 2**30
                    sizes.set_postfix_str(f"{size} rows, {free:.2f} GiB free")
                    for variant in variants:
                        at = variant, size
                        self.graphs[at] = self._record(variant, size, saved)
                        self.stats["captures"] += 1
        except Exception as e:
            failure = f"{type(e).__name__}: {e}"
        finally:
            self._restore(saved)
            sizes.close()
        if failure:  # after the exception: its traceback holds on to what was captured
            self._drop()
            cap = max(1, at[1] // 2)
            self._give_up(
                f"capturing {at[0]} × {at[1]}",
                failure,
                f"(1) fewer or smaller batch sizes: capture_batch_sizes(..., cap={cap}); "
                "(2) a smaller KV pool (kv_tokens= or kv_memory=), which leaves graphs more memory",
            )
            return
        self._addresses = {name: t.data_ptr() for name, t in self._watched()}
        self.stats["graph_bytes"] += max(0, self._recorder.held() - held)

    def _record(self, variant: str, size: int, saved: Mapping[str, Tensor]) -> tuple[Any, Any]:
        """One graph, recorded on padding alone: what warm-ups write goes to page 0 and to reserved
        rows."""
        step = self._compiled if size <= self.compile_up_to else self.run_step

        def run() -> Any:
            return step(inputs, variant, self.hidden, self.layers)

        inputs = self._load({}, size, variant)
        self._recorder.warm_up(run, WARM_UPS)
        self._restore(saved)
        self._load({}, size, variant)  # a step may change its inputs, and its first run make plans
        return self._recorder.record(lambda: self._shared(variant, run()))

    def _shared(self, variant: str, out: Any) -> Any:
        """Move large outputs into the memory of the largest size's: only the last replay's output
        is of interest."""
        tensors = [leaf for leaf in tree_leaves(out) if isinstance(leaf, Tensor)]
        rooms = iter(self._largest.setdefault(variant, tensors))

        def move(t: Tensor) -> Tensor:
            room = next(rooms)
            if (
                t is room
                or t.nbytes < SHARED_BYTES
                or t.nbytes > room.nbytes
                or self._is_static(room)
            ):
                return t
            alike = (t.dtype, t.shape[1:]) == (room.dtype, room.shape[1:])
            return room[: t.shape[0]].copy_(t) if alike else t

        return tree_map_only(Tensor, move, out)

    def _restore(self, saved: Mapping[str, Tensor]) -> None:
        for name, value in saved.items():
            self.state[name].copy_(value)

    def _drop(self) -> None:
        self.graphs.clear()
        self._largest.clear()
        self._waiting.clear()
        self.stats["graph_bytes"] = 0
        self._recorder.give_back()

    def _watched(self) -> Iterator[tuple[str, Tensor]]:
        yield from ((name, buffer.tensor) for name, buffer in self.buffers.items())
        yield from self.state.items()
        yield from self.watch().items()

    def _check_addresses(self) -> None:
        for name, t in self._watched():
            if self._addresses.get(name) != t.data_ptr():
                raise StateError(
                    f"{name!r} is not where it was at capture: the graph still reads the old "
                    "memory. Write into the tensor (copy_) instead of replacing it, or make a new "
                    "runner"
                )


class CudaRecorder:
    """Captures on a stream of its own, into the pool that all runners of the device share."""

    def __init__(self, device: torch.device) -> None:
        self.device, self.stream = device, torch.cuda.Stream(device)

    def warm_up(self, run: Callable[[], Any], times: int) -> None:
        """Run on the capturing stream, so that its libraries' workspaces are made outside the
        graph."""
        self.stream.wait_stream(torch.cuda.current_stream(self.device))
        with torch.cuda.stream(self.stream):
            for _ in range(times):
                run()
        torch.cuda.current_stream(self.device).wait_stream(self.stream)

    def record(self, run: Callable[[], Any]) -> tuple[torch.cuda.CUDAGraph, Any]:
        """Capture once; the graph and the step's output, which each replay overwrites."""
        index = torch.cuda.current_device() if self.device.index is None else self.device.index
        pool, living = _pools.get(index, (None, ()))
        if not living:  # a pool ends with its last graph
            pool, living = _pools[index] = torch.cuda.graph_pool_handle(), WeakSet()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.stream(
            torch.cuda.current_stream(self.device)
        ):  # comes back to it even if the capture breaks
            capture = torch.cuda.graph(
                graph, pool=pool, stream=self.stream, capture_error_mode="thread_local"
            )
            with capture:
                out = run()
        living.add(graph)
        return graph, out

    def held(self) -> int:
        """Bytes that this process holds on the device."""
        return torch.cuda.memory_reserved(self.device)

    def give_back(self) -> None:
        """Return to the device what dropped graphs held."""
        gc.collect()
        torch.cuda.synchronize(self.device)
        torch.cuda.empty_cache()


@contextmanager
def _collector_frozen() -> Iterator[None]:
    """No garbage collection: a tensor that dies while a graph is captured would take its memory out
    of the pool."""
    was_on = gc.isenabled()
    gc.collect()
    gc.freeze()
    gc.disable()
    try:
        yield
    finally:
        gc.unfreeze()
        if was_on:
            gc.enable()
