"""What a step of the engine computes: token ids in, chosen tokens out.

There is one definition, :meth:`ModelStep.compute`, and three ways to run it: as it is
(:meth:`ModelStep.run`, any batch), recorded in a CUDA graph, or compiled. All numbers of a recorded
step lie in one staged block: token ids, positions, table rows, lengths, where each request's slots
begin, and the sampler's knobs with this step's random numbers. The graph lays out the slot lists
itself from the request table, so the host sends that block and the attention plan (and masks, where
a grammar rules), and replays.

A step can be launched before the one before it was read: a token id below 0 stands for the newest
token of its row, which that step left on the device (``RequestTable.last_tokens``). SGLang's and
vLLM's overlapped schedulers do the same.
"""

from __future__ import annotations

import itertools
import threading
from collections.abc import Sequence
from typing import Any
from weakref import WeakValueDictionary

import torch
from torch import Tensor

from minikv.attention.backend import AttentionBackend, Metadata, StepInputs
from minikv.engine.batch import Batch
from minikv.engine.sampling import DRAWS, KNOBS, MASKED, TOP, VARIANTS, sample
from minikv.engine.tokens import first_max, move_on, newest
from minikv.errors import StateError
from minikv.graphs.buckets import PADDED, capture_batch_sizes
from minikv.graphs.buffers import Buffer, Padding, rule, staged
from minikv.graphs.compiled import CompiledRunner
from minikv.graphs.cuda import CudaGraphRunner
from minikv.graphs.runner import GraphRunner, Hidden
from minikv.kernels.staging import Stage, to_device
from minikv.models.fused.decoder import fused_for


def step_runner(
    choice: Any, decoder: Any, attention: AttentionBackend, max_requests: int, progress: bool = True
) -> GraphRunner:
    """The runner of an engine's steps; its variants are the ways of sampling,
    :data:`minikv.engine.sampling.VARIANTS`, of which the first two are captured at once.

    Parameters
    ----------
    choice
        ``"auto"`` (graphs on CUDA with Triton attention), True (and ``torch.compile`` on the CPU)
        or False: every step runs as it is.
    decoder, attention
        The model, and the attention backend over its pool.
    max_requests
        Largest batch.

    Raises
    ------
    StateError
        For True on CUDA with PyTorch attention, which reads lengths on the host in every layer.
    """
    on_cuda, triton = attention.device.type == "cuda", attention.backend == "triton"
    if choice != "auto" and choice and on_cuda and not triton:
        raise StateError(
            "graphs=True: attention='torch' cannot be captured on CUDA; use attention='triton' or "
            "'auto'"
        )
    wanted = choice
    if choice == "auto":
        wanted = on_cuda and triton
    beyond = range(PADDED[-1] + 32, max_requests + 32, 32)
    sizes = capture_batch_sizes(max_requests, sizes=[*PADDED, *beyond] if beyond else None)
    kind: Any = GraphRunner
    step = ModelStep(decoder, attention)
    if not wanted:
        sizes = []
    elif on_cuda:
        kind, step = CudaGraphRunner, RecordedStep(decoder, attention)
    else:
        kind, step = CompiledRunner, CompiledStep(decoder, attention)
    return kind(
        step,
        decode_buffers(max_requests, attention.device, decoder.config.vocab_size),
        sizes,
        variants=VARIANTS,
        later=VARIANTS[2:],
        prepare=step.prepare,
        eager=step.run,
        owned=False,
        watch=step.watched,
        progress=progress,
    )


