"""Top-k and top-p without a sort (P10): the tokens that a sorted vocabulary keeps, and the same
draws."""

from __future__ import annotations

import itertools

import numpy as np
import pytest
import torch

from minikv.engine.cuts import (
    ALL,
    BLOCK,
    WHOLE,
    keep_likeliest,
    keep_likeliest_torch,
    keep_likeliest_triton,
)
from minikv.engine.sampling import choose, mass_limit
from minikv.graphs import CudaGraphRunner

DEVICES = ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)]
on_devices = pytest.mark.parametrize("device", DEVICES)
WAYS = [keep_likeliest, keep_likeliest_torch, keep_likeliest_triton]


def cut_by_loop(x, limit, weights):
    """Tokens one by one, likeliest first, with Python's integers."""
    rows = []
    for row, most, w in zip(x.tolist(), limit.tolist(), weights, strict=True):
        before, kept = 0, [float("-inf")] * len(row)
        for token in sorted(range(len(row)), key=lambda t: (-row[t], t)):
            if before < most or most == ALL:
                kept[token] = row[token]
            before += w[token]
        rows.append(kept)
    return torch.tensor(rows)


def sorted_choose(x, temperature, top_k, top_p, min_p, u, exact=False):
    """The draw by a sort of the vocabulary, whose masses are added in fp32, one after the other, or
    in fp64 and then rounded."""
    best, first = x.max(dim=-1, keepdim=True)
    x = (x - best) / temperature.float().clamp_min(1e-10)[:, None]
    ranked, order = x.sort(dim=-1, descending=True, stable=True)
    limit = torch.where(top_k < 1, x.shape[-1], top_k)[:, None]
    cut = torch.arange(x.shape[-1], device=x.device) >= limit
    mass = torch.softmax(ranked.masked_fill(cut, -torch.inf), dim=-1)
    mass = (mass.double().cumsum(dim=-1) if exact else mass.cumsum(dim=-1)).float()
    before = torch.nn.functional.pad(mass[:, :-1], (1, 0))
    cut |= before >= torch.where(top_p < 1, top_p.float(), 2.0)[:, None]
    cut[:, 0] = False
    x = x.masked_fill(torch.empty_like(cut).scatter_(1, order, cut), -torch.inf)
    p = torch.softmax(x, dim=-1)
    p = p.masked_fill(p < min_p.float()[:, None] * p.amax(dim=-1, keepdim=True), 0.0)
    mass = p.double().cumsum(dim=-1)
    total = mass[:, -1]
    target = torch.minimum(u * total, torch.nextafter(total, torch.zeros_like(total)))
    drawn = torch.searchsorted(mass, target[:, None], right=True).clamp_max(x.shape[-1] - 1)
    return torch.where(temperature[:, None] == 0, first, drawn).squeeze(1)


def knobs(*rows, device="cpu"):
    """Columns of (temperature, top_k, top_p, min_p, u)."""
    return torch.tensor(rows, dtype=torch.float64, device=device).unbind(1)


def below_zero(n, vocab, ties):
    x = torch.randn(n, vocab) * 3
    x = x.round() if ties else x
    return x - x.amax(-1, keepdim=True)


