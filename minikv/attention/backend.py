"""What a model calls: write the new keys and values to the pool, then attend, by whichever kernel
the step needs.

``prepare`` is called once for a step and gives what all its layers share: slot lists, the decode
plan, and on the CPU how the batch is padded. Lengths come as CPU tensors, so on CUDA nothing waits
for the device. ``prepare_static`` does the same for a step that a graph records: its inputs are
buffers that lie still, and ``plan`` refreshes the host's part before each replay.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import Tensor

from minikv.attention import cpu
from minikv.attention.api import decode_attention, extend_attention, extend_attention_unified
from minikv.attention.options import Options, check
from minikv.attention.plan import AttentionPlan
from minikv.attention.slot_lists import build_kv_indices, lay_out_rows
from minikv.errors import ArgumentError, StateError
from minikv.kernels.choice import use_triton
from minikv.kernels.staging import to_device

if TYPE_CHECKING:
    from minikv.memory import KVPool, MLAPool, RequestTable

DETERMINISTIC_SPLITS = 8


@dataclass(frozen=True, eq=False)
class LayerAttention:
    """The options of one layer of a model.

    Attributes
    ----------
    sm_scale, logit_cap, sinks, xai_temperature_len
        As in ``extend_attention``.
    sliding_window
        Keys seen minus one (a configuration's window of n is n - 1 here); -1 for none.
    """

    sm_scale: float | None = None
    logit_cap: float = 0.0
    sliding_window: int = -1
    sinks: Tensor | None = None
    xai_temperature_len: int = -1


class StepInputs(NamedTuple):
    """What a backend needs to know of a step; an engine's batch has the same attributes.

    ``rows, prefix_lens, seq_lens`` are int64 [n] on the CPU: table rows, tokens with K/V before the
    step, and after it. ``out_slots`` (int64 [new tokens], on the device) take the new keys and
    values, requests end to end. ``decode`` says that every request decodes one token.
    """

    rows: Tensor
    prefix_lens: Tensor
    seq_lens: Tensor
    out_slots: Tensor
    decode: bool = False

    @property
    def new_lens(self) -> Tensor:
        """New tokens of each request."""
        return self.seq_lens - self.prefix_lens


@dataclass(eq=False)
class Metadata:
    """What all layers of one step share.

    Attributes
    ----------
    out_slots
        int64 [tokens] on the device: where the new keys and values go, requests end to end.
    kv_indptr, kv_indices
        Listed slots of each request: all its tokens in a decode step and where one loop reads
        them, else its prefix.
    qo_indptr
        int [n + 1] on the device: where each request's new tokens begin; None in a decode step,
        which has one for each.
    prefix_lens
        int64 [n] on the device where one loop reads prefix and new tokens, else None.
    max_extend_len
        Most new tokens of a request.
    custom_mask, mask_indptr
        As in ``extend_attention``: what the tokens of drafted trees see; None: causal.
    rectangles
        On the CPU: (window, temperature) of layers -> how the batch is padded for them.
    """

    out_slots: Tensor
    kv_indptr: Tensor
    kv_indices: Tensor
    qo_indptr: Tensor | None = None
    prefix_lens: Tensor | None = None
    max_extend_len: int = 1
    custom_mask: Tensor | None = None
    mask_indptr: Tensor | None = None
    rectangles: dict[tuple[int, int], list[cpu.Rectangle]] = field(default_factory=dict)


class AttentionBackend:
    """Attention of a whole model over one pool.

    Parameters
    ----------
    pool, table
        Where keys and values live, and the request table; rows hold the slots of prefix and new
        tokens before a step is prepared.
    page_size
        Of the pool.
    q_heads
        Query heads of every layer.
    layers
        The options of each layer; by default no layer has any.
    backend
        "triton", "torch" or "auto": Triton on CUDA.
    deterministic
        With Triton, a request gets the same bits whatever else is in the batch and however its
        prompt is cut: one loop over prefix and new tokens, and as many decode splits for every
        request. (PyTorch promises tolerance only.)
    max_requests
        Largest decode batch, padding included.
    """

    def __init__(
        self,
        pool: KVPool | MLAPool,
        table: RequestTable,
        *,
        page_size: int,
        q_heads: int,
        layers: Sequence[LayerAttention] | None = None,
        backend: str = "auto",
        deterministic: bool = False,
        max_requests: int = 64,
    ) -> None:
        self.pool, self.table, self.page_size, self.q_heads = pool, table, page_size, q_heads
        self.layers = list(layers or [LayerAttention()] * pool.num_layers)
        self.deterministic, self.max_requests = deterministic, max_requests
        self.device = table.table.device
        self.backend = "triton" if use_triton(backend, self.device) else "torch"
        self._options: dict[LayerAttention, Options] = {}
        self._plans: dict[int, AttentionPlan] = {}  # triton: window -> plan of decode steps
        self._seq_lens = torch.zeros(0, dtype=torch.int64)  # what the plans were made for
        self._buffers: tuple[Tensor, Tensor] | None = None  # triton: the slot lists of graphs
        if self.backend == "triton":
            kind: dict[str, Any] = {"dtype": torch.int32, "device": self.device}
            entries = max_requests * table.table.shape[1]
            self._buffers = torch.zeros(max_requests + 1, **kind), torch.zeros(entries, **kind)

    def prepare(self, batch: Any) -> Metadata:
        """Work out what the layers of a step share.

        Parameters
        ----------
        batch
            :class:`StepInputs`, or an engine's batch; perhaps with ``custom_mask`` and
            ``mask_indptr`` for drafted trees.

        Raises
        ------
        ArgumentError
            For another number of slots than of new tokens.
        """
        new = batch.new_lens
        out_slots = batch.out_slots
        n = batch.rows.shape[0]
        tokens = int(new.sum())
        if out_slots.shape != (tokens,):
            shape = tuple(out_slots.shape)
            raise ArgumentError("out_slots", shape, f"must be [{tokens}], one slot per new token")
        table = self.table.table
        if batch.decode:
            self.plan(batch.seq_lens)
            lists = build_kv_indices(
                table, batch.rows, batch.seq_lens, out=self._buffers, backend=self.backend
            )
            return Metadata(out_slots, *lists)
        qo_indptr = torch.zeros(n + 1, dtype=torch.int64)
        torch.cumsum(new, 0, out=qo_indptr[1:])
        listed = batch.seq_lens if self.deterministic else batch.prefix_lens
        lists = build_kv_indices(table, batch.rows, listed, backend=self.backend)
        return Metadata(
            out_slots,
            *lists,
            qo_indptr=to_device(qo_indptr, self.device),
            prefix_lens=to_device(batch.prefix_lens, self.device) if self.deterministic else None,
            max_extend_len=int(new.max()) if n else 0,
            custom_mask=getattr(batch, "custom_mask", None),
            mask_indptr=getattr(batch, "mask_indptr", None),
        )

    def plan(self, seq_lens: Tensor) -> None:
        """The host's part of a decode step: refill the plans for these lengths (int64 [n] on the
        CPU). A graph's step needs it before each replay."""
        if self.backend != "triton":
            return
        if seq_lens.shape[0] > self.max_requests:
            remedy = f"this backend decodes up to {self.max_requests} at once"
            raise ArgumentError("rows", seq_lens.shape[0], remedy)
        self._seq_lens = seq_lens
        for plan in self._plans.values():
            plan.update(seq_lens)

    def prepare_static(
        self,
        rows: Tensor,
        kv_indptr: Tensor,
        out_slots: Tensor,
        tokens_per_row: int = 1,
        prefix_lens: Tensor | None = None,
    ) -> Metadata:
        """:meth:`prepare` for a step that a graph records; the host reads nothing.

        Parameters
        ----------
        rows, kv_indptr
            int [n] and [n + 1] on the device: table rows, and where each request's list begins. A
            list holds all tokens of a request where `tokens_per_row` is 1 or one loop reads them
            (`deterministic`), else its prefix.
        out_slots
            int64 [n * tokens_per_row] on the device; page 0 for the tokens of a row that has fewer
            new ones. Those come last in the row, so no other token sees them.
        tokens_per_row
            New tokens of each request: 1 for a decode step, the draft's size for verification.
        prefix_lens
            int [n] on the device: tokens before the step, for one loop over all of them.
        """
        if self._buffers is None:
            raise StateError(
                "prepare_static: PyTorch attention plans on the host; use attention='triton'"
            )
        lay_out_rows(self.table.table, rows, kv_indptr, self._buffers[1], self.table.table.shape[1])
        found = Metadata(out_slots, kv_indptr, self._buffers[1], max_extend_len=tokens_per_row)
        if tokens_per_row > 1:
            ends = tokens_per_row * torch.arange(rows.shape[0] + 1, device=self.device)
            found.qo_indptr = ends
            found.prefix_lens = prefix_lens if self.deterministic else None
        return found

    def forward(self, layer: int, q: Tensor, k: Tensor, v: Tensor, metadata: Metadata) -> Tensor:
        """Write k and v to the pool and attend.

        Parameters
        ----------
        layer
            Index of the layer.
        q, k, v
            [tokens, q_heads, d_qk], [tokens, kv_heads, d_qk] and [tokens, kv_heads, d_v].
        metadata
            What :meth:`prepare` gave for exactly these tokens.

        Returns
        -------
        Tensor
            [tokens, q_heads, d_v] in q's dtype.
        """
        if q.shape[0] != metadata.out_slots.shape[0]:
            tokens = metadata.out_slots.shape[0]
            raise ArgumentError("q", tuple(q.shape), f"the step was prepared for {tokens} tokens")
        self.pool.set_kv(layer, metadata.out_slots, k, v)
        if metadata.qo_indptr is None:
            return self.decode(layer, q, metadata)
        k_cache, v_cache = self.pool.k(layer), self.pool.v(layer)
        lists = (metadata.qo_indptr, metadata.kv_indptr, metadata.kv_indices)
        new = {"k": k, "v": v} if metadata.prefix_lens is None else {}
        if self.backend == "torch":
            return self._on_cpu(layer, q, metadata, **new)
        settings = {
            **self._settings(layer, metadata),
            "max_extend_len": metadata.max_extend_len,
            "backend": "triton",
        }
        if metadata.prefix_lens is not None:
            return extend_attention_unified(
                q, k_cache, v_cache, *lists, metadata.prefix_lens, **settings
            )  # type: ignore[return-value]
        return extend_attention(q, k, v, k_cache, v_cache, *lists, **settings)  # type: ignore[return-value]

    def decode(self, layer: int, q: Tensor, metadata: Metadata, early: bool = False) -> Tensor:
        """:meth:`forward` of a decode step whose keys and values lie in the pool already.

        `early` as in ``decode_attention``: something other than laying out the batch's lists was
        launched last.
        """
        if self.backend == "torch":
            return self._on_cpu(layer, q, metadata)
        k_cache, v_cache = self.pool.k(layer), self.pool.v(layer)
        return decode_attention(
            q,
            k_cache,
            v_cache,
            metadata.kv_indptr,
            metadata.kv_indices,
            plan=self._plan(self.layers[layer].sliding_window, k_cache, v_cache),
            backend="triton",
            early=early,
            **self._settings(layer),
        )  # type: ignore[return-value]

    def _on_cpu(self, layer: int, q: Tensor, metadata: Metadata, **new: Tensor) -> Tensor:
        """By PyTorch; how a batch is padded is worked out for the first of the layers that are
        alike."""
        k_cache, v_cache = self.pool.k(layer), self.pool.v(layer)
        lists = (metadata.kv_indptr, metadata.kv_indices)
        settings, options = self._settings(layer, metadata), self.layers[layer]
        opts = None if "custom_mask" in settings else self._options.get(options)
        if opts is None:
            arguments = {"q": q, "k_cache": k_cache, "v_cache": v_cache}
            arguments |= dict(zip(("kv_indptr", "kv_indices"), lists, strict=True))
            given = {"qo_indptr": metadata.qo_indptr, "prefix_lens": metadata.prefix_lens, **new}
            arguments |= {name: tensor for name, tensor in given.items() if tensor is not None}
            opts = self._options[options] = check({**arguments, **settings})
        key = (opts.sliding_window, opts.xai_temperature_len)
        if key not in metadata.rectangles:
            metadata.rectangles[key] = cpu.plan(
                q, k_cache, v_cache, *lists, opts, qo_indptr=metadata.qo_indptr, new_keys=bool(new)
            )
        return cpu.run(metadata.rectangles[key], q, k_cache, v_cache, opts, **new)  # type: ignore[return-value]

    def _settings(self, layer: int, metadata: Metadata | None = None) -> dict[str, Any]:
        settings = {**vars(self.layers[layer]), "page_size": self.page_size}
        if metadata is not None and metadata.custom_mask is not None:
            settings["custom_mask"] = metadata.custom_mask
            settings["mask_indptr"] = metadata.mask_indptr
        return settings

    def _plan(self, window: int, k_cache: Tensor, v_cache: Tensor) -> AttentionPlan:
        """The decode plan of layers with this window; made at their first step, then refilled by
        :meth:`plan`."""
        if window not in self._plans:
            splits = DETERMINISTIC_SPLITS if self.deterministic else None
            with torch.inference_mode(False):  # its buffers outlive the step that makes them
                made = AttentionPlan(
                    self.max_requests,
                    self.q_heads,
                    k_cache,
                    v_cache,
                    num_kv_splits=splits,
                    sliding_window=window,
                )
            self._plans[window] = made.update(self._seq_lens)
        return self._plans[window]
