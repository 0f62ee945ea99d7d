"""Hidden states beside a step's output: of a small step, and as the engine's own runner serves
them."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from model_standins import DenseAttention
from torch import Tensor
from torch._inductor import compile_fx as inductor
from worlds import give_graphs

from minikv import LLM, SamplingParams
from minikv.engine.batch import Batch
from minikv.graphs import Buffer, CudaGraphRunner, Hidden

gpu = pytest.mark.gpu
on_devices = pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=gpu)])
WAYS = ["eager", "tape", "compiled", pytest.param("graph", marks=gpu)]
every_way = pytest.mark.parametrize("way", WAYS)


@on_devices
def test_hidden_states_are_captured_when_first_asked_for(device) -> None:
    modes = []

    def step(inputs, variant, hidden=Hidden.NULL):
        modes.append(hidden)
        states = inputs["x"] * 10  # [size * 2, 3]
        out = states.view(-1, 2, 3).sum((1, 2))
        return {Hidden.NULL: out, Hidden.LAST: (out, states[1::2]), Hidden.FULL: (out, states)}[
            hidden
        ]

    x = Buffer(torch.zeros(8, 3, device=device), per_row=2)
    r = CudaGraphRunner(step, {"x": x}, [2, 4], tokens_per_row=2, progress=False)
    data = torch.arange(18.0).view(6, 3)
    want = (data * 10).view(3, 2, 3).sum((1, 2))
    assert torch.equal(r({"x": data}).cpu(), want)
    assert (r.stats.captures, set(modes)) == (2, {Hidden.NULL})
    out, states = r({"x": data}, hidden=Hidden.LAST)
    assert torch.equal(out.cpu(), want)
    assert torch.equal(states.cpu(), data[1::2] * 10)
    assert r.stats.captures == 4
    _, states = r({"x": data}, hidden=Hidden.FULL)
    assert torch.equal(states.cpu(), data * 10)
    assert r.stats.captures == 6
    _, states = r({"x": data}, hidden=Hidden.LAST)
    assert torch.equal(states.cpu(), data[1::2] * 10)
    assert torch.equal(r({"x": data}).cpu(), want)
    assert r.stats.captures == 6, "more was captured than is asked for: it serves"
    big = torch.arange(30.0).view(10, 3)
    _, states = r({"x": big}, hidden=Hidden.LAST)
    assert torch.equal(states.cpu(), big[1::2] * 10)
    assert r.stats.eager == 1


def build(way: str, monkeypatch: pytest.MonkeyPatch) -> LLM:
    """An engine whose steps run this way; on the CPU nothing is generated for a compiled step."""
    if way == "compiled":
        plain = lambda graph, inputs, config_patches: graph.forward  # noqa: E731
        monkeypatch.setattr(inductor, "compile_fx", plain)
    device = "cuda" if way == "graph" else "cpu"
    llm = LLM(
        "tiny", device=device, dtype="float32", graphs=way == "compiled", progress=False,
        kv_tokens=1024, page_size=4, max_requests=4, chunk_tokens=16,
    )  # fmt: skip
    if way in ("tape", "graph"):
        give_graphs(llm, [2, 4], device)
    return llm


def full_pass(llm: LLM, batch: Batch, hidden: Hidden, keep: tuple[int, ...]) -> Tensor:
    """The states of a batch's tokens by a pass over each request from its first token on."""
    decoder, found = llm.decoder, []
    for r, start, end in zip(batch.requests, batch.prefix_lens, batch.seq_lens, strict=True):
        ids = torch.as_tensor(r.tokens[: int(end)]).to(llm.device)
        dense = DenseAttention().begin((0, len(ids)))
        positions = torch.arange(len(ids), device=llm.device)
        options = decoder.attention_layers
        states: Any = decoder(ids, positions, dense, options, None, keep)[1]
        found.append(states[-1:] if hidden is Hidden.LAST else states[int(start) :])
    return torch.cat(found)


class Watched:
    """A runner that is asked for hidden states with every batch."""

    def __init__(self, llm: LLM, hidden: Hidden, layers: tuple[int, ...]) -> None:
        self.llm, self.hidden, self.layers, self.runner = llm, hidden, layers, llm.runner
        self.variants, self.can_run, self.seen = llm.runner.variants, llm.runner.can_run, []
        llm.loop.runner, llm.loop.overlaps = self, False

    def __call__(self, batch: Batch, variant: str) -> Tensor:
        out, states = self.runner(batch, variant, hidden=self.hidden, layers=self.layers)
        out = out.clone()
        want = full_pass(self.llm, batch, self.hidden, self.layers or (2,))
        torch.testing.assert_close(states, want, atol=1e-4, rtol=1e-4)
        self.seen.append((len(batch.requests), batch.num_tokens))
        return out


@every_way
@pytest.mark.parametrize("hidden", [Hidden.LAST, Hidden.FULL], ids=str)
@pytest.mark.parametrize("layers", [(), (0, 1)], ids=["last layer", "two layers"])
def test_the_engines_runner_serves_hidden_states(way, hidden, layers, monkeypatch) -> None:
    prompts = [[1 + i, 2, 3] * (1 + 3 * i) for i in range(3)]  # the longest is cut in chunks
    params = [
        SamplingParams(max_tokens=3 + i, temperature=float(i == 1), seed=1, ignore_eos=True)
        for i in range(3)
    ]
    want = [o.token_ids for o in build("eager", monkeypatch).generate(prompts, params)]
    llm = build(way, monkeypatch)
    watched = Watched(llm, hidden, layers)
    with torch.inference_mode():
        got = [o.token_ids for o in llm.generate(prompts, params)]
    assert got == want
    stats, ragged = watched.runner.stats, [n < tokens for n, tokens in watched.seen]
    assert stats.ragged >= 2, "prompts ran, too"
    assert any(n > 1 for (n, _), prompt in zip(watched.seen, ragged, strict=True) if prompt)
    served = stats.eager if way == "eager" else stats.replays
    assert served == len(watched.seen) - stats.ragged > 3


@every_way
def test_more_layers_are_captured_anew_and_fewer_are_served(way, monkeypatch) -> None:
    llm, batches = build(way, monkeypatch), []
    runner, start = llm.runner, llm.loop._start
    monkeypatch.setattr(llm.loop, "_start", lambda batch: batches.append(batch) or start(batch))
    for prompt in ([1, 2, 3], [4, 5]):
        llm.add(prompt, SamplingParams(max_tokens=9, temperature=0, ignore_eos=True))
    while not (batches and batches[-1].decode):
        llm.step()
    batch = batches[-1]
    plain = runner(batch, "greedy").clone()
    asked = [  # and whether it is more than was captured
        (Hidden.LAST, (0, 1), True),
        (Hidden.LAST, (1,), False),
        (Hidden.LAST, (), True),
        (Hidden.LAST, (1, 0), False),
        (Hidden.FULL, (1,), True),
        (Hidden.LAST, (), False),
        (Hidden.FULL, (0, 2), True),
        (Hidden.FULL, (0, 1, 2), False),
        (Hidden.LAST, (), False),
    ]
    for hidden, layers, more in asked:
        before = runner.stats.captures
        out, states = runner(batch, "greedy", hidden=hidden, layers=layers)
        assert (runner.stats.captures > before) is (more and way != "eager")
        assert torch.equal(out, plain)
        want = full_pass(llm, batch, hidden, layers or (2,))
        torch.testing.assert_close(states, want, atol=1e-4, rtol=1e-4)
    before = runner.stats.captures
    assert torch.equal(runner(batch, "greedy"), plain)
    assert runner.stats.captures == before, "more was captured than is asked for: it serves"