def decode_buffers(
    rows: int, device: torch.device, vocab_size: int | None = None
) -> dict[str, Buffer]:
    """The inputs of a decode step, named as in the engine's batches; ``kv_indptr`` [rows + 1]
    follows from lengths.

    With a vocabulary the sampler's, too: ``knobs`` [rows * 5] and the packed ``mask`` [rows *
    ceil(vocab / 32)], a block of its own, which is sent when a grammar needs it. Padded rows are
    greedy, and all tokens are allowed.
    """
    rules = {
        "token_ids": rule(),
        "positions": rule(),
        "rows": rule(Padding.RESERVED, 0),
        "seq_lens": rule(Padding.FILL, 1),
        "kv_indptr": rule(Padding.KEEP, extra=1),
    }
    knobs = {}
    if vocab_size is not None:
        knobs = {"knobs": rule(per_row=len(KNOBS), dtype=torch.float64, variants=DRAWS)}
    made = staged(rows, device, rules)
    made["out_slots"] = Buffer(torch.zeros(rows, dtype=torch.int64, device=device))
    if vocab_size is not None:
        made |= staged(rows, device, knobs)
        words = -(-vocab_size // 32)
        masks = Stage(rows * words, torch.device(device), torch.int32)
        made["mask"] = Buffer(masks.block, Padding.FILL, -1, words, stage=masks, variants=MASKED)
    return made


class ModelStep:
    """A step of the engine.

    Parameters
    ----------
    decoder, attention
        The model, and the attention backend over its pool.
    """

    def __init__(self, decoder: Any, attention: AttentionBackend) -> None:
        self.decoder, self.attention = decoder, attention
        self.fused = fused_for(decoder, attention)
        self.last_tokens = attention.table.last_tokens

    def run(
        self, batch: Batch, variant: str, hidden: Hidden = Hidden.NULL, layers: Sequence[int] = ()
    ) -> Any:
        """Run any batch as it is.

        Returns
        -------
        Tensor
            What ``sample`` gives, a row for each sampled request. Asked for hidden states, a pair
            with those, [requests or tokens, layers, hidden].
        """

        def there(tensor: Tensor | None) -> Any:
            return None if tensor is None else to_device(tensor, self.attention.device)

        metadata, keep = batch.metadata, self.kept(hidden, layers)
        if metadata is None:
            metadata = self.attention.prepare(batch)
        token_ids, positions, rows = map(there, (batch.token_ids, batch.positions, batch.rows))
        logits_at = None
        if not batch.decode:
            of_token = batch.rows.repeat_interleave(batch.new_lens)
            rows, logits_at = there(of_token[batch.logits_at]), there(batch.logits_at)
            token_ids = newest(token_ids, there(of_token), self.last_tokens)
        model = self.fused if self.fused and batch.decode else self.decoder
        out = self.compute(
            model, self.attention, metadata, token_ids, positions, rows, logits_at, keep,
            variant, there(batch.knobs), there(batch.mask),
        )  # fmt: skip
        if hidden is Hidden.LAST:
            return out[0], out[1][there(batch.new_lens.cumsum(0) - 1)]
        return out

    def kept(self, hidden: Hidden, layers: Sequence[int]) -> tuple[int, ...]:
        """The layers whose outputs a step keeps: those named (-1 is the last), or the last."""
        if hidden is Hidden.NULL:
            return ()
        names = {-1: len(self.decoder.layers) - 1}
        return tuple(names.get(layer, layer) for layer in layers or names)

    def compute(
        self,
        model: Any,
        attention: Any,
        metadata: Metadata | None,
        token_ids: Tensor,
        positions: Tensor,
        rows: Tensor,
        logits_at: Tensor | None,
        keep: tuple[int, ...],
        variant: str,
        knobs: Tensor | None,
        mask: Tensor | None,
    ) -> Any:
        """The step itself; everything lies on the device.

        Parameters
        ----------
        model, attention, metadata
            The decoder or its fused form, and through what it attends.
        token_ids, positions
            int64 [tokens]; where all rows have one token, an id below 0 is the row's newest token.
        rows
            int64 [sampled]: table row of each request that gets a token.
        logits_at
            int64 [sampled]: whose logits choose that token; None: each token's.
        keep
            Layers whose hidden states are returned, too.
        variant, knobs, mask
            How tokens are chosen, see :func:`minikv.engine.sampling.sample`.
        """
        if logits_at is None:
            token_ids = newest(token_ids, rows, self.last_tokens)
        found = model(token_ids, positions, attention, metadata, logits_at, keep)
        logits, states = found if keep else (found, None)
        chosen = self.choose(logits, rows, variant, knobs, mask)
        return (chosen, states) if keep else chosen

    def choose(self, logits: Tensor, rows: Tensor, variant: str, *inputs: Tensor | None) -> Tensor:
        """:func:`choose_tokens`; the next step finds them in its column."""
        return choose_tokens(self.last_tokens, logits, rows, variant, *inputs)

    def prepare(self, host: dict[str, Tensor], size: int) -> None:
        """The host's part of a recorded step: where slot lists begin, and the attention plan."""
        torch.cumsum(host["seq_lens"], 0, out=host["kv_indptr"][1:])
        self.attention.plan(host["seq_lens"])

    def watched(self) -> dict[str, Tensor]:
        """Weights, pool and table: a graph has their addresses, too."""
        pool = self.attention.pool
        keys = {f"pool.k({i})": pool.k(i) for i in range(pool.num_layers)}
        weights = dict(self.decoder.named_parameters())
        return {**weights, **keys, "table": self.attention.table.table}


class RecordedStep(ModelStep):
    """A decode step for CUDA graphs, by Triton attention."""

    def __call__(
        self,
        inputs: dict[str, Tensor],
        variant: str,
        hidden: Hidden = Hidden.NULL,
        layers: tuple[int, ...] = (),
    ) -> Any:
        rows = inputs["rows"]
        metadata = self.attention.prepare_static(rows, inputs["kv_indptr"], inputs["out_slots"])
        return self.compute(
            self.fused or self.decoder, self.attention, metadata,
            inputs["token_ids"], inputs["positions"], rows, None, self.kept(hidden, layers),
            variant, inputs.get("knobs"), inputs.get("mask"),
        )  # fmt: skip

    def move_on(self, inputs: dict[str, Tensor], n: int) -> None:
        """Turn the inputs of a step into those of the step after it; see
        :func:`minikv.engine.tokens.move_on`. The attention plan lags behind and stays right: a
        request's last part ends where the request ends now."""
        move_on(inputs, n, self.attention.table.table)


class CompiledStep(ModelStep):
    """A decode step for ``torch.compile``: attention and the choice of tokens are opaque
    operations, so the model is one graph.

    Inductor sees neither the pool nor how it is stored to and read, and cannot reorder either. Nor
    does it generate code for sampling, whose sums would then round differently: a draw is the eager
    one, to the bit.
    """

    def __init__(self, decoder: Any, attention: AttentionBackend) -> None:
        super().__init__(decoder, attention)
        self.opaque = Opaque(attention)

    def prepare(self, host: dict[str, Tensor], size: int) -> None:
        """Lengths are on the host anyway: the attention backend gets the whole batch there."""
        self.opaque.prepare(host)

    def choose(self, logits: Tensor, rows: Tensor, variant: str, *inputs: Tensor | None) -> Tensor:
        return torch.ops.minikv.choose(logits, rows, variant, *inputs, self.opaque.number)

    def __call__(
        self,
        inputs: dict[str, Tensor],
        variant: str,
        hidden: Hidden = Hidden.NULL,
        layers: tuple[int, ...] = (),
    ) -> Any:
        return self.compute(
            self.decoder, self.opaque, None,
            inputs["token_ids"], inputs["positions"], inputs["rows"], None,
            self.kept(hidden, layers), variant, inputs.get("knobs"), inputs.get("mask"),
        )  # fmt: skip


def choose_tokens(
    column: Tensor,
    logits: Tensor,
    rows: Tensor,
    variant: str,
    knobs: Tensor | None,
    mask: Tensor | None,
) -> Tensor:
    """Choose a token for each row of logits, and leave it in the column of newest tokens.

    Parameters
    ----------
    column, rows
        int64 `[table rows]` and `[n]`: the column, and the table row of each row of logits.
    logits, variant, knobs, mask
        As for :func:`minikv.engine.sampling.sample`, which says what is returned; "logits" chooses
        nothing.
    """
    if variant == "greedy":
        return first_max(logits, rows, column)
    out = sample(logits, variant, knobs, mask)
    if variant != "logits":
        tokens = out if out.dim() == 1 else out[:, 0].long()
        column.index_copy_(0, rows, tokens.clamp_min(0))
    return out


class Opaque:
    """An attention backend, and the choice of tokens, behind operations that ``torch.compile`` does
    not look into."""

    def __init__(self, attention: AttentionBackend) -> None:
        self.attention = attention
        self.metadata: Metadata | None = None
        # The least free number: an engine built anew has its predecessor's, and finds its code
        # cached.
        with _numbering:
            self.number = next(n for n in itertools.count() if n not in _opaque)
            _opaque[self.number] = self

    def prepare(self, host: dict[str, Tensor]) -> None:
        """Prepare a decode step for the padded inputs of a runner."""
        rows, seq_lens, out_slots = host["rows"], host["seq_lens"], host["out_slots"]
        step = StepInputs(rows, seq_lens - 1, seq_lens, out_slots, decode=True)
        self.metadata = self.attention.prepare(step)

    def forward(self, layer: int, q: Tensor, k: Tensor, v: Tensor, metadata: None) -> Tensor:
        """As ``AttentionBackend.forward``, for the step that was prepared last."""
        return torch.ops.minikv.attend(q, k, v, self.number, layer)


_numbering = threading.Lock()
_opaque: WeakValueDictionary[int, Opaque] = WeakValueDictionary()


# A step calls these for every layer, or at least once; ``torch.library.custom_op`` would add its
# own checks to each call.
torch.library.define(
    "minikv::attend", "(Tensor q, Tensor k, Tensor v, int backend, int layer) -> Tensor"
)
torch.library.define(
    "minikv::choose",
    "(Tensor logits, Tensor rows, str variant, Tensor? knobs, Tensor? mask, int step) -> Tensor",
)


@torch.library.impl("minikv::attend", "default")
def _attend(q: Tensor, k: Tensor, v: Tensor, backend: int, layer: int) -> Tensor:
    opaque = _opaque[backend]
    return opaque.attention.forward(layer, q, k, v, opaque.metadata).contiguous()  # type: ignore[arg-type]


@torch.library.register_fake("minikv::attend")
def _(q: Tensor, k: Tensor, v: Tensor, backend: int, layer: int) -> Tensor:
    return q.new_empty(q.shape[0], q.shape[1], v.shape[2])


@torch.library.impl("minikv::choose", "default")
def _choose(
    logits: Tensor, rows: Tensor, variant: str, knobs: Tensor | None, mask: Tensor | None, step: int
) -> Tensor:
    column = _opaque[step].attention.table.last_tokens
    out = choose_tokens(column, logits, rows, variant, knobs, mask)
    return out.clone() if out is logits else out


@torch.library.register_fake("minikv::choose")
def _(
    logits: Tensor, rows: Tensor, variant: str, knobs: Tensor | None, mask: Tensor | None, step: int
) -> Tensor:
    if variant == "logits":
        return torch.empty_like(logits)
    if variant in VARIANTS[3:]:
        width = 2 + 2 * min(TOP, logits.shape[1])
        return logits.new_empty(logits.shape[0], width, dtype=torch.float64)
    return logits.new_empty(logits.shape[0], dtype=torch.int64)
