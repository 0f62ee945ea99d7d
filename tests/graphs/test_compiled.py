"""The compiled runner: right where Inductor is not, every size compiled once, and a way out where
nothing compiles."""

from __future__ import annotations

import gc
import weakref
from collections.abc import Callable

import pytest
import torch
from torch import Tensor
from torch._inductor import compile_fx as inductor
from torch._inductor.exc import InductorError
from worlds import double, runner_of

from minikv import LLM, SamplingParams
from minikv.graphs import Buffer, CompiledRunner, Hidden, Padding
from minikv.graphs.compiled import stores_by_index


@pytest.fixture
def no_inductor(monkeypatch):
    """Dynamo traces, nothing is generated: graphs run as they are."""
    monkeypatch.setattr(inductor, "compile_fx", lambda graph, inputs, config_patches: graph.forward)


def reversed_rows(inputs: dict[str, Tensor], variant: str) -> Tensor:
    """Store rows by index, then read other rows of the same tensor."""
    pool, at = inputs["pool"], inputs["at"]
    pool[at] = pool[at] * 2
    pool.add_(pool.flip(0))
    return pool[at] + 1


def test_b92_a_store_and_a_read_of_other_rows_stay_bitwise_right() -> None:
    pool = torch.zeros(4, 8)
    buffers = {
        "pool": Buffer(pool, Padding.KEEP),
        "at": Buffer(torch.zeros(4, dtype=torch.int64), Padding.RESERVED, 0),
    }
    r = CompiledRunner(reversed_rows, buffers, [2, 4], progress=False)
    for rows in ([0, 1, 2, 3], [2, 1], [3, 1, 0, 2]):
        start, at = torch.randn(4, 8), torch.tensor(rows)
        pool.copy_(start)
        got = r({"at": at})
        mine = start.clone()
        want = reversed_rows({"pool": mine, "at": at}, "")
        assert torch.equal(pool, mine)
        assert torch.equal(got, want)
    assert dict(r.stats) == {
        "replays": 3,
        "eager": 0,
        "captures": 2,
        "padded_rows": 0,
        "graph_bytes": 0,
    }


def test_indexed_stores_are_found_in_traced_graphs() -> None:
    def has(step) -> bool:
        found = []

        def backend(graph, inputs):
            found.append(stores_by_index(graph))
            return graph.forward

        torch.compile(step, backend=backend)(torch.zeros(4, 2), torch.tensor([1, 0]))
        return any(found)

    assert has(lambda x, at: x.index_copy_(0, at, x[at]))
    assert has(lambda x, at: torch.index_put_(x, (at,), x[at] + 1))
    assert has(lambda x, at: x.scatter_(0, at[:, None], 1.0))
    assert not has(lambda x, at: x[at] + x.index_select(0, at).relu_())


def test_every_size_is_compiled_once(no_inductor) -> None:
    sizes = list(range(1, 13))  # dynamo gives up after 8 by itself
    r = runner_of(double, 12, sizes, CompiledRunner, variants=("greedy", "plus"))
    for n in (*sizes, *reversed(sizes)):
        x = torch.randn(n, 3)
        assert torch.equal(r({"x": x}), x * 2)
    assert (r.stats.captures, r.stats.eager) == (12, 0)
    r.compile_all()
    assert r.stats.captures == 24
    assert torch.equal(r({"x": torch.ones(5, 3)}, "plus"), torch.full((5, 3), 2.0))
    assert r.stats.captures == 24


def test_runners_of_one_step_keep_to_their_own_modules(no_inductor) -> None:
    class Times(torch.nn.Module):
        def __init__(self, factor: int) -> None:
            super().__init__()
            self.factor = factor

        def forward(self, x: Tensor) -> Tensor:
            return x * self.factor

    def run(factor: int) -> Callable[..., Tensor]:
        module = Times(factor)
        return runner_of(lambda inputs, variant: module(inputs["x"]), 2, [2], CompiledRunner)

    runners = {factor: run(factor) for factor in (2, 3)}
    for factor, r in (
        *runners.items(),
        *runners.items(),
    ):  # modules are not compared before each call
        assert torch.equal(r({"x": torch.ones(2, 3)}), torch.full((2, 3), float(factor)))


