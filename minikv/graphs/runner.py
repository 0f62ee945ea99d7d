"""One interface for a step that is replayed, compiled or simply run; callers need not know which it
was.

A step is a function of static buffers. Running it once per batch size and keeping what it launched
spares the host all the work of launching (CUDA Graphs; SGLang's and vLLM's graph runners), but
freezes addresses and shapes: batches are written into the buffers, padded to a captured size, and
cut back afterwards.
"""

from __future__ import annotations

from collections.abc import Callable, Container, Iterable, Mapping, Sequence
from contextlib import nullcontext
from enum import IntEnum
from typing import Any

import torch
from torch import Tensor
from torch.utils._pytree import tree_map_only

from minikv.errors import ArgumentError
from minikv.graphs.buckets import pick_size
from minikv.graphs.buffers import Buffer, Padding, Stage


class Hidden(IntEnum):
    """Which hidden states a step returns beside its output: none, those of each request's last
    token, or all."""

    NULL = 0
    LAST = 1
    FULL = 2


class Counters(dict[str, int]):
    """Counters of a runner; ``stats.replays`` is ``stats["replays"]``.

    ``replays`` counts batches that a graph served, ``eager`` those that one could have served and
    did not, ``ragged`` those whose requests have other numbers of tokens than a graph's rows;
    ``captures`` are graphs made, ``padded_rows`` rows that were computed without a request, and
    ``graph_bytes`` is the device memory that graphs hold now.
    """

    def __init__(self) -> None:
        super().__init__(replays=0, eager=0, captures=0, padded_rows=0, graph_bytes=0)
        self.ragged = 0

    def __getattr__(self, name: str) -> int:
        try:
            return self[name]
        except KeyError:
            raise AttributeError(name) from None