@on_devices
@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("ties", [False, True])
@pytest.mark.parametrize("vocab", [1, 2, 33, 300])
def test_by_number_against_a_loop(way, vocab, ties, device):
    limits = [1, 2, 5, vocab - 1, vocab, vocab + 1, 2**30, ALL]
    x = below_zero(len(limits), vocab, ties)
    x[0, vocab // 2 :] = -torch.inf
    limit = torch.tensor(limits).clamp_min(1)
    want = cut_by_loop(x, limit, np.ones(x.shape, int).tolist())
    x = x.to(device)
    way(x, limit.to(device))
    assert torch.equal(x.cpu(), want)


@on_devices
@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("ties", [False, True])
@pytest.mark.parametrize("vocab", [1, 2, 33, 300])
def test_by_mass_against_a_loop(way, vocab, ties, device):
    tops = [1e-9, 0.1, 0.5, 0.9, 0.999, 1 - 1e-7, 1.0]
    x = below_zero(len(tops), vocab, ties)
    p = torch.softmax(x, -1)
    limit = mass_limit(torch.tensor(tops, dtype=torch.float64))
    want = cut_by_loop(x, limit, [[int(v * WHOLE) for v in row] for row in p.tolist()])
    x = x.to(device)
    way(x, limit.to(device), p.to(device))
    assert torch.equal(x.cpu(), want)


@on_devices
@pytest.mark.parametrize("way", WAYS)
def test_a_border_beyond_the_first_part_of_the_row(way, device):
    """The kernel reads a row in parts: equal tokens are counted across them."""
    vocab = BLOCK + 70
    x = torch.full((3, vocab), -1.0)
    x[0, -1] = 0.0
    limit = torch.tensor([BLOCK + 3, 5, ALL])
    want = cut_by_loop(x, limit, np.ones(x.shape, int).tolist())
    x = x.to(device)
    way(x, limit.to(device))
    assert torch.equal(x.cpu(), want)
    kept = torch.isfinite(x[0].cpu()).nonzero().squeeze(1).tolist()
    assert kept == [*range(BLOCK + 2), vocab - 1]


@on_devices
@pytest.mark.parametrize("way", WAYS)
def test_a_broken_row_breaks_no_other(way, device):
    x = below_zero(4, 40, ties=True).to(device)
    x[1, 3], x[2] = torch.nan, -torch.inf
    p = torch.softmax(x, -1)
    alone = x[[0, 3]].clone()
    limit = mass_limit(torch.full((4,), 0.5, dtype=torch.float64, device=device))
    way(alone, limit[:2], p[[0, 3]])
    way(x, limit, p)
    assert torch.equal(x[[0, 3]], alone)
    way(x, torch.full_like(limit, 3))


@on_devices
@pytest.mark.parametrize(
    ("probabilities", "top_p", "kept"),
    [
        ([0.25, 0.5, 0.125, 0.125], 0.5, {1}),
        ([0.25, 0.5, 0.125, 0.125], 0.500001, {1, 0}),
        ([0.25, 0.5, 0.125, 0.125], 0.75, {1, 0}),
        ([0.25, 0.5, 0.125, 0.125], 0.875, {1, 0, 2}),
        ([0.25, 0.5, 0.125, 0.125], 0.876, {1, 0, 2, 3}),
        ([0.2, 0.4, 0.2, 0.2], 0.4, {1}),
        ([0.2, 0.4, 0.2, 0.2], 0.6, {1, 0}),
        ([0.2, 0.4, 0.2, 0.2], 0.8, {1, 0, 2}),
        ([0.25, 0.5, 0.125, 0.125], 0.0, {1}),
        ([0.25, 0.5, 0.125, 0.125], 1e-300, {1}),
    ],
)
def test_a_mass_reaches_top_p_exactly_at_the_border(probabilities, top_p, kept, device):
    p = torch.tensor([probabilities], device=device)
    x = (p / p.max()).log()
    limit = mass_limit(torch.tensor([top_p], dtype=torch.float64, device=device))
    for way in WAYS:
        y = x.clone()
        way(y, limit, p)
        assert set(torch.isfinite(y[0]).nonzero().squeeze(1).tolist()) == kept


@on_devices
def test_p10_draws_are_those_of_the_sorted_vocabulary_where_its_sums_are_exact(device):
    """Probabilities that are powers of two: every sum is exact in fp32, whatever its order."""
    powers = [-1.0, -2.0, -3.0, -4.0, -5.0, -5.0]
    halves = torch.tensor(powers, dtype=torch.float64) * np.log(2)
    tops = [0.0, 0.25, 0.5, 0.5 + 2**-24, 0.75, 0.875, 0.9, 0.9375, 0.96875, 1.0]
    first = 1 / 16  # some draws fall on a border, where a GPU's exp may be a unit off
    if device == "cuda":
        first += 2**-10
    rows = [
        (1.0, k, top_p, 0.0, u)
        for k, top_p, u in itertools.product((0, 1, 3, 6, 9), tops, np.arange(8) / 8 + first)
    ]
    logits = torch.stack([halves[torch.randperm(6)] for _ in rows]).float().to(device)
    p = torch.softmax(logits, -1).double()
    powers_of_two = p.log2().round().exp2()
    assert float((powers_of_two - p).abs().max()) < 1e-7
    rounded = not torch.equal(p, powers_of_two)  # a GPU's exp may be a unit off: sums in fp64 then
    got = choose(logits, *knobs(*rows, device=device))
    assert torch.equal(got, sorted_choose(logits, *knobs(*rows, device=device), exact=rounded))
    even = torch.zeros(len(rows), 64, device=device)
    assert torch.equal(
        choose(even, *knobs(*rows, device=device)),
        sorted_choose(even, *knobs(*rows, device=device)),
    )


@on_devices
@pytest.mark.parametrize("spread", [0.1, 1.0, 5.0])
def test_p10_draws_are_those_of_the_sorted_vocabulary(spread, device):
    """Random rows: with sums in fp64 always; with sums in fp32 unless a border is near."""
    rng = np.random.default_rng(int(spread * 10))
    rows = [
        (
            rng.choice([0.0, 0.5, 1.0, 2.0]),
            rng.choice([-1, 0, 1, 7, 300, 5000]),
            rng.choice([0.05, 0.5, 0.8, 0.95, 1.0]),
            rng.choice([0.0, 0.01]),
            rng.random(),
        )
        for _ in range(64)
    ]
    logits = (torch.randn(64, 4097) * spread).to(device)
    logits[::2] = (logits[::2] * 4).round() / 4  # ties
    columns = knobs(*rows, device=device)
    got = choose(logits, *columns)
    assert torch.equal(got, sorted_choose(logits, *columns, exact=True))
    differ = (got != sorted_choose(logits, *columns)).sum()
    assert differ <= 1, "a border may be as near as sums in fp32 are wrong"


@on_devices
def test_a_draw_does_not_depend_on_its_neighbours(device):
    logits = (torch.randn(6, 500) * 2).to(device)
    rows = [(1.0, k, p, 0.0, 0.1 + 0.15 * i) for i, (k, p) in enumerate(
        [(-1, 1.0), (5, 1.0), (-1, 0.7), (9, 0.7), (1, 0.2), (-1, 0.99)]
    )]  # fmt: skip
    together = choose(logits, *knobs(*rows, device=device)).tolist()
    for i, row in enumerate(rows):
        assert choose(logits[i : i + 1], *knobs(row, device=device)).tolist() == [together[i]]
    free = choose(logits[:1], *knobs(rows[0], device=device), truncates=False)
    assert free.tolist() == together[:1]


def test_p10_the_vocabulary_is_not_sorted(monkeypatch):
    """Only tokens near the border are: of 49,152 that fall off as words do, a few hundred."""
    vocab, sizes = 49152, []
    sort = torch.Tensor.sort
    monkeypatch.setattr(
        torch.Tensor, "sort", lambda t, **kw: (sizes.append(t.numel()), sort(t, **kw))[1]
    )
    ranks = torch.arange(1, vocab + 1.0)[torch.randperm(vocab)]
    logits = (-1.5 * ranks.log())[None].repeat(3, 1)
    rows = [(1.0, 50, 1.0, 0, 0.5), (1.0, -1, 0.9, 0, 0.5), (0.0, 0, 1, 0, 0)]
    got = choose(logits, *knobs(*rows))
    assert len(sizes) == 2, "rows without a cut are left alone"
    assert max(sizes) < 1000
    monkeypatch.undo()
    assert torch.equal(got, sorted_choose(logits, *knobs(*rows)))


def test_a_recorded_step_cuts_what_it_finds_then():
    """The cut reads on the host, and is done anew in each replay."""
    buffers = {"logits": torch.zeros(4, 50), "knobs": torch.zeros(4, 5, dtype=torch.float64)}
    r = CudaGraphRunner(
        lambda inputs, variant: choose(inputs["logits"], *inputs["knobs"].unbind(1)),
        buffers,
        [1, 2, 4],
        progress=False,
    )
    for n, (k, top_p) in itertools.product((4, 3, 1), [(3, 1.0), (-1, 0.6), (8, 0.5)]):
        logits = torch.randn(n, 50) * 2
        columns = torch.rand(n, 5, dtype=torch.float64)
        columns[:, 0], columns[:, 1], columns[:, 2], columns[:, 3] = 1.0, k, top_p, 0.0
        got = r({"logits": logits, "knobs": columns})
        assert torch.equal(got, sorted_choose(logits, *columns.unbind(1)))
    assert r.stats["eager"] == 0
