"""Which token: order of the filters, borders, independence from the batch, and the right
distributions."""

from __future__ import annotations

import math
from collections import Counter

import numpy as np
import pytest
import torch

from minikv.engine import Request, Sampler, SamplingParams
from minikv.engine.sampler import apply_edits, uniforms
from minikv.engine.sampling import TOP, VARIANTS, choose

GREEDY = SamplingParams(temperature=0)


def request(params=GREEDY, prompt=(1,), output=(), seed=0):
    r = Request(1, list(prompt), params, max_length=1000)
    r.tokens = np.concatenate([r.tokens, np.zeros(64, np.int64)])
    r.extend(output)
    r.seed = params.seed if params.seed is not None else seed
    return r


def sample(logits, *params, **kw):
    return Sampler()(torch.as_tensor(logits), [request(p, **kw) for p in params]).tokens


def draws(logits, n=4000, **params):
    """Counts of n draws with n seeds."""
    rows = torch.as_tensor(logits, dtype=torch.float32).expand(n, -1)
    p = SamplingParams(**params)
    return Counter(Sampler()(rows, [request(p, seed=i) for i in range(n)]).tokens)


def chi_square(counts, probabilities):
    """The statistic, and the value it exceeds with probability about 1e-6 (Wilson-Hilferty)."""
    n, used = sum(counts.values()), {i: p for i, p in enumerate(probabilities) if p > 0}
    assert set(counts) <= set(used)
    statistic = sum((counts.get(i, 0) - n * p) ** 2 / (n * p) for i, p in used.items())
    k = max(1, len(used) - 1)
    return statistic, k * (1 - 2 / (9 * k) + 4.75 * math.sqrt(2 / (9 * k))) ** 3


def oracle(logits, temperature=1.0, top_k=-1, top_p=1.0, min_p=0.0):
    """Plain float64 loop over the tokens, likeliest first."""
    x = np.asarray(logits, np.float64) / temperature
    p = np.exp(x - x.max()) / np.exp(x - x.max()).sum()
    order = sorted(range(len(p)), key=lambda i: (-p[i], i))
    if top_k > 0:
        order = order[:top_k]
    total, kept, before = sum(p[i] for i in order), [], 0.0
    for i in order:
        if kept and before >= top_p:
            break
        kept.append(i)
        before += p[i] / total
    kept = [i for i in kept if p[i] >= min_p * p[kept[0]]]
    result = np.zeros(len(p))
    result[kept] = p[kept] / p[kept].sum()
    return result


CASES = [
    {},
    {"temperature": 0.5},
    {"temperature": 3.0},
    {"top_k": 3},
    {"top_p": 0.7},
    {"min_p": 0.2},
    {"temperature": 1.7, "top_k": 6, "top_p": 0.8},
    {"temperature": 2.0, "top_k": 7, "top_p": 0.95, "min_p": 0.3},
]


@pytest.mark.parametrize("params", CASES, ids=str)
def test_distribution_over_seeds(params):
    logits = [0.3, -1.0, 2.0, 1.9, 0.0, -3.0, 1.0, 0.5, 0.7, -0.2]
    statistic, limit = chi_square(draws(logits, **params), oracle(logits, **params))
    assert statistic < limit


def test_distribution_over_token_indices_of_one_seed():
    logits = torch.tensor([1.0, 0.0, 0.5, 2.0])
    n = 4000
    u = torch.from_numpy(uniforms([42] * n, range(n)))
    one, off = torch.ones(n, dtype=torch.float64), torch.full((n,), -1.0, dtype=torch.float64)
    tokens = choose(logits.expand(n, -1), one, off, one, 0 * one, u, truncates=False)
    statistic, limit = chi_square(Counter(tokens.tolist()), oracle(logits))
    assert statistic < limit