class GraphRunner:
    """What all runners share: buckets, padding, cutting back, fallback and counters.

    Parameters
    ----------
    step
        ``step(inputs, variant) -> output``: `inputs` are views of the buffers, by name, cut to the
        size that runs; the output is a tensor or a nest of tensors whose first dimension counts
        requests (or tokens). Asked for hidden states, ``step(inputs, variant, hidden) -> (output,
        hidden states)``.
    buffers
        Name -> :class:`Buffer`. A bare tensor pads with 0, one named ``seq_lens`` with
        `tokens_per_row`.
    batch_sizes
        Sizes to capture; see ``capture_batch_sizes``.
    variants
        Names of the step's versions (ways of sampling, with and without cross-attention): each size
        has all of them.
    later
        Those of them that are captured when they first come, since start-up need not wait for what
        is rare.
    tokens_per_row
        Tokens of each request in a step: 1 in decoding, the draft's length in verification.
    padding
        Whether a batch may run in a larger size.
    prepare
        ``prepare(host, size)``, called before each step with the padded inputs where the host can
        read them: what is planned outside the graph. May fill ``KEEP`` buffers.
    state
        Tensors that a step changes (recurrent, sampler, grammar); capturing puts back what they
        held.
    watch
        Gives further tensors whose addresses matter (weights, pools), for `debug`.
    hidden
        Hidden states that the graphs return from the start.
    eager
        ``eager(batch, variant, hidden, layers)``: how a batch runs that no graph serves; by
        default the step runs on buffers of the batch's size.
    outputs
        What the tensors of the step's output count in their first dimension, in the order of the
        nest: "requests", "tokens" or "nothing", which come back whole. By default those as long as
        the step has requests, or tokens, count them.
    owned
        Whether an output is the caller's own. False spares a copy; a call's output then holds
        until the next one.
    debug
        Before each replay compare the addresses of all inputs with those at capture.
    progress
        Show a bar while capturing.
    """

    def __init__(
        self,
        step: Callable[..., Any],
        buffers: Mapping[str, Buffer | Tensor],
        batch_sizes: Iterable[int],
        *,
        variants: Sequence[str] = ("greedy",),
        later: Sequence[str] = (),
        tokens_per_row: int = 1,
        padding: bool = True,
        prepare: Callable[[dict[str, Tensor], int], None] | None = None,
        state: Mapping[str, Tensor] | None = None,
        watch: Callable[[], Mapping[str, Tensor]] = dict,
        hidden: Hidden = Hidden.NULL,
        eager: Callable[..., Any] | None = None,
        outputs: Sequence[str] | None = None,
        owned: bool = True,
        debug: bool = False,
        progress: bool = True,
    ) -> None:
        self.step, self.prepare, self.padding, self.tokens_per_row = (
            step,
            prepare,
            padding,
            tokens_per_row,
        )
        self.variants, self.sizes = tuple(variants), sorted({int(size) for size in batch_sizes})
        self.later = tuple(v for v in self.variants if v in later)
        self.state = dict(state or {})
        self.watch = watch
        self.hidden = hidden
        self.layers: tuple[int, ...] = ()  # whose hidden states the graphs return; () is the last
        self.eager, self.outputs, self.owned = eager, outputs, owned
        self.debug, self.progress = debug, progress
        if not self.variants or tokens_per_row < 1 or (self.sizes and self.sizes[0] < 1):
            value = (self.variants, tokens_per_row, self.sizes)
            raise ArgumentError(
                "variants, tokens_per_row, batch_sizes",
                value,
                "need a name, and numbers of at least 1",
            )
        self.buffers = {
            name: b if isinstance(b, Buffer) else self._usual(name, b)
            for name, b in buffers.items()
        }
        per_request = [b for b in self.buffers.values() if b.padding is not Padding.KEEP]
        if not per_request:
            raise ArgumentError(
                "buffers", list(self.buffers), "must hold at least one that has a row per request"
            )
        self.rows = min(b.rows for b in per_request)
        if self.sizes and self.sizes[-1] > self.rows:
            raise ArgumentError(
                "batch_sizes", self.sizes, f"the buffers hold {self.rows} rows; make them larger"
            )
        self.device = per_request[0].tensor.device
        self.stats = Counters()
        self.run_step = _eagerly(step)
        self._loaded: tuple[Any, int] = (None, 0)  # whose inputs lie in the buffers, in which size
        self.captured_now: Container[tuple[str, int]] = ()  # graphs that can be replayed at once
        self._cached: dict[tuple[str, int, int], dict[str, Tensor]] = {}
        self._served: dict[str, tuple[dict[str, Buffer], list[Stage]]] = {}
        self._range: Any = torch.cuda.nvtx.range if self.device.type == "cuda" else nullcontext
        self._begin()

    def _usual(self, name: str, tensor: Tensor) -> Buffer:
        lengths = name == "seq_lens"
        return Buffer(tensor, Padding.FILL, self.tokens_per_row) if lengths else Buffer(tensor)

    def bucket(self, batch_size: int) -> int | None:
        """The size that a batch runs in; None when it runs eagerly."""
        return pick_size(self.sizes, batch_size, self.padding)

    def can_run(self, batch_size: int) -> bool:
        """Whether a batch of this size is replayed."""
        return (size := self.bucket(batch_size)) is not None and all(
            self._ready(v, size) for v in self.variants
        )

    def agree(self, batch_sizes: Sequence[int]) -> int | None:
        """The size in which several ranks with these batches all replay, or None: then all run
        eagerly."""
        size = self.bucket(max(batch_sizes))
        return size if self.padding or all(n in (0, size) for n in batch_sizes) else None

    @property
    def captured(self) -> list[tuple[str, int]]:
        """``(variant, size)`` of all graphs, those included that are made when they first come."""
        return [(v, size) for v in self.variants for size in self.sizes if self._ready(v, size)]

    @torch.no_grad()
    def __call__(
        self,
        batch: Any,
        variant: str | None = None,
        *,
        hidden: Hidden = Hidden.NULL,
        layers: Sequence[int] = (),
        size: int | None = None,
    ) -> Any:
        """Run the step on a batch.

        Parameters
        ----------
        batch
            A mapping, or an object with attributes, from buffer names to tensors of n rows; None
            for an idle rank's empty batch. Nothing in it is changed.
        variant
            One of `variants`; None takes the first.
        hidden, layers
            Hidden states wanted: of which tokens, and the outputs of which layers (ascending; none
            named: of the last). More than the graphs give captures them anew.
        size
            Run in this size (see :meth:`agree`) instead of the smallest that fits.

        Returns
        -------
        Any
            What the step returns, cut to n rows; the caller's own, not overwritten by later calls.
            With `hidden`, a pair (output, hidden states).

        Raises
        ------
        ArgumentError
            For an unknown variant, a batch that lacks an input, or a size that was not captured.
        """
        variant = self.variants[0] if variant is None else variant
        if variant not in self.variants:
            had = ", ".join(f"{v} × {n}" for v, n in self.captured) or "nothing"
            raise ArgumentError(
                "variant", variant, f"is not one of {self.variants}; captured: {had}"
            )
        if self._is_ragged(batch):
            self.stats.ragged += 1
            return self._run(batch, variant, hidden, tuple(layers))
        values, n = self._values(batch, variant)
        if size is not None and (size not in self.sizes or size < n):
            raise ArgumentError("size", size, f"must be one of {self.sizes} that holds {n} rows")
        size = self.bucket(n) if size is None else size
        if size is not None:
            self._make(variant, hidden, tuple(layers))
        if size is None or not self._ready(variant, size):
            self.stats["eager"] += 1
            return self._run(batch, variant, hidden, tuple(layers))
        with self._range("metadata"):
            inputs = self._load(values, size, variant)
        self._loaded = getattr(batch, "rows", None), size
        return self._replayed(variant, n, size, inputs, hidden, tuple(layers))

    def _replayed(
        self,
        variant: str,
        n: int,
        size: int,
        inputs: dict[str, Tensor],
        hidden: Hidden = Hidden.NULL,
        layers: tuple[int, ...] = (),
    ) -> Any:
        """Replay a graph on what its inputs hold: the output of its n real rows."""
        self.stats["replays"] += 1
        self.stats["padded_rows"] += size - n
        with self._range(f"{variant} × {size}"):
            out = self._replay(variant, size, inputs)
        return self._cut(self._less(out, hidden, layers), n, size)

    def again(self, batch: Any, variant: str) -> Any:
        """Run a batch that continues the one before: ``step.move_on`` turns the inputs of that one
        into its own where they lie, and the host loads only what a way of sampling brings.

        Returns
        -------
        Any
            As a call; None where other inputs lie in the buffers, or nothing moves them on.
        """
        rows, size = self._loaded
        move_on = getattr(self.step, "move_on", None)
        if rows is not batch.rows or move_on is None or (variant, size) not in self.captured_now:
            return None
        buffers = {k: b for k, b in self._serving(variant)[0].items() if b.variants}
        stages = _stages(buffers)
        for stage in stages:
            stage.turn()
        for name, buffer in buffers.items():
            buffer.load(getattr(batch, name), size)
        for stage in stages:
            stage.send()
        inputs, n = self._views(self._serving(variant)[0], variant, size), rows.shape[0]
        move_on(inputs, n)
        return self._replayed(variant, n, size, inputs)

    def _is_ragged(self, batch: Any) -> bool:
        """Whether requests of an engine's batch have other numbers of new tokens than a graph's
        rows, as prompts do."""
        new_lens = getattr(batch, "new_lens", None)
        if new_lens is None:
            return False
        if not batch.decode or self.tokens_per_row == 1:
            return not batch.decode
        return bool((new_lens != self.tokens_per_row).any())

    def _run(self, batch: Any, variant: str, hidden: Hidden, layers: tuple[int, ...]) -> Any:
        """Run a batch without a graph: as it is, or on buffers of its own size, made for it where
        it is too large."""
        self._loaded = None, 0
        if self.eager is not None:
            return self.eager(batch, variant, hidden, layers)
        values, n = self._values(batch, variant)
        size = n or (self.sizes or [1])[0]  # an empty batch needs a row to run on
        out = self.run_step(self._load(values, size, variant), variant, hidden, layers)
        return self._cut(out, n, size)

    def _less(self, out: Any, hidden: Hidden, layers: tuple[int, ...]) -> Any:
        """Of what a graph returns, the hidden states that are wanted."""
        if self.hidden is Hidden.NULL:
            return out
        out, states = out
        if hidden is Hidden.NULL:
            return out
        if self.hidden > hidden:
            states = states[self.tokens_per_row - 1 :: self.tokens_per_row]
        if self.layers != layers:
            states = states[:, [self.layers.index(layer) for layer in layers]]
        return out, states

    def views(self, size: int, variant: str | None = None) -> dict[str, Tensor]:
        """The static buffers as a step of this size sees them: all, or those that a variant
        reads."""
        buffers = self.buffers if variant is None else self._serving(variant)[0]
        return {name: buffer.view(size) for name, buffer in buffers.items()}

    # ---- what a kind of runner brings

    outputs_are_static = False  # whether a replay writes its output where the one before did

    def _begin(self) -> None:
        """Get ready, once what was given is checked."""

    def _ready(self, variant: str, size: int) -> bool:
        """Whether this graph can be replayed (or made when it is first needed)."""
        return False

    def _make(self, variant: str, hidden: Hidden, layers: tuple[int, ...]) -> None:
        """Make graphs that this call is the first to need."""
        missing = hidden and not set(layers) <= set(self.layers)
        if hidden > self.hidden or missing:
            self.layers = tuple(sorted({*self.layers, *layers}))
            self._capture(max(hidden, self.hidden))

    def _replay(self, variant: str, size: int, inputs: dict[str, Tensor]) -> Any:
        """Run a graph on loaded inputs."""
        raise NotImplementedError

    def _capture(self, hidden: Hidden) -> None:
        """Make the graphs anew, with these hidden states."""
        raise NotImplementedError

    # ---- in and out

    def _values(self, batch: Any, variant: str) -> tuple[dict[str, Tensor], int]:
        """The batch by buffer name, and its rows."""
        found, rows = {}, None
        for name, buffer in self._serving(variant)[0].items():
            value = batch.get(name) if isinstance(batch, Mapping) else getattr(batch, name, None)
            if value is not None:
                found[name] = value
            if batch is None or buffer.padding is Padding.KEEP:
                continue
            if value is None:
                raise ArgumentError(
                    "batch", name, "is an input of this runner and missing in the batch"
                )
            rows = value.shape[0] // buffer.per_row if rows is None else rows
            if value.shape[0] != rows * buffer.per_row:
                remedy = f"must have {rows * buffer.per_row} entries, {buffer.per_row} per request"
                raise ArgumentError(f"batch[{name!r}]", tuple(value.shape), remedy)
        return found, rows or 0

    def _load(self, values: Mapping[str, Tensor], size: int, variant: str) -> dict[str, Tensor]:
        """Write a batch into the buffers (into larger ones where it is too large), pad it, and plan
        it."""
        buffers, stages = self._serving(variant)
        if size > self.rows:
            buffers = {name: buffer.like(size) for name, buffer in buffers.items()}
            stages = _stages(buffers)
        for stage in stages:
            stage.turn()
        for name, buffer in buffers.items():
            buffer.load(values.get(name), size)
        if self.prepare is not None:
            self.prepare(self._views(buffers, variant, size, on_host=True), size)
        for stage in stages:
            stage.send()
        return self._views(buffers, variant, size)

    def _views(
        self, buffers: Mapping[str, Buffer], variant: str, size: int, on_host: bool = False
    ) -> dict[str, Tensor]:
        """The buffers as a step of this size sees them; on the host their blocks take turns."""
        side = 0
        if on_host:
            side = id(next(iter(buffers.values())).host)
        key = (variant, size, side)
        found = self._cached.get(key)
        if found is None or size > self.rows:
            found = {name: buffer.view(size, on_host) for name, buffer in buffers.items()}
            if size <= self.rows:
                self._cached[key] = found
        return found

    def _serving(self, variant: str) -> tuple[dict[str, Buffer], list[Stage]]:
        """The buffers that a variant reads, and their stages; worked out once."""
        if variant not in self._served:
            buffers = {
                name: buffer for name, buffer in self.buffers.items() if buffer.serves(variant)
            }
            self._served[variant] = buffers, _stages(buffers)
        return self._served[variant]

    def _cut(self, out: Any, n: int, size: int) -> Any:
        """The real rows of an output, in memory that no later call overwrites."""
        declared = None if self.outputs is None else iter((*self.outputs, "tokens"))

        def cut(tensor: Tensor) -> Tensor:
            length = tensor.shape[0] if tensor.dim() else -1
            per_row = {size: 1, size * self.tokens_per_row: self.tokens_per_row}.get(length, 0)
            if declared is not None and next(declared) == "nothing":
                per_row = 0
            mine = tensor[: n * per_row] if per_row else tensor
            static = self.owned and (self.outputs_are_static or self._is_static(tensor))
            return mine.clone() if static else mine

        return cut(out) if isinstance(out, Tensor) else tree_map_only(Tensor, cut, out)

    def _is_static(self, tensor: Tensor) -> bool:
        """Whether it lies in the memory of a buffer or of the state."""
        at = tensor.untyped_storage().data_ptr()
        static = (*(buffer.tensor for buffer in self.buffers.values()), *self.state.values())
        return any(t.untyped_storage().data_ptr() == at for t in static)


def _stages(buffers: Mapping[str, Buffer]) -> list[Stage]:
    return list({id(b.stage): b.stage for b in buffers.values() if b.stage is not None}.values())


def _eagerly(step: Callable[..., Any]) -> Callable[..., Any]:
    """The step itself: on ``views(size)`` after a replay it computes what the replay did.

    It is no method: what compiles it would then keep the runner, and the runner what was compiled.
    """

    def run_step(
        inputs: Mapping[str, Tensor],
        variant: str,
        hidden: Hidden = Hidden.NULL,
        layers: tuple[int, ...] = (),
    ) -> Any:
        if not hidden:
            return step(inputs, variant)
        return step(inputs, variant, hidden, layers) if layers else step(inputs, variant, hidden)

    return run_step
