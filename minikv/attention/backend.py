"""What a model calls: write the new keys and values to the pool, then attend, by whichever kernel
the batch needs.

``begin_extend`` or ``begin_decode`` is called once per batch and prepares what all layers share:
slot lists, the decode plan, and on the CPU how the batch is padded. Lengths come as CPU tensors, so
on CUDA nothing waits for the device; and what a decode step reads lies in fixed buffers that each
``begin_decode`` refills, so a captured graph can be replayed.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from minikv.attention import cpu
from minikv.attention.options import Options, check
from minikv.attention.slot_lists import build_kv_indices, lay_out_rows, to_device
from minikv.device import use_triton
from minikv.errors import ArgumentError, StateError

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


class AttentionBackend:
    """Attention of a whole model over one pool.

    Parameters
    ----------
    pool, table
        Where keys and values live, and the request table; rows hold the slots of prefix and new
        tokens before a batch begins.
    page_size
        Of the pool.
    q_heads
        Query heads of every layer.
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
        backend: str = "auto",
        deterministic: bool = False,
        max_requests: int = 64,
    ) -> None:
        self.pool, self.table, self.page_size, self.q_heads = pool, table, page_size, q_heads
        self.deterministic, self.max_requests = deterministic, max_requests
        self.device = table.table.device
        self.backend = "triton" if use_triton(backend, self.device) else "torch"
        self._options: dict[LayerAttention, Options] = {}
        self._parts: dict[
            tuple[int, int], list[cpu.Rectangle]
        ] = {}  # torch: window and temperature -> padding
        self._plans: dict[int, Any] = {}  # triton: window -> AttentionPlan
        self._buffers: tuple[Tensor, Tensor] | None = (
            None  # triton: the slot lists of decode batches
        )
        if self.backend == "triton":
            kind: dict[str, Any] = {"dtype": torch.int32, "device": self.device}
            entries = max_requests * table.table.shape[1]
            self._buffers = torch.zeros(max_requests + 1, **kind), torch.zeros(entries, **kind)
        self._extends: bool | None = None  # whether the batch is one of new prompt tokens

    def begin_extend(
        self, rows: Tensor, prefix_lens: Tensor, seq_lens: Tensor, out_slots: Tensor
    ) -> None:
        """Prepare a batch of new prompt tokens.

        Parameters
        ----------
        rows, prefix_lens, seq_lens
            int64 [n] on the CPU: table rows, cached tokens, and all tokens including the new ones.
        out_slots
            int64 [sum of new tokens] on the device: where the new keys and values go, requests end
            to end.
        """
        qo_indptr = torch.zeros(rows.shape[0] + 1, dtype=torch.int64)
        torch.cumsum(seq_lens - prefix_lens, 0, out=qo_indptr[1:])
        self._begin(True, out_slots, int(qo_indptr[-1]))
        self._max_extend_len = int((seq_lens - prefix_lens).max()) if rows.shape[0] else 0
        self._qo_indptr = to_device(qo_indptr, self.device)
        listed = seq_lens if self.deterministic else prefix_lens
        self._lists = build_kv_indices(self.table.table, rows, listed, backend=self.backend)
        self._prefix_lens = to_device(prefix_lens, self.device) if self.deterministic else None

    def begin_decode(self, rows: Tensor, seq_lens: Tensor, out_slots: Tensor) -> None:
        """Prepare one new token per request.

        Parameters
        ----------
        rows, seq_lens
            int64 [n] on the CPU; a length counts the new token.
        out_slots
            int64 [n] on the device: where each new key and value goes.
        """
        self._begin(False, out_slots, rows.shape[0])
        if self.backend == "triton":
            self.plan_decode(seq_lens)
        self._lists = build_kv_indices(
            self.table.table, rows, seq_lens, out=self._buffers, backend=self.backend
        )

    def plan_decode(self, seq_lens: Tensor) -> None:
        """The host's part of a Triton decode step: refill the plans for these lengths (int64 [n] on
        the CPU)."""
        if seq_lens.shape[0] > self.max_requests:
            raise ArgumentError(
                "rows", seq_lens.shape[0], f"this backend decodes up to {self.max_requests} at once"
            )
        self._seq_lens = seq_lens
        for plan in self._plans.values():
            plan.update(seq_lens)

    def begin_decode_static(self, rows: Tensor, kv_indptr: Tensor, out_slots: Tensor) -> None:
        """The device's part, which a graph captures: rows [n], kv_indptr [n + 1] and out_slots [n]
        are its inputs.

        The host reads no length here. ``plan_decode`` with the same lengths goes before each
        replay.
        """
        if self._buffers is None:
            raise StateError(
                "begin_decode_static: PyTorch attention plans on the host; use attention='triton'"
            )
        self._begin(False, out_slots, rows.shape[0])
        lay_out_rows(self.table.table, rows, kv_indptr, self._buffers[1], self.table.table.shape[1])
        self._lists = kv_indptr, self._buffers[1]

    def _begin(self, extends: bool, out_slots: Tensor, tokens: int) -> None:
        if out_slots.shape != (tokens,):
            raise ArgumentError(
                "out_slots", tuple(out_slots.shape), f"must be [{tokens}], one slot per new token"
            )
        self._extends, self.out_slots = extends, out_slots
        self._parts.clear()

    def forward(
        self, layer: int, q: Tensor, k: Tensor, v: Tensor, options: LayerAttention
    ) -> Tensor:
        """Write k and v to the pool and attend, for the batch that was begun last.

        Parameters
        ----------
        layer
            Index of the layer in the pool.
        q, k, v
            [tokens, q_heads, d_qk], [tokens, kv_heads, d_qk] and [tokens, kv_heads, d_v].
        options
            The layer's own, one object for the life of the model.

        Returns
        -------
        Tensor
            [tokens, q_heads, d_v] in q's dtype.
        """
        if self._extends is None:
            raise StateError("no batch was begun; call begin_extend or begin_decode first")
        attend = self.extend if self._extends else self.decode
        return attend(layer, q, k, v, options)

    def extend(
        self, layer: int, q: Tensor, k: Tensor, v: Tensor, options: LayerAttention
    ) -> Tensor:
        """:meth:`forward` after ``begin_extend``."""
        self._store(layer, q, k, v)
        opts, k_cache, v_cache = self._checked(layer, q, options)
        if self.backend == "triton":
            settings = {
                **self._settings(options),
                "max_extend_len": self._max_extend_len,
                "backend": "triton",
            }
            if self._prefix_lens is not None:
                from minikv.attention.api import extend_attention_unified

                lists = (self._qo_indptr, *self._lists, self._prefix_lens)
                return extend_attention_unified(q, k_cache, v_cache, *lists, **settings)  # type: ignore[return-value]
            from minikv.attention.api import extend_attention

            return extend_attention(
                q, k, v, k_cache, v_cache, self._qo_indptr, *self._lists, **settings
            )  # type: ignore[return-value]
        new = {"k": k, "v": v} if self._prefix_lens is None else {}
        lists = {
            "qo_indptr": self._qo_indptr,
            "new_keys": bool(new),
        }
        parts = self._padded(opts, q, k_cache, v_cache, **lists)
        return cpu.run(parts, q, k_cache, v_cache, opts, **new)  # type: ignore[return-value]

    def decode(
        self, layer: int, q: Tensor, k: Tensor, v: Tensor, options: LayerAttention
    ) -> Tensor:
        """:meth:`forward` after ``begin_decode``."""
        self._store(layer, q, k, v)
        return self.decode_stored(layer, q, options)

    def decode_stored(
        self, layer: int, q: Tensor, options: LayerAttention, early: bool = False
    ) -> Tensor:
        """:meth:`decode` where the new keys and values lie in the pool, at ``out_slots``, already.

        `early` as in ``decode_attention``: something other than laying out the batch's lists was
        launched last.
        """
        opts, k_cache, v_cache = self._checked(layer, q, options)
        if self.backend == "triton":
            from minikv.attention.api import decode_attention

            plan = self._plan(options.sliding_window, k_cache, v_cache)
            return decode_attention(
                q,
                k_cache,
                v_cache,
                *self._lists,
                plan=plan,
                backend="triton",
                early=early,
                **self._settings(options),
            )  # type: ignore[return-value]
        parts = self._padded(opts, q, k_cache, v_cache)
        return cpu.run(parts, q, k_cache, v_cache, opts)  # type: ignore[return-value]

    def _store(self, layer: int, q: Tensor, k: Tensor, v: Tensor) -> None:
        """Write the new keys and values, before anything reads them."""
        if q.shape[0] != self.out_slots.shape[0]:
            raise ArgumentError(
                "q",
                tuple(q.shape),
                f"the batch that was begun has {self.out_slots.shape[0]} tokens",
            )
        self.pool.set_kv(layer, self.out_slots, k, v)

    def _checked(
        self, layer: int, q: Tensor, options: LayerAttention
    ) -> tuple[Options, Tensor, Tensor]:
        """The options of a layer, checked when it first comes, and its keys and values."""
        k_cache, v_cache = self.pool.k(layer), self.pool.v(layer)
        opts = self._options.get(options)
        if opts is None:
            arguments = {"q": q, "k_cache": k_cache, "v_cache": v_cache}
            arguments |= {"kv_indptr": self._lists[0], "kv_indices": self._lists[1]}
            if self._extends:
                arguments["qo_indptr"] = self._qo_indptr
            opts = self._options[options] = check({**arguments, **self._settings(options)})
        return opts, k_cache, v_cache

    def _settings(self, options: LayerAttention) -> dict[str, Any]:
        return {**vars(options), "page_size": self.page_size}

    def _padded(
        self, opts: Options, q: Tensor, k_cache: Tensor, v_cache: Tensor, **lists: Any
    ) -> list[cpu.Rectangle]:
        key = (opts.sliding_window, opts.xai_temperature_len)
        if key not in self._parts:
            self._parts[key] = cpu.plan(q, k_cache, v_cache, *self._lists, opts, **lists)
        return self._parts[key]

    def _plan(self, window: int, k_cache: Tensor, v_cache: Tensor) -> Any:
        """The decode plan of layers with this window; made at their first step, then refilled by
        ``begin_decode``."""
        if window not in self._plans:
            from minikv.attention.plan import AttentionPlan

            splits = DETERMINISTIC_SPLITS if self.deterministic else None
            with torch.inference_mode(False):  # its buffers outlive the step that makes them
                plan = AttentionPlan(
                    self.max_requests,
                    self.q_heads,
                    k_cache,
                    v_cache,
                    num_kv_splits=splits,
                    sliding_window=window,
                )
            self._plans[window] = plan.update(self._seq_lens)
        return self._plans[window]
