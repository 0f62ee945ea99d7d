"""The engine's decode step as a graph: token ids in, sampled tokens out, nothing built on the way.

All numbers of a step lie in one staged block: token ids, positions, table rows, lengths, where each
request's slots begin, and the sampler's knobs with this step's random numbers. The slot lists are
laid out by the graph itself from the request table, so the host sends that block and the attention
plan (and masks, where a grammar rules), and replays.
"""

from __future__ import annotations

import itertools
import threading
from typing import Any
from weakref import WeakValueDictionary

import torch
from torch import Tensor
from torch.nn.functional import pad

from minikv.attention import AttentionBackend, LayerAttention
from minikv.engine.advance import advance
from minikv.engine.sampling import DRAWS, KNOBS, MASKED, TOP, VARIANTS, sample
from minikv.errors import StateError
from minikv.graphs.buckets import PADDED, capture_batch_sizes
from minikv.graphs.buffers import Buffer, Padding, Stage, rule, staged
from minikv.graphs.compiled import CompiledRunner
from minikv.graphs.cuda import CudaGraphRunner
from minikv.graphs.runner import GraphRunner
from minikv.models.fused.decoder import fused_for


def decode_runner(
    *,
    choice: Any,
    decoder: Any,
    attention: AttentionBackend,
    max_requests: int,
    progress: bool = True,
) -> GraphRunner | None:
    """The runner of an engine's decode batches; None where ``graphs="auto"`` rather decodes
    eagerly.

    Its variants are the ways of sampling, :data:`minikv.engine.sampling.VARIANTS`; the first two
    are captured at once.

    Parameters
    ----------
    choice
        ``"auto"`` (graphs on CUDA with Triton attention) or True (and ``torch.compile`` on the
        CPU).
    decoder, attention
        The model, and the attention backend over its pool.
    max_requests
        Largest batch.

    Raises
    ------
    StateError
        For True on CUDA with PyTorch attention, which reads lengths on the host in every layer.
    """
    on_cuda = attention.device.type == "cuda"
    if attention.backend != "triton" if on_cuda else choice == "auto":
        if choice == "auto":
            return None
        raise StateError(
            "graphs=True: attention='torch' cannot be captured on CUDA; use attention='triton' or 'auto'"
        )
    beyond = range(PADDED[-1] + 32, max_requests + 32, 32)
    sizes = capture_batch_sizes(max_requests, sizes=[*PADDED, *beyond] if beyond else None)
    step = CapturedDecode(decoder, attention) if on_cuda else CompiledDecode(decoder, attention)
    make = CudaGraphRunner if on_cuda else CompiledRunner
    buffers = decode_buffers(max_requests, attention.device, decoder.config.vocab_size)
    options = {
        "variants": VARIANTS,
        "later": VARIANTS[2:],
        "prepare": step.prepare,
        "watch": step.watched,
    }
    return make(step, buffers, sizes, progress=progress, **options)


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
    if vocab_size is not None:
        rules["knobs"] = rule(per_row=len(KNOBS), dtype=torch.float64, variants=DRAWS)
    made = staged(rows, device, rules)
    made["out_slots"] = Buffer(torch.zeros(rows, dtype=torch.int64, device=device))
    if vocab_size is not None:
        words = -(-vocab_size // 32)
        masks = Stage(rows * words, torch.device(device), torch.int32)
        made["mask"] = Buffer(masks.block, Padding.FILL, -1, words, stage=masks, variants=MASKED)
    return made


class CapturedDecode:
    """A decode step for CUDA graphs, by Triton attention."""

    lists_on_host = False  # whether the host has a part in laying out the slot lists of every step

    def __init__(self, decoder: Any, attention: AttentionBackend) -> None:
        self.decoder, self.attention, self.model = (
            decoder,
            attention,
            fused_for(decoder, attention) or decoder,
        )

    def prepare(self, host: dict[str, Tensor], size: int) -> None:
        """What the host works out before each replay: where slot lists begin, and the attention
        plan."""
        torch.cumsum(host["seq_lens"], 0, out=host["kv_indptr"][1:])
        self._plan(host)

    def advance(
        self,
        inputs: dict[str, Tensor],
        tokens: Tensor,
        rows: Tensor,
        seq_lens: Tensor,
        slots: Tensor | None = None,
    ) -> None:
        """Prepare the step that follows one of the same requests, in the same buffers.

        The attention plan, which may lag behind, is made anew only where a request begins a page.

        Parameters
        ----------
        inputs, tokens, slots
            As for :func:`minikv.engine.advance.advance`.
        rows, seq_lens
            int64 `[n]` on the CPU: table rows, and the new lengths.
        """
        n, size = rows.shape[0], inputs["rows"].shape[0]
        advance(inputs, tokens, self.attention.table.table, n, slots)
        if slots is not None or self.lists_on_host:
            rows, seq_lens = pad(rows, (0, size - n)), pad(seq_lens, (0, size - n), value=1)
            self._plan({"rows": rows, "seq_lens": seq_lens, "out_slots": inputs["out_slots"]})

    def _plan(self, host: dict[str, Tensor]) -> None:
        self.attention.plan_decode(host["seq_lens"])

    def __call__(self, inputs: dict[str, Tensor], variant: str) -> Tensor:
        self.attention.begin_decode_static(inputs["rows"], inputs["kv_indptr"], inputs["out_slots"])
        logits = self.model(inputs["token_ids"], inputs["positions"], self.attention)
        return sample(logits, variant, inputs.get("knobs"), inputs.get("mask"))

    def watched(self) -> dict[str, Tensor]:
        """Weights and pool: a graph has their addresses, too."""
        layers = range(self.attention.pool.num_layers)
        return {
            **dict(self.decoder.named_parameters()),
            **{f"pool.k({i})": self.attention.pool.k(i) for i in layers},
            "table": self.attention.table.table,
        }


class CompiledDecode(CapturedDecode):
    """A decode step for ``torch.compile``: attention and sampling are opaque operations, so the
    model is one graph.

    Inductor sees neither the pool nor how it is stored to and read, and cannot reorder either. Nor
    does it generate code for sampling, whose sums would then round differently: a draw is the eager
    one, to the bit.
    """

    lists_on_host = True

    def __init__(self, decoder: Any, attention: AttentionBackend) -> None:
        super().__init__(decoder, attention)
        self.opaque = OpaqueAttention(
            attention, [layer.self_attn.options for layer in decoder.layers]
        )

    def _plan(self, host: dict[str, Tensor]) -> None:
        """Lengths are on the host anyway: the batch begins here."""
        self.attention.begin_decode(host["rows"], host["seq_lens"], host["out_slots"])

    def __call__(self, inputs: dict[str, Tensor], variant: str) -> Tensor:
        logits = self.decoder(inputs["token_ids"], inputs["positions"], self.opaque)
        return (
            logits
            if variant == "logits"
            else _sample(logits, variant, inputs.get("knobs"), inputs.get("mask"))
        )


class OpaqueAttention:
    """An attention backend behind one operation that ``torch.compile`` does not look into."""

    def __init__(self, backend: AttentionBackend, options: list[LayerAttention]) -> None:
        self.backend, self.options = backend, options
        with _numbering:  # the least free number: an engine built anew has its predecessor's, and finds its code cached
            self.number = next(n for n in itertools.count() if n not in _backends)
            _backends[self.number] = self

    def forward(
        self, layer: int, q: Tensor, k: Tensor, v: Tensor, options: LayerAttention
    ) -> Tensor:
        """As ``AttentionBackend.forward``; the options are those that the layer had when this was
        made."""
        return torch.ops.minikv.attend(q, k, v, self.number, layer)


_numbering = threading.Lock()
_backends: WeakValueDictionary[int, OpaqueAttention] = WeakValueDictionary()


# A step calls this once per layer, and ``torch.library.custom_op`` would add its own checks to each
# call.
torch.library.define(
    "minikv::attend", "(Tensor q, Tensor k, Tensor v, int backend, int layer) -> Tensor"
)


@torch.library.impl("minikv::attend", "default")
def _attend(q: Tensor, k: Tensor, v: Tensor, backend: int, layer: int) -> Tensor:
    opaque = _backends[backend]
    return opaque.backend.forward(layer, q, k, v, opaque.options[layer]).contiguous()


@torch.library.register_fake("minikv::attend")
def _(q: Tensor, k: Tensor, v: Tensor, backend: int, layer: int) -> Tensor:
    return q.new_empty(q.shape[0], q.shape[1], v.shape[2])


@torch.library.custom_op("minikv::sample", mutates_args=())
def _sample(logits: Tensor, variant: str, knobs: Tensor | None, mask: Tensor | None) -> Tensor:
    return sample(logits, variant, knobs, mask)


@_sample.register_fake
def _(logits: Tensor, variant: str, knobs: Tensor | None, mask: Tensor | None) -> Tensor:
    if variant in VARIANTS[3:]:
        return logits.new_empty(
            logits.shape[0], 2 + 2 * min(TOP, logits.shape[1]), dtype=torch.float64
        )
    return logits.new_empty(logits.shape[0], dtype=torch.int64)
