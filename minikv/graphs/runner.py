"""One interface for a step that is replayed, compiled or simply run; callers need not know which it
was.

A step is a function of static buffers. Running it once per batch size and keeping what it launched
spares the host all the work of launching (CUDA Graphs; SGLang's and vLLM's graph runners), but
freezes addresses and shapes: batches are written into the buffers, padded to a captured size, and
cut back afterwards.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import nullcontext
from enum import IntEnum
from typing import Any

import torch
from torch import Tensor
from torch.utils._pytree import tree_map_only

from minikv.errors import ArgumentError
from minikv.graphs.buckets import pick_size
from minikv.graphs.buffers import Buffer, Inputs, Padding
from minikv.graphs.counters import Counters

LAST = (-1,)  # the last layer, where none is named


class Hidden(IntEnum):
    """Which hidden states a step returns beside its output: none, those of each request's last
    token, or all."""

    NULL = 0
    LAST = 1
    FULL = 2


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
        self.step, self.prepare, self.eager = step, prepare, eager
        self.variants, self.sizes = tuple(variants), sorted({int(size) for size in batch_sizes})
        self.later = tuple(v for v in self.variants if v in later)
        self.padding, self.tokens_per_row = padding, tokens_per_row
        self.state, self.watch = dict(state or {}), watch
        self.debug, self.progress = debug, progress
        self.hidden, self.layers = hidden, LAST  # which states the graphs return
        self.outputs, self.owned = outputs, owned
        if not self.variants or tokens_per_row < 1 or (self.sizes and self.sizes[0] < 1):
            raise ArgumentError(
                "variants, tokens_per_row, batch_sizes",
                (self.variants, tokens_per_row, self.sizes),
                "need a name, and numbers of at least 1",
            )
        self.buffers = {name: self._buffer(name, given) for name, given in buffers.items()}
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
        self._waiting: set[str] = set()  # variants to be captured when they first come
        named = self.buffers.items()
        self._inputs = {
            v: Inputs({name: b for name, b in named if b.serves(v)}) for v in self.variants
        }
        self._own = {  # what a variant reads beside what all read
            v: Inputs({name: b for name, b in inputs.buffers.items() if b.variants})
            for v, inputs in self._inputs.items()
        }
        self._range: Any = torch.cuda.nvtx.range if self.device.type == "cuda" else nullcontext

    def _buffer(self, name: str, given: Buffer | Tensor) -> Buffer:
        if isinstance(given, Buffer):
            return given
        if name == "seq_lens":
            return Buffer(given, Padding.FILL, self.tokens_per_row)
        return Buffer(given)

    def bucket(self, batch_size: int) -> int | None:
        """The size that a batch runs in; None when it runs eagerly."""
        return pick_size(self.sizes, batch_size, self.padding)

    def can_run(self, batch_size: int) -> bool:
        """Whether a batch of this size is replayed."""
        return self.replays and self.bucket(batch_size) is not None

    def agree(self, batch_sizes: Sequence[int]) -> int | None:
        """The size in which several ranks with these batches all replay, or None: then all run
        eagerly."""
        size = self.bucket(max(batch_sizes))
        return size if self.padding or all(n in (0, size) for n in batch_sizes) else None

    @property
    def captured(self) -> list[tuple[str, int]]:
        """``(variant, size)`` of all graphs, those included that are made when they first come."""
        return [(v, size) for v in self.variants for size in self.sizes if self.replays]

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
        wanted = tuple(layers) or LAST
        if self.eager is not None and self._is_ragged(batch):
            self._loaded = None, 0
            self.stats.ragged += 1
            return self.eager(batch, variant, hidden, wanted)
        values, n = self._values(batch, variant)
        if size is not None and (size not in self.sizes or size < n):
            raise ArgumentError("size", size, f"must be one of {self.sizes} that holds {n} rows")
        size = self.bucket(n) if size is None else size
        if self.replays and size is not None:
            self._make(variant, hidden, wanted)
        if size is None or not self.replays:
            self._loaded = None, 0
            self.stats["eager"] += 1
            if self.eager is not None:
                return self.eager(batch, variant, hidden, wanted)
            size = n or 1  # an empty batch needs a row to run on
            out = self.run_step(self._load(values, size, variant), variant, hidden, wanted)
            return self._cut(out, n, size)
        with self._range("metadata"):
            inputs = self._load(values, size, variant)
        self._loaded = getattr(batch, "rows", None), size
        return self._replayed(variant, n, size, inputs, (hidden, wanted))

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
        if rows is not batch.rows or move_on is None or variant in self._waiting:
            return None
        own, n = self._own[variant], rows.shape[0]
        own.load({name: getattr(batch, name) for name in own.buffers}, size)
        inputs = self._inputs[variant].views(size)
        move_on(inputs, n)
        return self._replayed(variant, n, size, inputs)

    def _replayed(
        self, variant: str, n: int, size: int, inputs: Any, states: Any = (Hidden.NULL, LAST)
    ) -> Any:
        """Replay a graph on what its inputs hold: the output of its n real rows."""
        self.stats["replays"] += 1
        self.stats["padded_rows"] += size - n
        with self._range(f"{variant} × {size}"):
            out = self._replay(variant, size, inputs)
        return self._cut(self._less(out, *states), n, size)

    def _is_ragged(self, batch: Any) -> bool:
        """Whether requests of an engine's batch have other numbers of new tokens than a graph's
        rows, as prompts do."""
        if self.tokens_per_row == 1:
            return not batch.decode
        return bool((batch.new_lens != self.tokens_per_row).any())

    def _less(self, out: Any, hidden: Hidden, layers: tuple[int, ...]) -> Any:
        """What is wanted out of what a graph returns."""
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
        """The static buffers as a step of this size sees them: all, or a variant's."""
        inputs = Inputs(self.buffers) if variant is None else self._inputs[variant]
        return inputs.views(size)

    # ---- what a kind of runner brings

    replays = False  # whether there are graphs, or there will be when they are first needed
    outputs_are_static = False  # whether a replay writes its output where the one before did

    def _make(self, variant: str, hidden: Hidden, layers: tuple[int, ...]) -> None:
        """Make graphs that this call is the first to need."""
        if not hidden:
            return
        known = self.layers if self.hidden else ()
        if hidden > self.hidden or not set(layers) <= set(known):
            self.layers = tuple(sorted({*known, *layers}))
            self._capture(max(hidden, self.hidden))

    def _replay(self, variant: str, size: int, inputs: dict[str, Tensor]) -> Any:
        """Run a graph on loaded inputs."""
        raise NotImplementedError

    def _capture(self, hidden: Hidden) -> None:
        """Make the graphs anew, with these hidden states."""
        raise NotImplementedError

    def _give_up(self, action: str, error: str, remedies: str) -> None:
        """From now on every step runs eagerly; say why, and what to try."""
        self.replays = False
        warnings.warn(
            f"{action} failed, so every step runs eagerly: {error}\nTry {remedies}; "
            "(3) graphs=False, which shows whether the step itself fails.",
            RuntimeWarning,
            stacklevel=5,
        )

    # ---- in and out

    def _values(self, batch: Any, variant: str) -> tuple[dict[str, Tensor], int]:
        """The batch by buffer name, and its rows."""
        found, rows = {}, None
        for name, buffer in self._inputs[variant].buffers.items():
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
        """Write a batch into the buffers, or into larger ones; pad it, and plan it."""
        inputs = self._inputs[variant]
        if size > self.rows:
            inputs = Inputs({name: b.like(size) for name, b in inputs.buffers.items()})
        return inputs.load(values, size, self.prepare)

    def _cut(self, out: Any, n: int, size: int) -> Any:
        """The real rows of an output, in memory that no later call overwrites."""
        counts = None if self.outputs is None else iter((*self.outputs, "tokens"))
        real = {size: n, size * self.tokens_per_row: n * self.tokens_per_row}

        def cut(tensor: Tensor) -> Tensor:
            mine, counted = tensor, counts is None or next(counts) != "nothing"
            if counted and tensor.dim() and tensor.shape[0] in real:
                mine = tensor[: real[tensor.shape[0]]]
            if self.owned and (self.outputs_are_static or self._is_static(tensor)):
                return mine.clone()
            return mine

        return tree_map_only(Tensor, cut, out) if not isinstance(out, Tensor) else cut(out)

    def _is_static(self, tensor: Tensor) -> bool:
        """Whether it lies in the memory of a buffer or of the state."""
        at = tensor.untyped_storage().data_ptr()
        static = (*(buffer.tensor for buffer in self.buffers.values()), *self.state.values())
        return any(t.untyped_storage().data_ptr() == at for t in static)


def _eagerly(step: Callable[..., Any]) -> Callable[..., Any]:
    """The step itself: on ``views(size)`` after a replay it computes what the replay did.

    It is no method: what compiles it would then keep the runner, and the runner what was compiled.
    """

    def run_step(
        inputs: Mapping[str, Tensor],
        variant: str,
        hidden: Hidden = Hidden.NULL,
        layers: tuple[int, ...] = LAST,
    ) -> Any:
        if not hidden:
            return step(inputs, variant)
        if layers == LAST:
            return step(inputs, variant, hidden)
        return step(inputs, variant, hidden, layers)

    return run_step