def test_an_engine_that_is_dropped_takes_what_was_compiled_with_it() -> None:
    params = SamplingParams(max_tokens=3, temperature=0, ignore_eos=True)
    options = {
        "graphs": True,
        "kv_tokens": 64,
        "page_size": 4,
        "max_requests": 1,
        "progress": False,
    }
    stays, goes = (LLM("tiny", device="cpu", **options) for _ in range(2))
    want = [llm.generate([[1, 2, 3]], params)[0].token_ids for llm in (stays, goes)]
    assert want[0] == want[1]
    assert goes.runner.stats.captures == 1
    weight, runner, number = (
        next(goes.decoder.parameters()),
        goes.runner,
        goes.runner.step.opaque.number,
    )
    parts = [goes.pool, goes.pool.k(0), goes.decoder, weight, runner, runner.step, runner._compiled]
    held = [weakref.ref(part) for part in parts]
    del goes, weight, runner, parts
    gc.collect()
    assert [ref() for ref in held] == [None] * len(held)
    assert stays.generate([[1, 2, 3]], params)[0].token_ids == want[0]
    again = LLM("tiny", device="cpu", **options)
    assert again.generate([[1, 2, 3]], params)[0].token_ids == want[0]
    assert again.runner.step.opaque.number <= number  # a number is part of the code that is cached
    assert (stays.runner.stats.captures, stays.runner.stats.replays, stays.runner.stats.eager) == (
        1,
        4,
        0,
    )


def test_padding_and_outputs_as_in_a_graph(no_inductor) -> None:
    r = runner_of(lambda inputs, variant: (inputs["x"], inputs["x"] * 2), 4, [2, 4], CompiledRunner)
    first, second = r({"x": torch.ones(3, 3)}), r({"x": torch.full((2, 3), 5.0)})
    assert first[0].tolist() == [[1.0] * 3] * 3, "an input that is returned is copied"
    assert second[1].tolist() == [[10.0] * 3] * 2
    assert r.buffers["x"].tensor[2:].abs().sum() == 0
    assert r(None)[1].shape == (0, 3)
    assert r.stats.padded_rows == 1 + 2


def test_hidden_states(no_inductor) -> None:
    def step(inputs, variant, hidden=Hidden.NULL):
        return inputs["x"] * 2 if hidden is Hidden.NULL else (inputs["x"] * 2, inputs["x"] + 1)

    r = runner_of(step, 4, [4], CompiledRunner)
    x = torch.randn(3, 3)
    assert torch.equal(r({"x": x}), x * 2)
    out, states = r({"x": x}, hidden=Hidden.FULL)
    assert torch.equal(out, x * 2)
    assert torch.equal(states, x + 1)
    assert torch.equal(r({"x": x}), x * 2)
    assert r.stats.captures == 2


def test_without_a_compiler_it_goes_on_eagerly(monkeypatch) -> None:
    def broken(graph, inputs, config_patches):
        raise InductorError(RuntimeError("no C++ compiler"), None)

    monkeypatch.setattr(inductor, "compile_fx", broken)
    r = runner_of(double, 4, [2, 4], CompiledRunner)
    x = torch.randn(3, 3)
    with pytest.warns(
        RuntimeWarning, match=r"greedy × 4 failed(.|\n)*\(1\)(.|\n)*\(2\)(.|\n)*\(3\)"
    ):
        assert torch.equal(r({"x": x}), x * 2)
    assert torch.equal(r({"x": x}), x * 2)
    assert not r.can_run(3)
    assert (r.stats.replays, r.stats.eager) == (0, 2)


def test_errors_of_the_step_are_the_steps(no_inductor) -> None:
    def step(inputs, variant):
        raise ValueError("the step's own")

    with pytest.raises(ValueError, match="own"):
        runner_of(step, 4, [4], CompiledRunner)({"x": torch.ones(4, 3)})


@pytest.mark.gpu
def test_compiled_on_cuda() -> None:
    r = runner_of(double, 4, [2, 4], CompiledRunner, device="cuda")
    for n in (3, 2):
        x = torch.randn(n, 3)
        assert torch.equal(r({"x": x}).cpu(), x * 2)
    assert (r.stats.captures, r.stats.replays) == (2, 2)