def test_uniforms_fill_the_unit_interval_evenly_and_in_pairs():
    u = uniforms(range(10_000), [0] * 10_000)
    assert u.min() >= 0
    assert u.max() < 1
    for values in (
        u,
        uniforms([5] * 10_000, range(10_000)),
        uniforms([-3] * 10_000, range(10_000)),
    ):
        cells = Counter((values[:-1] * 8).astype(int) * 8 + (values[1:] * 8).astype(int))
        statistic, limit = chi_square(cells, [1 / 64] * 64)
        assert statistic < limit


def test_b94_half_precision_and_tiny_temperature():
    logits = torch.tensor([[11.0625, 2.875, 2.9551]], dtype=torch.float16)
    for temperature in (1e-4, 1e-6, 1e-30, 0):
        assert sample(logits, SamplingParams(temperature=temperature, seed=3)) == [0]


def test_b97_greedy_ties_are_the_first_maximum_in_any_company():
    logits = torch.tensor([[1.0, 1.0, 0.0]] * 2)
    for seed in range(100):
        hot = SamplingParams(temperature=1.0, seed=seed)
        assert sample(logits[:1], SamplingParams(temperature=0, seed=seed)) == [0]
        assert sample(logits, SamplingParams(temperature=0, seed=seed), hot)[0] == 0
        assert sample(logits, hot, SamplingParams(temperature=0, top_p=0.9, seed=seed))[1] == 0


def test_b99_top_p_stops_exactly_at_the_border():
    logits = torch.tensor([0.3, 0.1, 0.1, 0.5]).log()
    assert set(draws(logits, top_p=0.8, n=2000)) == {0, 3}
    assert set(draws(logits, top_p=0.81, n=2000)) == {0, 1, 3}


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("top_p", [0.0, 1e-8, 1e-3])
def test_b100_tiny_top_p_keeps_the_best(top_p, dtype):
    logits = torch.tensor([[0.1, 0.6, 0.3]]).log().to(dtype)
    for seed in range(50):
        assert sample(logits, SamplingParams(top_p=top_p, seed=seed)) == [1]


@pytest.mark.parametrize("top_k", [2**30, -1, 0, 32, 1])
def test_b102_disabled_top_k_stays_inside_the_vocabulary(top_k):
    logits = torch.full((1, 32), -torch.inf)
    logits[0, 1] = 0.0
    for top_p in (1.0, 0.5):
        assert sample(logits, SamplingParams(top_k=top_k, top_p=top_p, seed=1)) == [1]


def test_top_k_keeps_exactly_k_of_equal_logits():
    assert set(draws([1.0, 1.0, 1.0, 1.0], top_k=2, n=500)) == {0, 1}


def test_draw_depends_on_seed_and_index_only():
    torch.manual_seed(1)
    logits = torch.randn(8, 50)
    params = [
        SamplingParams(seed=100 + i, temperature=1 + i % 3, top_p=1 - 0.1 * (i % 2))
        for i in range(8)
    ]
    together = Sampler()(logits, [request(p, output=[5] * i) for i, p in enumerate(params)]).tokens
    for i, p in enumerate(params):
        alone = Sampler()(logits[i : i + 1], [request(p, output=[9] * i)]).tokens
        assert alone == [together[i]]
        greedy_neighbour = Sampler()(
            logits[[0, i]], [request(GREEDY), request(p, output=[9] * i)]
        ).tokens
        assert greedy_neighbour == [int(logits[0].argmax()), together[i]]


def test_different_seeds_and_indices_give_different_draws():
    logits = torch.zeros(1, 1000)
    by_seed = {sample(logits, SamplingParams(seed=s))[0] for s in range(20)}
    by_index = {sample(logits, SamplingParams(seed=1), output=[0] * i)[0] for i in range(15)}
    assert len(by_seed) > 15
    assert len(by_index) > 10


def test_nan_row_is_an_error_for_that_row_only():
    logits = torch.randn(4, 9)
    want = logits.argmax(-1).tolist()
    logits[1, 3], logits[2] = torch.nan, torch.inf
    for params in (GREEDY, SamplingParams(temperature=1e-9, seed=0, logprobs=1)):
        got = Sampler()(logits, [request(params)] * 4)
        assert got.tokens == [want[0], -1, -1, want[3]]


