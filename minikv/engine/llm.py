"""The engine: prompts in, text out. :meth:`LLM.step` is one turn of its loop (``loop.py``)."""

from __future__ import annotations

import asyncio
import itertools
from collections import deque
from collections.abc import AsyncIterator, Iterator, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

from minikv import models
from minikv.attention.backend import AttentionBackend
from minikv.device import pick_device
from minikv.engine.events import EventLog, Stats
from minikv.engine.grammar import Grammars
from minikv.engine.loop import Loop
from minikv.engine.options import (
    KV_DTYPES,
    build_pool,
    check_options,
    check_room,
    pick_context,
    pool_size,
)
from minikv.engine.params import SamplingParams
from minikv.engine.request import Delta, Output, Request, State
from minikv.engine.scheduler import Scheduler
from minikv.engine.step import step_runner
from minikv.engine.text import TextStream, prompt_ids, split_prompts
from minikv.errors import ArgumentError, StateError
from minikv.graphs.runner import GraphRunner
from minikv.memory import PagedAllocator, RequestTable
from minikv.models.files.load import pick_dtype
from minikv.numbers import whole
from minikv.prefix import RadixCache

SEED = "must be an integer of at most 64 bits"


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
    >>> params = SamplingParams(max_tokens=4, temperature=0, ignore_eos=True)
    >>> [out] = llm.generate([1, 2, 3, 4, 5], params)
    >>> len(out.token_ids), out.finish_reason, out.cached_tokens
    (4, 'length', 0)
    >>> llm.generate([1, 2, 3, 4, 5])[0].cached_tokens
    4
    """

    _closed = False

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
            attention,
            graphs,
            page_size=page_size,
            kv_tokens=kv_tokens,
            kv_memory=kv_memory,
            max_requests=max_requests,
            max_context=max_context,
            chunk_tokens=chunk_tokens,
        )
        if speculative is not None:
            remedy = "speculative decoding is not implemented yet; pass None"
            raise ArgumentError("speculative", speculative, remedy)
        self.seed = whole("seed", seed, -(2**63), 2**64 - 1, SEED)
        self.device, self._stats = pick_device(device), Stats()
        self.events = EventLog(event_log, [self._stats.update])
        dtype = pick_dtype("dtype", dtype, self.device)
        if isinstance(kv_dtype, str) and kv_dtype == "auto":
            kv_dtype = dtype
        kv_dtype = pick_dtype("kv_dtype", kv_dtype, self.device, KV_DTYPES)
        loaded = models.load(
            model, device=self.device, dtype=dtype, seed=self.seed, progress=progress
        )
        self.decoder, self.tokenizer = loaded.decoder, loaded.tokenizer
        self.config = config = loaded.config
        context = pick_context(max_context, config.max_context)
        per_token, most = config.kv_bytes_per_token(kv_dtype), max_requests * context
        size = pool_size(per_token, page_size, self.device, kv_tokens, kv_memory, most)
        self.pool = build_pool(config, size, page_size, kv_dtype, self.device)
        self.allocator = PagedAllocator(size, page_size, self.device)
        check_room("max_requests", max_requests, 4 * (max_requests + 1) * context, self.device)
        self.table = RequestTable(max_requests, context, self.device)
        self.cache = RadixCache(
            page_size, self.allocator, self.table, eviction=eviction, disable=not prefix_cache
        )
        self.cache.decode = self.tokenizer
        self.attention = AttentionBackend(
            self.pool,
            self.table,
            page_size=page_size,
            q_heads=config.q_heads,
            layers=self.decoder.attention_layers,
            backend=attention,
            deterministic=deterministic,
            max_requests=max_requests,
        )
        self.scheduler = Scheduler(
            self.cache,
            self.allocator,
            self.table,
            max_requests=max_requests,
            chunk_tokens=chunk_tokens,
            policy=policy,
            mixed=mixed,
            emit=self.events,
        )
        self.grammars = Grammars(self.tokenizer, config.vocab_size)
        runner = step_runner(graphs, self.decoder, self.attention, max_requests, progress)
        self.loop = Loop(
            self.scheduler, self.attention, runner, overlaps=self.device.type == "cuda"
        )
        self.scheduler.moves_on = runner.replays and hasattr(runner.step, "move_on")
        self._ids = itertools.count(1)
        self._news: deque[Delta] = deque()  # deltas of requests that add() took

    def __repr__(self) -> str:
        if self._closed:
            return "LLM(closed)"
        now = self.scheduler
        requests = f"{now.active} requests running, {len(now.waiting)} waiting"
        return f"LLM({self.config.architecture}, {requests}, {self.allocator})"

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
        each: Any = params
        if not isinstance(params, (list, tuple)):
            each = [SamplingParams() if params is None else params] * len(prompts)
        if len(each) != len(prompts) or not all(isinstance(p, SamplingParams) for p in each):
            remedy = f"give one SamplingParams, or a list of {len(prompts)}, one per prompt"
            raise ArgumentError("params", params, remedy)
        results: list[Request | Output] = []
        for prompt, one in zip(prompts, each, strict=True):
            try:
                results.append(self._request(prompt, one))
            except ArgumentError as e:
                output = Output(next(self._ids), [], finish_reason="error", error=str(e))
                if isinstance(prompt, list) and all(isinstance(i, int) for i in prompt):
                    output.prompt_token_ids = list(prompt)
                results.append(output)
        pending = [r for r in results if isinstance(r, Request)]
        try:
            with self.loop.turn:
                for request in pending:
                    self.scheduler.add(request)
            while pending := [r for r in pending if r.state is not State.FINISHED]:
                self.step(keep_news=True)
        finally:  # an interrupt leaves no request behind
            if pending:
                self.loop.abort(*(r.id for r in pending))
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
        news = request.sink = deque[Delta]()
        try:
            with self.loop.turn:
                self.scheduler.add(request)
            while True:
                while news:
                    delta = news.popleft()
                    yield delta
                    if delta.finish_reason is not None:
                        return
                self.step(keep_news=True)
        finally:
            if request.state is not State.FINISHED:
                self.loop.abort(request.id)

    def astream(self, prompt: Any, params: SamplingParams | None = None) -> AsyncIterator[Delta]:
        """:meth:`stream` for ``async for``: steps run in a worker thread, so that the event loop
        (of a notebook's widgets, or a server) goes on. Leaving early aborts the request.
        """
        return self._astream(self.stream(prompt, params))

    @staticmethod
    async def _astream(stream: Any) -> AsyncIterator[Delta]:
        step = None
        try:
            while True:
                step = asyncio.ensure_future(asyncio.to_thread(next, stream, None))
                delta = await asyncio.shield(step)
                if delta is None:
                    return
                yield delta
        finally:
            if step is not None:
                await asyncio.wait([step])  # a task that was cancelled left its step running
            stream.close()

    # ---- step by step

    def add(self, prompt: Any, params: SamplingParams | None = None) -> int:
        """Queue a prompt; :meth:`step` brings its deltas, marked with the id that is returned.

        Raises ArgumentError for a prompt that cannot run.
        """
        request = self._request(prompt, params)
        request.sink = self._news
        with self.loop.turn:
            self.scheduler.add(request)
        return request.id

    def step(self, *, keep_news: bool = False) -> list[Delta]:
        """Run one step; the news of all requests that came through :meth:`add`.

        `keep_news` leaves them to the next call. Threads that wait for a step while another thread
        runs one share the next.
        """
        self.loop.step()
        news: list[Delta] = []
        with suppress(IndexError):  # after the turn: an interrupt that it held back loses none
            while not keep_news:
                news.append(self._news.popleft())
        return news

    def abort(self, id: int) -> bool:
        """End a request at the border of a step: now, or, called by an event listener, after the
        step that is running. Its last delta comes with the next step. False: nothing to end."""
        return self.loop.abort(id)

    @property
    def runner(self) -> GraphRunner:
        """What runs the steps: as they are, in graphs, or compiled."""
        return self.loop.runner

    @property
    def has_work(self) -> bool:
        """Whether a request is unfinished or has news that no :meth:`step` has brought yet."""
        return self.scheduler.has_work or bool(self._news)

    def close(self) -> None:
        """End all requests; weights, pool and graphs are given back at once. Then every method but
        this one raises StateError."""
        loop, events = self.__dict__.get("loop"), self.__dict__.get("events")
        if loop is not None and events is not None:
            now = loop.scheduler
            loop.abort(*(r.id for r in (*now.waiting, *now.prefilling, *now.running)))
            events.close()
            self.__dict__.clear()
            self._closed = True

    def __enter__(self) -> LLM:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()

    def __getattr__(self, name: str) -> Any:
        if self._closed:
            raise StateError(f"llm.{name}: this engine was closed; build a new LLM")
        raise AttributeError(f"LLM has no attribute {name!r}")

    def stats(self) -> Stats:
        """Counters since the start and levels of now; ``.prometheus()`` gives Prometheus' text
        format."""
        with self.loop.turn:
            return self._stats.snapshot(
                waiting=len(self.scheduler.waiting),
                running=self.scheduler.active,
                evicted_tokens=self.cache.stats.evicted,
                pool_size=self.allocator.size,
                pool_available=self.allocator.available_size(),
                pool_evictable=self.cache.evictable_size,
                graphs=dict(self.runner.stats),
            )

    # ---- requests in, text out

    def _request(self, prompt: Any, params: SamplingParams | None) -> Request:
        """A request that can run; what is refused is told as an event, too."""
        with self.loop.turn:
            try:
                if params is None:
                    params = SamplingParams()
                if not isinstance(params, SamplingParams):
                    raise ArgumentError("params", params, "give a SamplingParams")
                vocab = self.config.vocab_size
                ids = prompt_ids(prompt, self.tokenizer, vocab)
                self.scheduler.check_prompt(len(ids))
                outside = f"is outside the vocabulary of {vocab} ids"
                for name in ("logit_bias", "stop_token_ids"):
                    for token in getattr(params, name) or ():
                        whole(name, token, 0, vocab - 1, outside)
                stop_ids = frozenset(params.stop_token_ids)
                if not params.ignore_eos:
                    stop_ids |= self.tokenizer.eos_ids
                text = TextStream(self.tokenizer, params.stop, params.keep_stop)
                most = self.scheduler.max_context + 1
                request = Request(next(self._ids), ids, params, stop_ids, most, text=text)
                if params.json_schema is not None:
                    request.grammar = self.grammars.start(params.json_schema)
                if params.seed is None:
                    request.seed = (self.seed << 32) + request.id
                return request
            except ArgumentError as e:
                self.events("refuse", error=str(e))
                raise
