"""Behaviour of graphs, and of sampling inside them, that could be broken without a test that
noticed: one test for each."""

from __future__ import annotations

import gc

import pytest
import torch
from worlds import double, give_graphs, runner_of

from minikv import LLM, SamplingParams
from minikv.engine.sampling import KNOBS, sample
from minikv.graphs import CudaGraphRunner

FREE = {"temperature": 1.0, "top_k": -1.0, "top_p": 1.0, "min_p": 0.0}


def knobs(*rows) -> torch.Tensor:
    """The sampler's buffer for rows given by name."""
    return torch.tensor(
        [[{**FREE, **row}[name] for name in KNOBS] for row in rows], dtype=torch.float64
    ).reshape(-1)


def test_padded_rows_have_length_1_in_every_plan_of_a_shrinking_batch(monkeypatch) -> None:
    llm = LLM(
        "tiny", device="cpu", dtype="float32", graphs=False, progress=False,
        kv_tokens=1024, page_size=4, max_requests=8,
    )  # fmt: skip
    r = give_graphs(llm, [2, 4, 8])
    decodes, planned = [], []
    prepare, call = r.prepare, CudaGraphRunner.__call__

    def watched_prepare(host, size):
        planned.append(host["seq_lens"].tolist())
        assert len(planned[-1]) == size
        prepare(host, size)

    def watched_call(runner, batch, *rest, **options):
        if batch.decode:
            decodes.append(batch.seq_lens.tolist())
        return call(runner, batch, *rest, **options)

    r.prepare = watched_prepare
    monkeypatch.setattr(CudaGraphRunner, "__call__", watched_call)
    params = [
        SamplingParams(max_tokens=2 + 2 * i, temperature=0, ignore_eos=True) for i in range(7)
    ]
    llm.generate([[i + 1] * (3 + i) for i in range(7)], params)
    assert {len(lens) for lens in decodes} == {7, 6, 5, 4, 3, 2, 1}
    for plan, lens in zip(planned, decodes, strict=True):
        assert plan == lens + [1] * (len(plan) - len(lens))
    assert r.stats["padded_rows"] == sum(map(len, planned)) - sum(map(len, decodes)) > 0


@pytest.mark.parametrize("tokens_per_row", [1, 3])
def test_padded_lengths_are_the_tokens_of_a_row(tokens_per_row) -> None:
    seen = []
    r = CudaGraphRunner(
        lambda inputs, variant: inputs["seq_lens"] * 1,
        {"seq_lens": torch.zeros(8, dtype=torch.int64)},
        [4, 8],
        tokens_per_row=tokens_per_row,
        prepare=lambda host, size: seen.append(host["seq_lens"].tolist()),
        progress=False,
    )
    seen.clear()
    for n in (8, 5, 3, 1):
        r({"seq_lens": torch.full((n,), 9)})
    pad = tokens_per_row
    assert seen == [[9] * 8, [9] * 5 + [pad] * 3, [9] * 3 + [pad], [9] + [pad] * 3]


@pytest.mark.parametrize("variant", ["sampled", "truncated", "logprobs"])
def test_min_p_of_1_keeps_the_best(variant) -> None:
    u = [0.0, 0.3, 0.6, 0.999]
    logits = torch.randn(4, 60)
    logits[1] = logits[1].round()  # several may be best
    cut = {} if variant == "sampled" else {"top_p": 0.9, "top_k": 9}
    rows = [{"min_p": 1.0, "u": v, **cut} for v in u]
    got = sample(logits, variant, knobs(*rows))
    tokens = (got[:, 0] if got.dim() == 2 else got).long()
    assert torch.equal(logits.gather(1, tokens[:, None])[:, 0], logits.amax(-1))


def test_top_k_of_0_is_off_beside_a_row_that_uses_it() -> None:
    """Neither greedy nor as narrow as its neighbour: the row draws as if it were alone."""
    u = [i / 32 + 1 / 64 for i in range(32)]
    logits = (torch.randn(1, 40) / 4).repeat(64, 1)  # nearly even
    rows = [row for v in u for row in ({"top_k": 0.0, "u": v}, {"top_k": 5.0, "u": v})]
    both = sample(logits, "truncated", knobs(*rows))
    free = sample(logits[:32], "sampled", knobs(*({"u": v} for v in u)))
    assert torch.equal(both[::2], free)
    assert len(set(both[::2].tolist())) > 15
    assert set(both[1::2].tolist()) == set(logits[0].topk(5).indices.tolist())


@pytest.mark.parametrize("on", [True, False])
@pytest.mark.parametrize("fails", [False, True])
def test_the_collector_is_frozen_while_capturing_and_only_then(on, fails, monkeypatch) -> None:
    seen = []

    def step(inputs, variant):
        seen.append((gc.isenabled(), gc.get_freeze_count() > 0))
        if fails and len(seen) > 2:
            raise RuntimeError("no memory")
        return double(inputs, variant)

    was_on = gc.isenabled()
    (gc.enable if on else gc.disable)()
    gc.unfreeze()
    try:
        if fails:
            with pytest.warns(RuntimeWarning, match="no memory"):
                r = runner_of(step, 4, [1, 2, 4])
        else:
            r = runner_of(step, 4, [1, 2, 4])
        after = gc.isenabled(), gc.get_freeze_count()
    finally:
        (gc.enable if was_on else gc.disable)()
    assert len(seen) >= 3
    assert set(seen) == {(False, True)}
    assert after == (on, 0)
    assert r.can_run(2) is not fails
