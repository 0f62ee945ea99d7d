"""Padding, outputs, variants, hidden states, capture: on the CPU through the tape, with ``-m gpu``
for real."""

from __future__ import annotations

import gc
import warnings

import pytest
import torch
from torch import Tensor
from torch._inductor import compile_fx as inductor
from worlds import double, give_graphs, runner_of

from minikv import LLM, SamplingParams
from minikv.engine.sampling import VARIANTS
from minikv.errors import ArgumentError, StateError
from minikv.graphs import (
    Buffer,
    CudaGraphRunner,
    GraphRunner,
    Hidden,
    Padding,
    rule,
    staged,
)  # fmt: skip

DEVICES = ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)]
on_devices = pytest.mark.parametrize("device", DEVICES)


def everything(rows: int, device: str) -> dict[str, Buffer]:
    made = staged(
        rows,
        device,
        {"token_ids": rule(), "seq_lens": rule(Padding.FILL, 1), "row": rule(Padding.RESERVED)},
    )
    made["x"] = Buffer(torch.zeros(rows, 2, device=device))
    made["drafts"] = Buffer(torch.zeros(rows * 3, device=device), Padding.FILL, -1, per_row=3)
    made["table"] = Buffer(torch.arange(10.0, device=device), Padding.KEEP)
    return made


def sums(inputs: dict[str, Tensor], variant: str) -> Tensor:
    """Reads every input."""
    rows = sum(inputs[name].float() for name in ("token_ids", "seq_lens", "row")) + inputs["x"].sum(
        1
    )
    return rows + inputs["drafts"].view(-1, 3).sum(1) + inputs["table"].sum()


@on_devices
def test_every_buffer_is_padded_by_its_rule_after_a_shrinking_batch(device) -> None:
    r = CudaGraphRunner(sums, everything(6, device), [1, 2, 4, 6], progress=False)
    for n in (6, 3, 1, 5, 2, 0, 4):
        batch = {
            "token_ids": torch.randint(1, 99, (n,)),
            "seq_lens": torch.randint(2, 9, (n,)),
            "row": torch.arange(1, n + 1),
            "x": torch.randn(n, 2),
            "drafts": torch.randn(n * 3),
        }
        before = {name: t.clone() for name, t in batch.items()}
        got = r(batch).cpu()
        table = torch.arange(10.0)
        torch.testing.assert_close(got, sums({**batch, "table": table}, ""))
        assert all(torch.equal(batch[name], t) for name, t in before.items()), (
            "the batch belongs to the caller"
        )
        for name, b in r.buffers.items():
            if b.padding is Padding.KEEP:
                assert torch.equal(b.tensor.cpu(), table)
                continue
            want = {Padding.ZERO: 0, Padding.RESERVED: 0, Padding.FILL: b.fill}[b.padding]
            assert torch.equal(b.tensor[: n * b.per_row].cpu(), batch[name])
            assert bool((b.tensor[n * b.per_row :] == want).all()), f"{name}: stale rows after {n}"


@on_devices
def test_b89_outputs_are_the_callers_own(device) -> None:
    kept = torch.zeros(4, 3, device=device)

    def step(inputs, variant):
        kept.copy_(kept + 1)
        return {"y": inputs["x"] * 2, "input": inputs["x"], "pair": (inputs["x"].sum(1), 7)}

    for sizes in ([4], []):  # replayed, eager
        r = runner_of(step, 4, sizes, device=device, state={"kept": kept})
        outs = []
        for value in (1.0, 2.0, 3.0):
            outs.append((value, r({"x": torch.full((3, 3), value)})))
        for value, out in outs:
            assert out["y"].tolist() == [[2 * value] * 3] * 3
            assert out["input"].tolist() == [[value] * 3] * 3
            assert out["pair"][0].tolist() == [3 * value] * 3
            assert out["pair"][1] == 7


def four_numbers(inputs: dict[str, Tensor], variant: str) -> dict[str, Tensor]:
    """Rows, and as many numbers as rows that count something else."""
    return {"rows": inputs["x"] * 2, "sums": inputs["x"].new_ones(4)}


