"""The same interface over ``torch.compile``: one compiled function per batch size, on CPU and
GPU."""

from __future__ import annotations

import operator
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, fx

from minikv.graphs.counters import Counters
from minikv.graphs.runner import GraphRunner, Hidden

ONE_THREAD = 1 << 15
"""Elements per thread below which a generated loop is not shared out: the rows of a decode step are
short, and threads that wait for each other take longer than one that does it all."""


class CompiledRunner(GraphRunner):
    """Compiles a size and variant when it first comes (``compile_all`` does so beforehand).

    Shapes are fixed, so that loops have known lengths; a batch is padded to a captured size as in a
    graph. ``stats.captures`` counts compiled graphs. When compiling fails (no C++ compiler, say), a
    warning says what to try and every step runs eagerly.

    Parameters
    ----------
    step, buffers, batch_sizes, options
        As for :class:`GraphRunner`.
    """

    def __init__(self, *args: Any, **options: Any) -> None:
        super().__init__(*args, **options)
        self.replays, self._graphs = True, len(self.sizes) * len(self.variants)
        self._compiled = compiled(self.run_step, self._graphs, self.stats)

    def compile_all(self) -> None:
        """Compile every size and variant now, largest first."""
        for size in reversed(self.sizes):
            for variant in self.variants:
                self(None, variant, size=size)

    def _replay(self, variant: str, size: int, inputs: dict[str, Tensor]) -> Any:
        try:
            return self._compiled(inputs, variant, self.hidden, self.layers)
        except Exception as e:
            if not type(e).__module__.startswith(("torch._dynamo", "torch._inductor")):
                raise
            self._give_up(
                f"compiling {variant} × {size}",
                f"{type(e).__name__}: {str(e)[:500]}",
                "(1) installing a C++ compiler (g++ or clang) if none is found; "
                "(2) emptying torch's cache (TORCHINDUCTOR_CACHE_DIR)",
            )
        self.stats.update(replays=self.stats.replays - 1, eager=self.stats.eager + 1)
        return self.run_step(inputs, variant, self.hidden, self.layers)

    def _capture(self, hidden: Hidden) -> None:
        self.hidden = hidden
        raise_recompile_limit(self._graphs)


def compiled(
    function: Callable[..., Any], graphs: int, stats: Counters | None = None
) -> Callable[..., Any]:
    """``torch.compile(function, dynamic=False)`` with room for so many graphs more, and right where
    Inductor is not.

    Dynamo never forgets a backend, so this one knows nothing of a runner but the `stats` to count
    captures in: all else goes with the runner. Nor are runners mixed up, as graphs of another
    backend are never called.

    On the CPU Inductor (torch 2.13, pytorch/pytorch#198270) fuses an indexed in-place store with
    later reads of other positions of the same tensor, and computes wrong numbers silently. A graph
    with such a store is compiled without fusion.
    """
    from torch._inductor.compile_fx import compile_fx

    raise_recompile_limit(graphs)

    def backend(graph: fx.GraphModule, inputs: list[Any]) -> Any:
        if stats is not None:
            stats["captures"] += 1
        patches = {"cpp.min_chunk_size": ONE_THREAD}
        if stores_by_index(graph):
            patches["max_fusion_size"] = 1
        return compile_fx(graph, inputs, config_patches=patches)

    # A step's modules stay as they are: they are not looked at before every call, which took 0.4 ms
    # for 30 layers.
    unguarded: dict[str, Any] = {
        "guard_filter_fn": torch.compiler.skip_guard_on_all_nn_modules_unsafe
    }
    return torch.compile(function, dynamic=False, backend=backend, options=unguarded)


def raise_recompile_limit(graphs: int) -> None:
    """Dynamo stops compiling a function after some shapes and then runs it eagerly without a word;
    let it go on."""
    config: Any = torch._dynamo.config  # type: ignore[attr-defined]
    config.recompile_limit += graphs
    config.accumulated_recompile_limit += graphs


def stores_by_index(graph: fx.GraphModule) -> bool:
    """Whether a traced graph writes into a tensor at places that an index tensor names."""

    def stores(node: fx.Node) -> bool:
        name = str(getattr(node.target, "__name__", node.target))
        return node.op in ("call_method", "call_function") and (
            node.target is operator.setitem
            or any(word in name for word in ("scatter", "put"))
            or ("index_" in name and "index_select" not in name)
        )

    parts = (part for part in graph.modules() if isinstance(part, fx.GraphModule))
    return any(stores(node) for part in parts for node in part.graph.nodes)
