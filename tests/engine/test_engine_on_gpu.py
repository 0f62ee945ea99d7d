"""The engine on a CUDA device: what it says equals what the CPU says, with and without graphs."""

from __future__ import annotations

import pytest

from minikv import LLM, SamplingParams

pytestmark = [pytest.mark.gpu, pytest.mark.timeout(240)]
TEXTS = [
    "Once upon a time there was a",
    "def fibonacci(n):\n    ",
    "The three primary colours are",
    "1, 2, 3, 4, 5,",
    "Die Hauptstadt von Deutschland ist",
    "Water boils at",
    "The opposite of hot is",
    "A short poem about rain:",
]
TOKENS = 24


def build(model: str, device: str, **options) -> LLM:
    return LLM(
        model,
        device=device,
        kv_tokens=4096,
        page_size=16,
        max_requests=16,
        progress=False,
        **options,
    )


@pytest.fixture(scope="module")
def smollm2(model_file) -> str:
    return "smollm2-135m"


@pytest.mark.parametrize("graphs", [False, True], ids=["eager", "graphs"])
def test_smollm2_says_what_the_cpu_says(smollm2, graphs) -> None:
    """Greedy and fp32 on both; where a token differs first, the two best logits must be within
    1e-3."""
    params = SamplingParams(max_tokens=TOKENS, temperature=0, logprobs=2)
    want = build(smollm2, "cpu", dtype="float32").generate(TEXTS, params)
    llm = build(smollm2, "cuda", dtype="float32", graphs=graphs)
    got = llm.generate(TEXTS, SamplingParams(max_tokens=TOKENS, temperature=0))
    for text, a, b in zip(TEXTS, want, got, strict=True):
        print(repr(b.text))
        if a.token_ids != b.token_ids:
            step = next(
                i for i, (x, y) in enumerate(zip(a.token_ids, b.token_ids, strict=False)) if x != y
            )
            best, second = sorted(a.logprobs[step].top.values(), reverse=True)[:2]
            print(
                f"{text!r}: first difference at token {step}, gap of the two best "
                f"{best - second:.2e}"
            )
            assert best - second < 1e-3
    llm.cache.check(owned=())
    assert llm.allocator.available_size() + llm.cache.evictable_size == llm.allocator.size
    again = llm.generate(TEXTS, SamplingParams(max_tokens=TOKENS, temperature=0))
    assert [o.cached_tokens for o in again] == [
        (len(o.prompt_token_ids) - 1) // 16 * 16 for o in again
    ]


def test_bf16_says_the_same_with_and_without_graphs(smollm2) -> None:
    chat = [{"role": "user", "content": "What is the capital of France?"}]
    texts = []
    for graphs in (False, True):
        llm = build(smollm2, "cuda", dtype="bfloat16", graphs=graphs)
        [out] = llm.generate(chat, SamplingParams(max_tokens=16, temperature=0))
        texts.append(out.text)
    print(texts)
    assert texts[0] == texts[1] != ""


def test_batches_grow_and_shrink_the_same_with_graphs() -> None:
    prompts = [[(i * 7 + j) % 200 + 3 for j in range(5 + 3 * i)] for i in range(13)]
    params = [
        SamplingParams(max_tokens=4 + 5 * (i % 4), temperature=0, ignore_eos=True)
        for i in range(13)
    ]
    outs = []
    for graphs in (False, True):
        llm = build("tiny", "cuda", dtype="float32", graphs=graphs)
        outs.append([o.token_ids for o in llm.generate(prompts, params)])
        llm.cache.check(owned=())
        print(llm.runner.stats)
    assert outs[0] == outs[1]
