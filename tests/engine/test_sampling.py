"""Sampling inside graphs: the eager sampler's tokens, bit for bit, whatever else is in the batch or
was before."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from harness import Around
from worlds import give_graphs

from minikv import LLM, SamplingParams
from minikv.engine import Request, Sampler
from minikv.engine.sampler import _knobs
from minikv.engine.sampling import DRAWS, MASKED, TOP, VARIANTS, sample, unpack
from minikv.engine.step import decode_buffers
from minikv.engine.tokens import first_max, first_max_torch, first_max_triton
from minikv.graphs import CompiledRunner

VOCAB = 70
DEVICES = ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)]
on_devices = pytest.mark.parametrize("device", DEVICES)
MIXED = [
    SamplingParams(temperature=0),
    SamplingParams(temperature=1.3, seed=1),
    SamplingParams(temperature=0.7, min_p=0.1, seed=2),
    SamplingParams(temperature=2.0, top_k=5, seed=3),
    SamplingParams(temperature=1.0, top_p=0.8, seed=4),
    SamplingParams(temperature=1.0, top_k=9, top_p=0.6, min_p=0.05, seed=5),
]
TELLING = [
    SamplingParams(temperature=0, logprobs=0),
    SamplingParams(temperature=1.0, seed=6, logprobs=3),
    SamplingParams(temperature=1.0, top_p=0.9, seed=7, logprobs=TOP),
]


class Only:
    """A grammar that always allows the same tokens."""

    error = None

    def __init__(self, allowed: list[int], vocab: int = VOCAB) -> None:
        self.allowed, self.words = sorted(allowed), -(-vocab // 32)

    def fill(self, mask: np.ndarray) -> None:
        bits = np.zeros(self.words * 32, np.uint8)
        bits[self.allowed] = 1
        mask[:] = np.packbits(bits, bitorder="little").view(np.int32)

    def accept(self, token: int) -> bool:
        assert token in self.allowed
        return False


def request(params: SamplingParams, grammar: Only | None = None, outputs: int = 0) -> Request:
    r = Request(1, [1], params)
    r.length += outputs
    r.grammar = grammar
    return r


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
@pytest.mark.parametrize("vocab", [3, 1000, 8192, 8193, 20000])
def test_the_first_maximum_of_each_row(device, dtype, vocab) -> None:
    logits = torch.randint(-9, 9, (9, vocab)).to(dtype)  # ties in plenty
    logits[1, vocab // 2] = torch.nan
    logits[2, -1] = torch.inf
    logits[3] = -torch.inf
    logits[4, : vocab - 1] = -torch.inf
    logits[5, 0] = torch.nan
    logits[6] = 0
    logits[7, vocab - 1] = 99
    want = [
        row.index(max(row)) if all(v == v for v in row) and abs(max(row)) < float("inf") else -1
        for row in logits.tolist()
    ]
    for choose in (first_max, first_max_torch, first_max_triton):
        assert choose(logits.to(device)).tolist() == want
        assert choose(logits.to(device)[::2]).tolist() == want[::2]


def test_a_packed_mask_against_a_loop() -> None:
    words = torch.randint(-(2**31), 2**31, (3, 3), dtype=torch.int64).to(torch.int32)
    got = unpack(words.flatten(), 3, VOCAB)
    assert got.shape == (3, VOCAB)
    for row in range(3):
        for token in range(VOCAB):
            assert bool(got[row, token]) == bool(int(words[row, token // 32]) >> (token % 32) & 1)


@on_devices
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_every_later_variant_gives_the_same_tokens(device, dtype) -> None:
    logits = (torch.randn(len(MIXED), VOCAB) * 2).to(device, dtype)
    logits[0] = logits[0].round()  # ties
    for outputs in range(8):
        rows = [request(p, outputs=outputs) for p in MIXED]
        want = Sampler()(logits, rows).tokens
        knobs = _knobs(rows).to(device)
        ones = torch.full((len(rows) * 3,), -1, dtype=torch.int32, device=device)
        for variant in ("truncated", "logprobs", "grammar"):
            out = sample(logits, variant, knobs, ones)
            assert Sampler.read(out, rows).tokens == want, variant
        plain = sample(logits[:3], "sampled", knobs[: 3 * 5])
        assert plain.tolist() == want[:3]
        assert (
            sample(logits[:1], "greedy").tolist() == want[:1] == [int(logits[0].float().argmax())]
        )


@on_devices
def test_logprobs_come_with_the_tokens_in_one_tensor(device) -> None:
    logits = torch.randn(3, VOCAB).to(device)
    rows = [request(p) for p in TELLING]
    out = sample(logits, "logprobs", _knobs(rows).to(device))
    assert out.shape == (3, 2 + 2 * TOP)
    got, want = Sampler.read(out, rows), Sampler()(logits, rows)
    assert got == want
    lp = torch.log_softmax(logits.double(), -1).cpu()
    for i, p in enumerate(TELLING):
        told = got.logprobs[i]
        assert told.token_id == got.tokens[i]
        assert told.logprob == pytest.approx(float(lp[i, told.token_id]), abs=1e-5)
        assert list(told.top) == lp[i].topk(p.logprobs).indices.tolist()


@on_devices
def test_a_mask_forbids_and_leaves_the_other_rows_alone(device) -> None:
    logits = torch.randn(4, VOCAB).to(device)
    params = [SamplingParams(temperature=t, seed=i) for i, t in enumerate((0, 1, 1, 0))]
    free = Sampler()(logits, [request(p) for p in params]).tokens
    for allowed in ([69], [0, 31, 32, 63, 64], list(range(35))):
        rows = [request(p, Only(allowed) if i < 2 else None) for i, p in enumerate(params)]
        assert Sampler.variant(rows) == "grammar"
        tokens = Sampler()(logits, rows).tokens
        assert tokens[2:] == free[2:]
        assert set(tokens[:2]) <= set(allowed)
        assert tokens[0] == max(allowed, key=lambda t: float(logits[0, t]))
    assert Sampler()(logits, [request(params[1], Only([]))] * 4).tokens == [-1] * 4, (
        "nothing is allowed"
    )
    logits[0, 5] = torch.nan
    assert Sampler()(logits, [request(p, Only([1, 2])) for p in params]).tokens[0] == -1


def test_masked_draws_follow_the_distribution_of_what_is_left() -> None:
    logits = torch.tensor([[0.0, 3.0, 1.0, -torch.inf, 2.0]]).expand(4000, -1)
    rows = [request(SamplingParams(seed=i), Only([0, 2, 3], 5)) for i in range(4000)]
    tokens = Sampler()(logits, rows).tokens
    assert set(tokens) == {0, 2}
    assert tokens.count(2) / 4000 == pytest.approx(np.e / (1 + np.e), abs=0.03)


@on_devices
def test_the_samplers_buffers_are_padded_with_greedy_rows_and_free_tokens(device) -> None:
    llm = engine(device)
    r = give_graphs(llm, [1, 2, 4], device)
    sampler, batch = Sampler(), decoding(llm, 4)
    for n, variant in (
        (4, "grammar"),
        (3, "sampled"),
        (1, "grammar"),
        (2, "greedy"),
        (2, "grammar"),
        (3, "logits"),
    ):
        mine = cut(batch, n)
        mine.sampled = [
            request(p, Only([7, 9], 512) if i == 0 else None) for i, p in enumerate(MIXED[:n])
        ]
        sampler.fill(mine, variant)
        assert (mine.knobs is None, mine.mask is None) == (
            variant not in DRAWS,
            variant not in MASKED,
        )
        out = r(mine, variant)
        assert out.shape[0] == n
        if variant in DRAWS:
            assert torch.equal(r.buffers["knobs"].tensor[: n * 5].cpu(), mine.knobs)
            assert not r.buffers["knobs"].tensor[n * 5 :].any()
        if variant in MASKED:
            assert r.buffers["mask"].tensor[:16].count_nonzero() == 1
            assert bool((r.buffers["mask"].tensor[n * 16 :] == -1).all())
    assert (r.stats.replays, r.stats.eager) == (6, 0)


# ---- the engine decodes through graphs


def engine(device: str = "cpu", model: str = "tiny", **options) -> LLM:
    options = {
        "kv_tokens": 1024,
        "page_size": 4,
        "max_requests": 8,
        "chunk_tokens": 64,
        "graphs": False,
        **options,
    }
    return LLM(model, device=device, dtype="float32", progress=False, **options)


def decoding(llm: LLM, n: int):
    """A decode batch of n requests."""
    for i in range(n):
        llm.add([i + 1, 2, 3], SamplingParams(max_tokens=20, ignore_eos=True))
    llm.step()
    return llm.scheduler.next_batch()


def cut(batch, n: int):
    fields = vars(batch) | {"knobs": None, "mask": None}
    sliceable = (list, torch.Tensor)
    return type(batch)(**{k: v[:n] if isinstance(v, sliceable) else v for k, v in fields.items()})


def many(params: list[SamplingParams], **changes) -> list[SamplingParams]:
    """Requests of different lengths, so that batches shrink and their mix changes."""
    return [
        SamplingParams(**{**vars(p), "ignore_eos": True, "max_tokens": 4 + 3 * i, **changes})
        for i, p in enumerate(params)
    ]


PROMPTS = [[i + 1, 7, 3 * i + 2, 5] for i in range(8)]
EDITED = [
    SamplingParams(temperature=0, logit_bias={3: 9.0}),
    SamplingParams(seed=9, frequency_penalty=1.0),
]
MIXES = {
    "tokens": MIXED,
    "logprobs": [*MIXED[:4], *TELLING],
    "edits": [*EDITED, *MIXED[:3], TELLING[2]],
}
MODELS = {
    "tiny": {},
    "mla": {"model": "random:mla-tiny"},
    "fp8": {"kv_dtype": "fp8"},
}


def outputs(llm: LLM, params: list[SamplingParams]) -> list[tuple]:
    outs = llm.generate(PROMPTS[: len(params)], params)
    assert all(o.error is None for o in outs)
    llm.cache.check(owned=())
    return [
        (o.token_ids, o.logprobs and [(t.token_id, list(t.top)) for t in o.logprobs]) for o in outs
    ]


@on_devices
@pytest.mark.parametrize(
    ("model", "mix"), [*(("tiny", mix) for mix in MIXES), ("mla", "tokens"), ("fp8", "logprobs")]
)
def test_graphs_say_what_the_eager_engine_says(model, mix, device) -> None:
    params = many(MIXES[mix])
    want = outputs(engine(device, **MODELS[model]), params)
    llm = engine(device, **MODELS[model])
    r = give_graphs(llm, [1, 2, 4, 8], device)
    assert {v for v, _ in r.graphs} == {"greedy", "sampled"}
    assert outputs(llm, params) == want
    assert (r.stats.eager, r.stats.replays >= 15) == (0, True)
    later = {"tokens": {"truncated"}, "logprobs": {"logprobs"}, "edits": {"logits", "logprobs"}}[
        mix
    ]
    assert {v for v, _ in r.graphs} >= later, "captured when they first came"
    alone = [llm.generate(PROMPTS[i], p)[0].token_ids for i, p in enumerate(params)]
    assert alone == [tokens for tokens, _ in want], "a draw depends on its seed and index only"


@on_devices
@pytest.mark.parametrize("model", MODELS)
def test_each_replay_draws_what_the_eager_sampler_draws_from_its_logits(model, device) -> None:
    llm = engine(device, **MODELS[model])
    r = give_graphs(llm, [1, 2, 4, 8], device)
    llm.loop.overlaps = False  # every batch runs several times here: its tokens must be known
    seen = set()

    def both(batch, variant):
        if not batch.decode:
            return r(batch, variant)
        logits = r(batch, "logits")
        out = r(batch, variant)
        assert Sampler.read(out, batch.sampled) == Sampler()(logits, batch.sampled)
        size = r.bucket(len(batch.requests))
        assert torch.equal(out, r.run_step(r.views(size), variant)[: out.shape[0]])
        seen.add((variant, size))
        return out

    llm.loop.runner = Around(r, both)
    llm._request, make = (lambda *a: ruled(make(*a))), llm._request
    llm.generate(PROMPTS, many([*MIXED[:5], *TELLING]))
    assert {variant for variant, _ in seen} >= {"logprobs", "grammar"}
    assert {size for _, size in seen} == {1, 2, 4, 8}


def ruled(r: Request) -> Request:
    if r.id == 2:
        r.grammar = Only([3, 5, 300, 511], 512)
    return r


def test_compiled_decoding_draws_the_eager_tokens() -> None:
    params = [
        SamplingParams(max_tokens=9, top_p=0.9, seed=i, ignore_eos=True, logprobs=2)
        for i in range(2)
    ]
    want = outputs(engine(), params)
    llm = engine(graphs=True, max_requests=2)
    assert isinstance(llm.runner, CompiledRunner)
    assert outputs(llm, params) == want
    assert llm.runner.stats == {
        "replays": 8,
        "eager": 0,
        "captures": 1,
        "padded_rows": 0,
        "graph_bytes": 0,
    }


def test_an_eager_engine_samples_in_the_same_ways() -> None:
    assert engine("cpu", graphs=False).runner.variants == VARIANTS
    assert "mask" not in decode_buffers(2, torch.device("cpu"))


@pytest.mark.gpu
@pytest.mark.parametrize("mix", ["tokens", "logprobs"])
def test_a_step_waits_for_the_device_only_to_read_its_tokens(mix) -> None:
    llm = engine("cuda", graphs=True)
    params = many(MIXES[mix], max_tokens=12)
    want = outputs(llm, params)  # captures what is captured when first asked for
    runner, read = llm.runner, llm.loop.sampler.read

    def forward(batch, variant):
        if not batch.decode:
            return runner(batch, variant)
        torch.cuda.set_sync_debug_mode("error")
        try:
            return runner(batch, variant)
        finally:
            torch.cuda.set_sync_debug_mode("default")

    reads = []
    llm.loop.sampler.read = lambda out, requests: (reads.append(out.shape), read(out, requests))[1]
    llm.loop.runner = Around(runner, forward)
    assert outputs(llm, params) == want
    assert len(reads) >= 11
