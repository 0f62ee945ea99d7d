"""The engine: prompts in, text out. The loop is :meth:`LLM._advance`; for `generate`, `ahead.py`
overlaps its steps."""

from __future__ import annotations

import itertools
from collections import deque
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import torch

from minikv import models
from minikv.attention.backend import AttentionBackend
from minikv.device import pick_device
from minikv.engine.ahead import Ahead
from minikv.engine.batch import Batch
from minikv.engine.build import (
    KV_DTYPES,
    build_pool,
    check_options,
    check_room,
    check_seed,
    pick_context,
    pick_runner,
)
from minikv.engine.events import EventLog
from minikv.engine.grammar import Grammars
from minikv.engine.params import SamplingParams
from minikv.engine.prompts import prompt_ids, split_prompts
from minikv.engine.request import Delta, Output, Request, State
from minikv.engine.sampler import Sampler
from minikv.engine.scheduler import Scheduler
from minikv.engine.stats import Stats
from minikv.engine.text import TextStream
from minikv.engine.undivided import shielded
from minikv.errors import ArgumentError
from minikv.memory import PagedAllocator, RequestTable
from minikv.models.files.load import pick_dtype
from minikv.models.fused.decoder import fused_for
from minikv.prefix import RadixCache


class LLM:
    """A language model with a paged, prefix-shared KV cache.

    Parameters
    ----------
    model
        Preset ("smollm2-135m", "tiny"), local folder or GGUF file, or hub id.
    device, dtype, kv_dtype
        "auto" takes CUDA where there is one, and bf16 (sm80 and newer), fp16 (older GPUs) or fp32
        (CPU); the pool's dtype follows the model's, or "fp8".
    page_size, kv_tokens, kv_memory
        Tokens per page; size of the KV pool in tokens, or in bytes (both None: a quarter of the
        free memory, on a CPU at most 2 GiB, and no more than `max_requests` of the longest context
        need).
    max_requests, max_context, chunk_tokens
        Most requests that run at once; most tokens of a request that have K/V (None: the model's;
        the last token of an output needs none); most tokens of one extend step.
    policy, mixed
        Order of admission: "fcfs", "lpm" (longest prefix match) or "dfs-weight" (the heaviest
        branch of the prefix tree first); whether extend steps decode the running requests, too,
        whose tokens then count for `chunk_tokens`.
    eviction, prefix_cache
        What leaves the prefix cache first: "lru", "lfu", "fifo", "mru", "filo" or "priority"; False
        shares nothing.
    graphs
        True decodes through captured graphs on CUDA, and through ``torch.compile`` on a CPU, which
        takes half a minute at first and seconds whenever a new batch size or way of sampling comes;
        "auto" does so on CUDA only.
    attention, deterministic
        Attention kernels ("auto", "torch", "triton"); with Triton's, attention that does not depend
        on the batch, to the bit (matrix products still choose their own way by batch size, and may
        round otherwise).
    speculative
        Not there yet; must be None.
    seed
        Random weights of "tiny", and requests that bring no seed.
    event_log
        A file to which one line of JSON per event is appended (see :mod:`minikv.engine.events`):
        one for each engine, whose requests are numbered from 1.

    Examples
    --------
    >>> llm = LLM("tiny", kv_tokens=256, page_size=4)
    >>> [out] = llm.generate([1, 2, 3, 4, 5], SamplingParams(max_tokens=4, temperature=0, ignore_eos=True))
    >>> len(out.token_ids), out.finish_reason, out.cached_tokens
    (4, 'length', 0)
    >>> llm.generate([1, 2, 3, 4, 5])[0].cached_tokens
    4
    """

    def __init__(
        self,
        model: str = "smollm2-135m",
        device: str = "auto",
        dtype: Any = "auto",
        kv_dtype: Any = "auto",
        page_size: int = 16,
        kv_tokens: int | None = None,
        kv_memory: float | None = None,
        max_requests: int = 64,
        max_context: int | None = None,
        chunk_tokens: int = 512,
        policy: str = "lpm",
        eviction: str = "lru",
        prefix_cache: bool = True,
        graphs: Any = "auto",
        attention: str = "auto",
        deterministic: bool = False,
        speculative: Any = None,
        seed: int = 0,
        *,
        mixed: bool = False,
        event_log: str | Path | None = None,
        progress: bool = True,
    ) -> None:
        page_size, kv_tokens, kv_memory, max_requests, max_context, chunk_tokens = check_options(
            attention, graphs, page_size=page_size, kv_tokens=kv_tokens, kv_memory=kv_memory,
            max_requests=max_requests, max_context=max_context, chunk_tokens=chunk_tokens,
        )  # fmt: skip
        if speculative is not None:
            raise ArgumentError(
                "speculative", speculative, "speculative decoding is not implemented yet; pass None"
            )
        self.seed, self.device, self._stats = check_seed(seed), pick_device(device), Stats()
        self.events = EventLog(event_log, [self._stats.update])
        dtype = pick_dtype("dtype", dtype, self.device)
        kv_dtype = (
            dtype
            if kv_dtype == "auto"
            else pick_dtype("kv_dtype", kv_dtype, self.device, KV_DTYPES)
        )
        loaded = models.load(
            model, device=self.device, dtype=dtype, seed=self.seed, progress=progress
        )
        self.decoder, self.tokenizer, self.config = loaded.decoder, loaded.tokenizer, loaded.config
        config = loaded.config
        context = pick_context(max_context, config.max_context)
        self.pool, size = build_pool(
            config,
            page_size,
            kv_dtype,
            self.device,
            kv_tokens,
            kv_memory,
            most=max_requests * context,
        )
        self.allocator = PagedAllocator(size, page_size, self.device)
        check_room("max_requests", max_requests, 4 * (max_requests + 1) * context, self.device)
        self.table = RequestTable(max_requests, context, self.device)
        self.cache = RadixCache(
            page_size, self.allocator, self.table, eviction=eviction, disable=not prefix_cache
        )
        self.cache.decode = self.tokenizer
        self.attention = AttentionBackend(
            self.pool, self.table, page_size=page_size, q_heads=config.q_heads,
            backend=attention, deterministic=deterministic, max_requests=max_requests,
        )  # fmt: skip
        self.scheduler = Scheduler(
            self.cache, self.allocator, self.table,
            max_requests=max_requests, chunk_tokens=chunk_tokens, policy=policy, mixed=mixed,
            emit=self.events, on_token=self._text_of,
        )  # fmt: skip
        self.sampler, self.grammars = Sampler(), Grammars(self.tokenizer, config.vocab_size)
        self.runner = pick_runner(
            graphs, self._decode_step, decoder=self.decoder, attention=self.attention, max_requests=max_requests,
            progress=progress,
        )  # fmt: skip
        self._fused = (
            None if hasattr(self.runner, "step") else fused_for(self.decoder, self.attention)
        )  # or its own
        self._ahead, self._ids = Ahead(self, max_requests), itertools.count(1)
        self._news: deque[Delta] = deque()  # for step(): deltas of requests that add() took

    def __repr__(self) -> str:
        now = self.scheduler
        running, waiting = len(now.running) + len(now.prefilling), len(now.waiting)
        return f"LLM({self.config.architecture}, {running} requests running, {waiting} waiting, {self.allocator})"

    # ---- whole prompts

    def generate(
        self, prompts: Any, params: SamplingParams | Sequence[SamplingParams] | None = None
    ) -> list[Output]:
        """Run prompts to their ends; other requests in the engine go on meanwhile.

        Parameters
        ----------
        prompts
            A text, a list of token ids, a chat (list of messages), or a list of those.
        params
            One for all, or one for each; default ``SamplingParams()``.

        Returns
        -------
        list of Output
            In the order of the prompts. A prompt that cannot run has ``finish_reason="error"`` and
            says why in `error`.
        """
        prompts = split_prompts(prompts)
        given = SamplingParams() if params is None else params
        each: list[Any] = (
            list(given) if isinstance(given, (list, tuple)) else [given] * len(prompts)
        )
        if len(each) != len(prompts) or not all(isinstance(p, SamplingParams) for p in each):
            raise ArgumentError(
                "params",
                params,
                f"give one SamplingParams, or a list of {len(prompts)}, one per prompt",
            )
        results = [self._try_request(prompt, p) for prompt, p in zip(prompts, each, strict=True)]
        pending = [r for r in results if isinstance(r, Request)]
        try:
            for request in pending:
                self.scheduler.add(request)
            while pending := [r for r in pending if r.state is not State.FINISHED]:
                self._ahead.advance()
        finally:  # an interrupt leaves nothing behind
            with shielded:
                try:
                    self._ahead.land()
                finally:
                    for request in pending:
                        self.abort(request.id)
                    self._deliver([])
        return [r.output() if isinstance(r, Request) else r for r in results]

    def stream(self, prompt: Any, params: SamplingParams | None = None) -> Iterator[Delta]:
        """Deltas of one prompt while it is generated; leaving the loop early aborts it.

        Raises
        ------
        ArgumentError
            At the call, for a prompt that cannot run.
        """
        return self._stream(self._request(prompt, params))

    def _stream(self, request: Request) -> Iterator[Delta]:
        request.sink = mine = deque()
        try:
            self.scheduler.add(request)
            while True:
                while mine:
                    delta = mine.popleft()
                    yield delta
                    if delta.finish_reason is not None:
                        return
                if request.state is State.FINISHED:
                    self._deliver([])
                else:
                    self._advance()
        finally:
            with shielded:
                self.abort(request.id)
                self._deliver([])

    # ---- step by step

    def add(self, prompt: Any, params: SamplingParams | None = None) -> int:
        """Queue a prompt; :meth:`step` brings its deltas, marked with the id that is returned.

        Raises
        ------
        ArgumentError
            For a prompt that cannot run.
        """
        request = self._request(prompt, params)
        request.sink = self._news
        self.scheduler.add(request)
        return request.id

    def step(self) -> list[Delta]:
        """Run one step; the news of all requests that came through :meth:`add`."""
        self._advance()
        news = list(self._news)
        self._news.clear()
        return news

    def abort(self, id: int) -> bool:
        """End a request now, wherever it is. Its last delta comes with the next step. False:
        nothing to end."""
        return self.scheduler.abort(id) is not None

    @property
    def has_work(self) -> bool:
        """Whether a request is unfinished or has news that no :meth:`step` has brought yet."""
        return self.scheduler.has_work or bool(self._news or self.scheduler.ended)

    def stats(self) -> Stats:
        """Counters since the start and levels of now; ``.prometheus()`` gives Prometheus' text
        format."""
        now = self.scheduler
        return self._stats.snapshot(
            waiting=len(now.waiting),
            running=len(now.running) + len(now.prefilling),
            evicted_tokens=self.cache.stats.evicted,
            pool_size=self.allocator.size,
            pool_available=self.allocator.available_size(),
            pool_evictable=self.cache.evictable_size,
            graphs=dict(self.runner.stats),
        )

    # ---- the loop

    def _advance(self) -> None:
        """One step: schedule, run the model, sample, record, tell."""
        try:
            batch = self.scheduler.next_batch()
            if batch is None:
                return self._deliver([])
            with torch.inference_mode():
                variant = self._variant(batch)
                out = self._forward(batch, variant)
                choose = self.sampler if variant == "logits" else self.sampler.read
                sampled = choose(out, batch.sampled)
            self.scheduler.process(batch, sampled.tokens, sampled.logprobs)
        except (
            BaseException
        ):  # an interrupt, or no memory: the requests of this step will run it again
            self.scheduler.rollback()
            raise
        self._deliver(batch.sampled)

    def _variant(self, batch: Batch) -> str:
        """How the step's graph is to choose tokens; "logits" where it cannot, or where there is
        none."""
        variant = self.sampler.variant(batch.sampled) if batch.kind == "decode" else "logits"
        return variant if variant in self.runner.variants else "logits"

    def _forward(self, batch: Batch, variant: str) -> torch.Tensor:
        """Logits `[len(batch.sampled), vocab]`, or what a graph chose from them."""
        if batch.kind == "decode":
            if variant != "logits":
                self.sampler.fill(batch, variant)
            return self.runner(batch, variant)
        self.attention.begin_extend(batch.rows, batch.prefix_lens, batch.seq_lens, batch.out_slots)
        where = (
            t.to(self.device, non_blocking=True)
            for t in (batch.token_ids, batch.positions, batch.logits_at)
        )
        token_ids, positions, logits_at = where
        return self.decoder(token_ids, positions, self.attention, logits_at)

    def _decode_step(self, batch: Batch) -> torch.Tensor:
        """What a decode step computes when no graph is replayed."""
        self.attention.begin_decode(batch.rows, batch.seq_lens, batch.out_slots)
        model = self._fused or self.decoder
        return model(
            batch.token_ids.to(self.device), batch.positions.to(self.device), self.attention
        )

    # ---- requests in, text out

    def _try_request(self, prompt: Any, params: SamplingParams) -> Request | Output:
        try:
            return self._request(prompt, params)
        except ArgumentError as e:
            ids = (
                prompt
                if isinstance(prompt, list) and all(isinstance(i, int) for i in prompt)
                else []
            )
            return Output(next(self._ids), list(ids), finish_reason="error", error=str(e))

    def _request(self, prompt: Any, params: SamplingParams | None) -> Request:
        try:
            params = SamplingParams() if params is None else params
            if not isinstance(params, SamplingParams):
                raise ArgumentError("params", params, "give a SamplingParams")
            vocab = self.config.vocab_size
            ids = prompt_ids(prompt, self.tokenizer, vocab)
            self.scheduler.check_prompt(len(ids))
            for name in ("logit_bias", "stop_token_ids"):
                for token in getattr(params, name) or ():
                    if not 0 <= token < vocab:
                        raise ArgumentError(
                            name, token, f"is outside the vocabulary; ids are 0..{vocab - 1}"
                        )
            grammar = (
                None if params.json_schema is None else self.grammars.start(params.json_schema)
            )
        except ArgumentError as e:
            self.events("refuse", error=str(e))
            raise
        stop_ids = frozenset(params.stop_token_ids) | (
            frozenset() if params.ignore_eos else self.tokenizer.eos_ids
        )
        request = Request(
            next(self._ids), ids, params, stop_ids, max_length=self.scheduler.max_context + 1
        )
        if params.seed is None:
            request.seed = (self.seed << 32) + request.id
        request.grammar = grammar
        request.stream = TextStream(self.tokenizer, params.stop, params.keep_stop)
        return request

    def _text_of(self, request: Request, reason: str | None) -> str | None:
        """After each token: its text where somebody waits for it, and whether a stop text ended the
        request."""
        if reason is None and request.sink is None and not request.params.stop:
            return None  # nobody looks before the end: the text is made then, in one go
        new = request.output_ids[request.shown :].tolist()
        request.shown += len(new)
        if reason == "stop" and new[-1] in request.stop_ids and not request.params.keep_stop:
            new.pop()  # eos or a stop token is part of the tokens, not of the text
        request.fresh += request.stream.push(new, final=reason is not None)
        return "stop" if request.stream.stopped else reason

    @shielded
    def _deliver(self, sampled: Sequence[Request]) -> None:
        """Deltas to whoever waits for them: of the requests that got a token, and of those that
        ended."""
        for request in dict.fromkeys(
            (*(r for r in sampled if r.fresh or r.sink is not None), *self.scheduler.ended)
        ):
            done = request.state is State.FINISHED
            if done:  # aborted or failed: its text was not asked for yet
                rest, request.shown = (
                    request.output_ids[request.shown :].tolist(),
                    request.length - request.prompt_len,
                )
                try:
                    request.fresh += request.stream.push(rest, final=True)
                except Exception as e:  # of its tokenizer
                    request.finish_reason, request.error = "error", f"{type(e).__name__}: {e}"
            if request.sink is not None:
                new = request.output_ids[request.told :].tolist()
                request.told += len(new)
                request.sink.append(
                    Delta(
                        request.id,
                        request.fresh,
                        new,
                        request.finish_reason,
                        request.output() if done else None,
                    )
                )
            request.fresh = ""
        self.scheduler.ended.clear()
