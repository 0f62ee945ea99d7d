"""The real model through the engine: token for token what transformers generates, however the work
is cut."""

from __future__ import annotations

import pytest
import torch

from minikv import LLM, SamplingParams, models
from minikv.engine.sampler import Sampled

TOKENS = 12
SYSTEM = {
    "role": "system",
    "content": "You are a helpful assistant who answers in one short sentence.",
}
QUESTIONS = [
    "What is the capital of France?",
    "Name a fruit that is yellow.",
    "What is 2 + 3?",
    "Why is the sky blue?",
]
TEXTS = [
    "Once upon a time there was a",
    "Once upon a time there were two",
    "def fibonacci(n):\n    ",
    "The three primary colours are",
    "1, 2, 3, 4, 5,",
    "Die Hauptstadt von Deutschland ist",
]
MORE_TEXTS = [
    "Water boils at",
    "The opposite of hot is",
    "A short poem about rain:",
    "The capital of Italy is",
    "In 1969 the first man",
    "To bake bread you need",
    "import numpy as np\n",
    "Dear Sir or Madam,",
    "The quick brown fox",
    "Photosynthesis is the process by which",
    "La vie est",
    "Q: What is 7 times 8?\nA:",
    "My favourite book is",
    "The mitochondria is",
]
GREEDY = SamplingParams(max_tokens=TOKENS, temperature=0)


@pytest.fixture(scope="module")
def loaded(model_file):
    return models.load("smollm2-135m", device="cpu", dtype="float32", progress=False)


@pytest.fixture(scope="module")
def prompts(loaded) -> list[list[int]]:
    chats = [loaded.tokenizer.chat([SYSTEM, {"role": "user", "content": q}]) for q in QUESTIONS]
    return chats + [loaded.tokenizer.encode(text) for text in TEXTS]


@pytest.fixture(scope="module")
def wanted(model_file, loaded, prompts) -> list[list[int]]:
    """What transformers' generate makes of each prompt on its own."""
    transformers = pytest.importorskip("transformers")
    transformers.utils.logging.disable_progress_bar()
    theirs = transformers.AutoModelForCausalLM.from_pretrained(
        model_file.parent, gguf_file=model_file.name, dtype=torch.float32
    )
    results = []
    for ids in prompts:
        given = torch.tensor([ids])
        with torch.inference_mode():
            out = theirs.generate(
                given, attention_mask=torch.ones_like(given), max_new_tokens=TOKENS, do_sample=False
            )
        results.append(out[0, len(ids) :].tolist())
    return results


@pytest.fixture
def build(loaded, monkeypatch):
    monkeypatch.setattr(models, "load", lambda *args, **kwargs: loaded)
    return lambda **options: LLM("smollm2-135m", device="cpu", **{"kv_tokens": 2048, **options})


def idle(llm: LLM) -> None:
    llm.cache.check(owned=())
    assert llm.allocator.available_size() + llm.cache.evictable_size == llm.allocator.size


@pytest.mark.parametrize(
    "options",
    [
        {"page_size": 16},
        {"page_size": 4, "chunk_tokens": 23, "mixed": True},
        {"page_size": 1, "chunk_tokens": 64, "max_requests": 4, "policy": "fcfs"},
        {"page_size": 16, "chunk_tokens": 16, "prefix_cache": False},
        {"page_size": 4, "kv_tokens": 160, "policy": "dfs-weight"},
    ],
    ids=lambda options: "-".join(f"{k}={v}" for k, v in options.items()),
)
def test_greedy_tokens_equal_transformers(options, build, prompts, wanted):
    llm = build(**options)
    cold = llm.generate(prompts, GREEDY)
    assert [out.token_ids for out in cold] == wanted
    idle(llm)
    if options.get("prefix_cache", True) and "kv_tokens" not in options:
        warm = llm.generate(prompts[::-1], GREEDY)
        assert [out.token_ids for out in warm] == wanted[::-1]
        page = options["page_size"]
        assert [out.cached_tokens for out in warm[::-1]] == [
            (len(p) - 1) // page * page for p in prompts
        ]
        idle(llm)


def test_one_at_a_time_and_streamed(build, prompts, wanted):
    llm = build()
    for ids, want in list(zip(prompts, wanted, strict=True))[::3]:
        deltas = list(llm.stream(ids, GREEDY))
        assert [t for d in deltas for t in d.token_ids] == want
        assert "".join(d.text for d in deltas) == llm.tokenizer.decode(want)
    idle(llm)


def test_chats_share_the_system_prompt(build, loaded, prompts):
    llm = build(page_size=4)
    shared = 0
    for a, b in zip(*prompts[:2], strict=False):
        if a != b:
            break
        shared += 1
    texts = [
        llm.generate([SYSTEM, {"role": "user", "content": q}], GREEDY)[0] for q in QUESTIONS[:3]
    ]
    assert "Paris" in texts[0].text
    assert [out.cached_tokens for out in texts[1:]] == [shared // 4 * 4] * 2
    idle(llm)


class Forced:
    """In a sampler's place: says the given text whatever the logits prefer, and counts where they
    prefer it too."""

    def __init__(self, texts: dict[int, list[int]]) -> None:
        self.texts, self.positions, self.agree = texts, 0, 0

    def variant(self, requests):
        return "logits"

    def fill(self, batch, variant):
        pass

    def choose(self, logits, requests, batch):
        said = torch.tensor([self.texts[r.id][r.length - r.prompt_len] for r in requests])
        self.positions += len(said)
        self.agree += int((logits.argmax(-1) == said).sum())
        return said

    def read(self, out, requests):
        return Sampled(out.tolist())


def test_fp8_cache_prefers_the_same_tokens_on_the_fp32_text(build):
    """A decode step reads all its keys and values from the pool, so every position after the first
    depends on it."""
    params = SamplingParams(max_tokens=24, temperature=0, ignore_eos=True)
    outs = build(kv_tokens=4096, graphs=False).generate(TEXTS + MORE_TEXTS, params)
    for kv_dtype, share in (("float32", 1.0), ("fp8", 0.95)):
        llm = build(kv_tokens=4096, graphs=False, kv_dtype=kv_dtype)
        llm.loop.sampler = forced = Forced({i: out.token_ids for i, out in enumerate(outs, 1)})
        again = llm.generate([out.prompt_token_ids for out in outs], params)
        assert [out.token_ids for out in again] == [out.token_ids for out in outs]
        assert forced.positions == 20 * 24
        print(
            f"{kv_dtype}: the same first choice at {forced.agree / forced.positions:.1%} of "
            f"{forced.positions}"
        )
        assert forced.agree >= share * forced.positions
        idle(llm)