@pytest.mark.parametrize("sizes", [[4], []], ids=["replayed", "eager"])
@on_devices
def test_p05_an_output_that_is_no_rows_comes_back_whole(device, sizes) -> None:
    outputs = ("requests", "nothing")
    r = runner_of(four_numbers, 4, sizes, device=device, outputs=outputs)
    guessed = runner_of(four_numbers, 4, [4], device=device)
    for n in (4, 3, 1):
        out = r({"x": torch.ones(n, 3)})
        assert (out["rows"].shape, out["sums"].tolist()) == ((n, 3), [1.0] * 4)
        assert guessed({"x": torch.ones(n, 3)})["sums"].shape == (n,)


def engine(way: str) -> LLM:
    llm = LLM(
        "tiny", device="cuda" if way == "graph" else "cpu", graphs=way in ("compiled", "graph"),
        kv_tokens=1024, page_size=4, max_requests=4, chunk_tokens=16, progress=False,
    )  # fmt: skip
    if way == "tape":
        give_graphs(llm, [1, 2, 4])
    return llm


EVERY_ENGINE = pytest.mark.parametrize(
    "way", ["eager", "compiled", "tape", pytest.param("graph", marks=pytest.mark.gpu)]
)


@EVERY_ENGINE
def test_p04_every_engines_runner_has_the_same_members_and_counters(way) -> None:
    r = engine(way).runner
    assert isinstance(r, GraphRunner)
    assert r.can_run(1) is (way != "eager")
    assert (r.bucket(1), r.agree([1, 0])) == ((None, None) if way == "eager" else (1, 1))
    assert not r.can_run(5)
    assert r.variants == VARIANTS
    assert {size for _, size in r.captured} == set(r.sizes)
    assert r.views(2)["token_ids"].shape == (2,)
    assert r.hidden is Hidden.NULL
    assert list(r.stats) == ["replays", "eager", "captures", "padded_rows", "graph_bytes"]
    assert (r.stats.replays, r.stats.eager, r.stats.padded_rows, r.stats.ragged) == (0, 0, 0, 0)
    with pytest.raises(AttributeError, match="spilled"):
        _ = r.stats.spilled
    with pytest.raises(ArgumentError, match="variant"):
        r(None, "beam")


@EVERY_ENGINE
def test_ragged_counts_prompts_and_eager_only_decode_steps(way, monkeypatch) -> None:
    plain = lambda graph, inputs, config_patches: graph.forward  # noqa: E731
    monkeypatch.setattr(inductor, "compile_fx", plain)
    llm, seen = engine(way), []
    start = llm.loop._start
    monkeypatch.setattr(llm.loop, "_start", lambda batch: seen.append(batch) or start(batch))
    llm.generate([[1] * 40, [2] * 3], SamplingParams(max_tokens=3, temperature=0, ignore_eos=True))
    kinds, stats = [batch.decode for batch in seen if batch], llm.runner.stats
    assert stats.ragged == kinds.count(False) == 3
    decodes = kinds.count(True)
    assert (stats.eager, stats.replays) == ((decodes, 0) if way == "eager" else (0, decodes))


def test_plain_tensors_pad_by_name() -> None:
    lens = torch.zeros(4, dtype=torch.int64)
    r = CudaGraphRunner(
        lambda i, v: i["seq_lens"] + 0, {"seq_lens": lens}, [4], tokens_per_row=3, progress=False
    )  # fmt: skip
    assert r({"seq_lens": torch.tensor([9])}).tolist() == [9]
    assert lens.tolist() == [9, 3, 3, 3]