def test_logit_bias_and_penalties_against_a_loop():
    torch.manual_seed(2)
    prompt, output, vocab = [1, 2, 2, 9], [3, 3, 4, 3], 12
    raw = torch.randn(3, vocab)
    kept = raw.clone()
    p = SamplingParams(
        temperature=0,
        logit_bias={3: 2.5, 7: -1.0},
        presence_penalty=0.7,
        frequency_penalty=0.4,
        repetition_penalty=1.6,
    )
    less = SamplingParams(frequency_penalty=-1.0)
    rows = [request(GREEDY), request(p, prompt, output), request(less, prompt, output)]
    x = apply_edits(raw, rows)
    assert torch.equal(raw, kept)
    assert torch.equal(x[0], raw[0])
    for token in range(vocab):
        want = float(raw[1, token]) + {3: 2.5, 7: -1.0}.get(token, 0.0)
        if token in prompt or token in output:
            want = want / 1.6 if want > 0 else want * 1.6
        if token in output:
            want -= 0.7 + 0.4 * output.count(token)
        assert float(x[1, token]) == pytest.approx(want, abs=1e-5)
        assert float(x[2, token]) == pytest.approx(
            float(raw[2, token]) + output.count(token), abs=1e-5
        )
    assert Sampler()(raw, rows).tokens[1] == int(x[1].argmax())


def test_logit_bias_can_force_a_token():
    assert sample(torch.randn(1, 20), SamplingParams(logit_bias={11: 1e4}, seed=0)) == [11]


def test_logprobs_are_those_of_the_raw_logits():
    torch.manual_seed(3)
    logits = torch.randn(3, 16)
    want = torch.log_softmax(logits, -1)
    biased = SamplingParams(temperature=5.0, logit_bias={4: 50.0}, logprobs=3, seed=1)
    params = [biased, GREEDY, SamplingParams(logprobs=0, seed=2)]
    got = Sampler()(logits, [request(p) for p in params])
    assert got.logprobs[1] is None
    first, last = got.logprobs[0], got.logprobs[2]
    assert first.token_id == got.tokens[0] == 4
    assert first.logprob == pytest.approx(float(want[0, 4]), abs=1e-5)
    best = want[0].topk(3)
    assert list(first.top) == best.indices.tolist()
    assert list(first.top.values()) == pytest.approx(best.values.tolist(), abs=1e-5)
    assert last.top == {}
    assert last.logprob == pytest.approx(float(want[2, got.tokens[2]]), abs=1e-5)


@pytest.mark.parametrize(
    ("options", "variant"),
    [
        ({}, "greedy"),
        ({"top_p": 0.5, "top_k": 3}, "greedy"),
        ({"temperature": 1, "min_p": 0.1}, "sampled"),
        ({"temperature": 1, "top_k": 3}, "truncated"),
        ({"temperature": 1, "top_p": 0.9}, "truncated"),
        ({"logprobs": 0}, "logprobs"),
        ({"logprobs": TOP}, "logprobs"),
        ({"logprobs": TOP + 1}, "logits"),
        ({"logit_bias": {1: 2.0}}, "logits"),
        ({"frequency_penalty": 0.1}, "logits"),
    ],
    ids=str,
)
def test_a_batch_takes_the_least_variant_that_serves_all(options, variant):
    other = SamplingParams(**{"temperature": 0, **options})
    assert Sampler.variant([request(GREEDY), request(other), request(GREEDY)]) == variant
    rich = request(SamplingParams(logit_bias={1: 2.0}))
    assert Sampler.variant([rich, request(other)]) == "logits" == VARIANTS[-1]


def test_an_empty_batch_has_no_tokens():
    assert Sampler.variant([]) == "greedy"
    assert Sampler()(torch.empty(0, 7), []).tokens == []
