"""The engine decoding through a runner: the same tokens, the same bits on the same buffers, other
slots untouched."""

from __future__ import annotations

import copy

import pytest
import torch
from harness import Around
from model_standins import full_logits

from minikv import LLM, SamplingParams
from minikv.engine.sampling import sample
from minikv.engine.step import ModelStep, decode_buffers
from minikv.errors import StateError
from minikv.graphs import CompiledRunner, CudaGraphRunner, GraphRunner

GREEDY = SamplingParams(max_tokens=10, temperature=0, ignore_eos=True)
HOT = SamplingParams(max_tokens=10, temperature=1.0, top_p=0.9, seed=5, ignore_eos=True)


def build(graphs, device="cpu", model="tiny", **options) -> LLM:
    options = {"kv_tokens": 1024, "page_size": 4, "max_requests": 5, "chunk_tokens": 64, **options}
    return LLM(model, device=device, dtype="float32", graphs=graphs, progress=False, **options)


def eager_logits(llm: LLM):
    """The logits of a batch, by a step that is neither recorded nor compiled."""
    step = ModelStep(llm.decoder, llm.attention)
    return lambda batch: step.run(batch, "logits")


def test_greedy_tokens_are_first_maxima_and_broken_rows_are_marked() -> None:
    logits = torch.tensor(
        [[1.0, 3, 3], [torch.nan, 1, 2], [torch.inf, 0, 0], [-torch.inf, -torch.inf, 0]]
    )
    assert sample(logits, "greedy").tolist() == [1, -1, -1, 2]
    assert sample(logits, "logits") is logits


def test_a_greedy_step_sends_one_block_a_draw_and_a_grammar_one_more_each() -> None:
    made = decode_buffers(5, torch.device("cpu"), vocab_size=70)
    for blocks, variant in enumerate(("greedy", "sampled", "grammar"), start=1):
        serving = [b for b in made.values() if b.stage is not None and b.serves(variant)]
        assert len({id(b.stage) for b in serving}) == blocks
    assert made.pop("mask").tensor.shape == (5 * 3,)
    for name, b in made.items():
        assert b.tensor.shape == ({"kv_indptr": 6, "knobs": 25}.get(name, 5),)
        if b.stage is not None:
            assert b.offset % 16 == 0
            assert b.tensor.untyped_storage().data_ptr() == b.stage.block.data_ptr()


def test_graphs_auto_on_the_cpu_stays_eager() -> None:
    for graphs in ("auto", False):
        assert type(build(graphs).runner) is GraphRunner


def test_compiled_decoding_gives_the_eager_tokens() -> None:
    prompts = [
        [1, 2, 3],
        [9, 8, 7],
    ]  # of one length: every decode step has both, one size is compiled
    want = [o.token_ids for o in build(False, max_requests=2).generate(prompts, GREEDY)]
    llm = build(True, max_requests=2)
    assert isinstance(llm.runner, CompiledRunner)
    assert [o.token_ids for o in llm.generate(prompts, GREEDY)] == want
    assert llm.stats().graphs == {
        "replays": 9,
        "eager": 0,
        "captures": 1,
        "padded_rows": 0,
        "graph_bytes": 0,
    }
    llm.cache.check(owned=())


def test_compiled_logits_are_the_eager_ones_in_every_size() -> None:
    llm = build(True, max_requests=2)
    runner = llm.runner
    decode = eager_logits(llm)

    def both_ways(batch, variant):
        got = runner(batch, "logits")
        if not batch.decode:
            return got
        assert (got - decode(batch)).abs().max() <= 1e-4
        return got

    llm.loop.runner = Around(runner, both_ways, variants=("logits",))
    ends = [SamplingParams(max_tokens=n, temperature=0, ignore_eos=True) for n in (4, 8)]
    llm.generate(
        [[1, 2, 3], [9, 8, 7]], ends
    )  # two rows, then one: its products are written another way
    assert (runner.stats.captures, runner.stats.eager) == (2, 0)


@pytest.mark.gpu
def test_torch_attention_cannot_be_captured() -> None:
    with pytest.raises(StateError, match="attention='triton'"):
        build(True, "cuda", attention="torch")
    assert type(build("auto", "cuda", attention="torch").runner) is GraphRunner