def test_bad_batches_name_the_input() -> None:
    r = CudaGraphRunner(sums, everything(4, "cpu"), [4], progress=False)
    good = {
        n: b.tensor[: 2 * b.per_row].clone()
        for n, b in r.buffers.items()
        if b.padding is not Padding.KEEP
    }
    with pytest.raises(ArgumentError, match="row"):
        r({k: v for k, v in good.items() if k != "row"})
    with pytest.raises(ArgumentError, match="drafts"):
        r({**good, "drafts": torch.zeros(5)})
    with pytest.raises(ArgumentError, match="hold 4 rows"):
        CudaGraphRunner(sums, everything(4, "cpu"), [8], progress=False)
    with pytest.raises(ArgumentError, match="buffers"):
        CudaGraphRunner(sums, {"table": Buffer(torch.zeros(3), Padding.KEEP)}, [1], progress=False)
    with pytest.raises(ArgumentError, match="fill"):
        Buffer(torch.zeros(3), Padding.ZERO, 1)


@on_devices
def test_variants_are_graphs_of_their_own(device) -> None:
    r = runner_of(double, 4, [1, 4], device=device, variants=("greedy", "plus"))
    assert r.captured == [("greedy", 1), ("greedy", 4), ("plus", 1), ("plus", 4)]
    x = torch.randn(3, 3)
    assert torch.equal(r({"x": x}).cpu(), x * 2)
    assert torch.equal(r({"x": x}, "plus").cpu(), x + 1)
    with pytest.raises(
        ArgumentError, match=r"'logprobs'.*greedy × 1, greedy × 4, plus × 1, plus × 4"
    ):
        r({"x": x}, "logprobs")


@on_devices
def test_a_batch_that_ran_eagerly_in_inference_mode_does_not_hinder_a_later_capture(device) -> None:
    made = staged(
        4,
        device,
        {"x": rule(dtype=torch.float64), "y": rule(dtype=torch.float64, variants=("plus",))},
    )
    made["z"] = Buffer(torch.zeros(4, device=device), variants=("plus",))
    r = CudaGraphRunner(
        lambda inputs, variant: sum(inputs.values(), torch.zeros((), device=device)), made, [2],
        variants=("greedy", "plus"), later=("plus",), progress=False,
    )  # fmt: skip
    with torch.inference_mode():
        for n in (3, 4, 2, 1):  # the first two are too large for a graph
            batch = {name: torch.randn(n, dtype=b.tensor.dtype) for name, b in made.items()}
            torch.testing.assert_close(r(batch, "plus").cpu(), batch["x"] + batch["y"] + batch["z"])
    assert (r.stats.eager, r.stats.replays, r.stats.captures) == (2, 2, 2)


@on_devices
def test_an_idle_rank_replays_padding(device) -> None:
    seen = []
    r = runner_of(
        double,
        4,
        [2, 4],
        device=device,
        prepare=lambda host, size: seen.append((size, host["x"].clone())),
    )
    r({"x": torch.ones(4, 3)})
    seen.clear()
    assert r(None).shape == (0, 3)
    assert r({"x": torch.zeros(0, 3)}).shape == (0, 3)
    assert [(size, x.abs().sum().item()) for size, x in seen] == [(2, 0), (2, 0)]
    assert r.stats.replays == 3
    assert runner_of(double, 4, [2], padding=False, device=device)(None).shape == (0, 3)
    assert runner_of(double, 4, [], device=device)(None).shape == (0, 3)


@on_devices
def test_capture_puts_the_state_back(device) -> None:
    state, log = torch.tensor([5.0], device=device), []

    def step(inputs, variant):
        log.append(inputs["x"].shape[0])
        state.add_(1)
        inputs["x"].add_(1)  # a step may change its inputs
        return inputs["x"] + state

    r = runner_of(step, 4, [1, 4, 2], device=device, state={"state": state})
    assert state.item() == 5
    assert log[::3] == [4, 2, 1], "largest first"
    assert len(log) == 9, "two warm-ups, one recording each"
    assert torch.equal(r({"x": torch.ones(1, 3)}).cpu(), torch.full((1, 3), 8.0))
    assert state.item() == 6
    assert len(log) == 9, "a replay runs no Python"


def _frozen() -> int:
    """Objects out of the collector's sight; after a collection, in which Python 3.12 sets some of
    its own aside."""
    gc.collect()
    return gc.get_freeze_count()


@on_devices
def test_a_failed_capture_goes_on_eagerly(device) -> None:
    big = []

    def step(inputs, variant):
        big.append(torch.zeros(1 << 20, device=device))
        if inputs["x"].shape[0] == 2 and len(big) > 4:
            raise RuntimeError("out of everything")
        return inputs["x"] * 2

    state, frozen = torch.ones(1, device=device), _frozen()
    before = torch.cuda.memory_reserved() if device == "cuda" else 0
    with pytest.warns(
        RuntimeWarning, match=r"greedy × 2 failed.*out of everything(.|\n)*\(1\).*\(2\)(.|\n)*\(3\)"
    ):
        r = runner_of(step, 4, [2, 4], device=device, state={"state": state})
    assert r.captured == []
    assert gc.isenabled()
    assert _frozen() == frozen, "what was frozen is free again"
    big.clear()
    if device == "cuda":
        torch.cuda.empty_cache()
        assert torch.cuda.memory_reserved() <= before + (8 << 20)
    x = torch.randn(3, 3)
    assert torch.equal(r({"x": x}).cpu(), x * 2)
    assert (r.stats.eager, r.stats.replays, r.stats.graph_bytes) == (1, 0, 0)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        again = runner_of(double, 4, [2, 4], device=device)  # the pool is usable
    assert torch.equal(again({"x": x}).cpu(), x * 2)


def test_a_step_that_reads_on_the_host_cannot_be_recorded() -> None:
    with pytest.warns(RuntimeWarning, match="on the host"):
        r = runner_of(lambda inputs, variant: inputs["x"] * float(inputs["x"].sum()), 2, [2])
    assert torch.equal(r({"x": torch.ones(2, 3)}), torch.full((2, 3), 6.0))
    with pytest.warns(RuntimeWarning, match="on the host"):
        runner_of(lambda inputs, variant: inputs["x"][inputs["x"] > 0], 2, [2])


@on_devices
def test_debug_names_the_input_that_moved(device) -> None:
    weights = {"weight": torch.ones(3, device=device)}
    state = torch.zeros(1, device=device)
    r = runner_of(
        lambda i, v: i["x"] * weights["weight"] + state, 4, [4], device=device,
        debug=True, watch=lambda: weights, state={"state": state},
    )  # fmt: skip
    x = torch.randn(2, 3)
    assert torch.equal(r({"x": x}).cpu(), x)
    weights["weight"].mul_(2)
    assert torch.equal(r({"x": x}).cpu(), x * 2), "changed in place: seen by the graph"
    old, weights["weight"] = weights["weight"], torch.ones(3, device=device)
    with pytest.raises(StateError, match="'weight'"):
        r({"x": x})
    weights["weight"] = old
    r.state["state"] = state.clone()
    with pytest.raises(StateError, match="'state'"):
        r({"x": x})
    r.state["state"] = state
    r.buffers["x"].tensor = torch.zeros(4, 3, device=device)
    with pytest.raises(StateError, match="'x'"):
        r({"x": x})


@pytest.mark.gpu
def test_small_sizes_may_be_compiled_inside_their_graphs() -> None:
    r = runner_of(double, 4, [1, 4], device="cuda", compile_up_to=1)
    for n in (1, 3):
        x = torch.randn(n, 3)
        assert torch.equal(r({"x": x}).cpu(), x * 2)
    assert r.stats.replays == 2


def test_the_order_of_capture_may_be_another() -> None:
    seen: list[int] = []

    class SmallestFirst(CudaGraphRunner):
        def capture_order(self) -> list[int]:
            return self.sizes

    def step(inputs, variant):
        seen.append(inputs["x"].shape[0])
        return inputs["x"] * 2

    for kind, order in ((CudaGraphRunner, [4, 2, 1]), (SmallestFirst, [1, 2, 4])):
        seen.clear()
        r = kind(step, {"x": torch.zeros(4, 2)}, [1, 2, 4], progress=False)
        assert list(dict.fromkeys(seen)) == order
        x = torch.randn(3, 2)
        assert torch.equal(r({"x": x}), x * 2)