@pytest.mark.gpu
@pytest.mark.parametrize(
    "options", [{}, {"deterministic": True}, {"page_size": 1}, {"mixed": True}], ids=str
)
def test_graph_decoding_gives_the_eager_tokens(options) -> None:
    prompts = [list(range(1, 4 + 5 * i)) for i in range(8)]
    params = [
        SamplingParams(max_tokens=3 + 4 * i, temperature=0, ignore_eos=True) for i in range(8)
    ]
    params[3] = HOT
    eager, graphed = build(False, "cuda", **options), build("auto", "cuda", **options)
    assert isinstance(graphed.runner, CudaGraphRunner)
    for given in ([GREEDY] * 8, params):
        want = [o.token_ids for o in eager.generate(prompts, given)]
        assert [o.token_ids for o in graphed.generate(prompts, given)] == want
    stats = graphed.stats().graphs
    assert stats["replays"] > 0
    assert stats["eager"] == 0
    assert stats["graph_bytes"] > 0
    graphed.cache.check(owned=())


@pytest.mark.gpu
def test_smollm2_greedy_tokens_with_graphs(model_file) -> None:
    prompts = ["The capital of France is", "A page table maps", "Once upon a time"]
    params = SamplingParams(max_tokens=24, temperature=0)
    eager = build(False, "cuda", "smollm2-135m", max_context=512)
    want = [o.token_ids for o in eager.generate(prompts, params)]
    graphed = build(True, "cuda", "smollm2-135m", max_context=512)
    assert [o.token_ids for o in graphed.generate(prompts, params)] == want


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_p02_replay_equals_eager_for_every_size_shrinking_and_growing(dtype) -> None:
    """In fp32 within 1e-4; in bf16 within twice the largest error that the eager run itself makes
    against a run of the same weights in higher precision."""
    llm = LLM(
        "tiny",
        device="cuda",
        dtype=dtype,
        kv_tokens=2048,
        page_size=4,
        max_requests=9,
        graphs=True,
        progress=False,
    )
    runner, seen, apart, errors = llm.runner, [], [0.0], [0.0]
    decode, exact = eager_logits(llm), copy.deepcopy(llm.decoder).cpu().double()
    # Every batch runs several times here: its tokens and inputs must be known.
    llm.loop.overlaps = llm.scheduler.moves_on = False
    runner.debug = runner.owned = True  # one output is compared with the next
    runner.sizes.remove(9)  # a full engine is then one more than the largest size

    def pool() -> torch.Tensor:
        layers = range(llm.pool.num_layers)
        return torch.stack([part(i) for i in layers for part in (llm.pool.k, llm.pool.v)])

    def both_ways(batch, variant):
        if not batch.decode:
            return runner(batch, "logits")
        n, before = len(batch.requests), pool()
        got = runner(batch, "logits")
        seen.append(n)
        others = torch.ones(before.shape[1], dtype=torch.bool, device="cuda")
        others[batch.out_slots] = False
        others[: llm.pool.page_size] = False
        assert torch.equal(pool()[:, others], before[:, others])
        if (size := runner.bucket(n)) is not None:
            same = runner.run_step(runner.views(size), "logits")[:n]
            assert torch.equal(got, same), f"{n} in {size}"
            assert torch.equal(runner(batch, "greedy"), sample(got, "greedy"))
        eager = decode(batch)  # at its true size
        apart.append(float((got - eager).abs().max()))
        if dtype == "bfloat16":
            want = [full_logits(exact, r.token_ids.tolist())[-1] for r in batch.requests]
            errors.append(float((eager.cpu().double() - torch.stack(want)).abs().max()))
        return got

    llm.loop.runner = Around(runner, both_ways, variants=("logits",))
    ends = [SamplingParams(max_tokens=2 + 2 * i, temperature=0, ignore_eos=True) for i in range(9)]
    llm.generate([[1 + i, 2, 3 + i] for i in range(9)], ends)  # 9, 9, 8, 8, ... 1
    for i in range(9):  # 1, 2, 3, ...
        llm.add([i + 1] * (i + 3), SamplingParams(max_tokens=30, temperature=0, ignore_eos=True))
        for _ in range(3):
            llm.step()
    while llm.has_work:
        llm.step()
    assert set(seen) == set(range(1, 10))
    assert runner.stats.eager > 0
    assert runner.stats.replays > 0
    print(
        f"{dtype}: replay and eager are {max(apart):.4f} apart, eager is off by {max(errors):.4f}"
    )
    assert max(apart) <= (1e-4 if dtype == "float32" else 2 * max(errors))
    llm.cache.check(owned=())
