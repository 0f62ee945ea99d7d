"""Draws: exact against plain Python, by kernels as by PyTorch; broken rows, ties and borders."""

from __future__ import annotations

from fractions import Fraction

import numpy as np
import pytest
import torch

from minikv.engine.draw import BLOCK, draw, draw_torch, draw_triton, unit

WAYS = [draw_torch, draw_triton]


@pytest.fixture(params=["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
def where(request) -> str:
    return request.param


def knobs(n: int, where: str, temperature=1.0, min_p=0.0, u=0.5) -> list[torch.Tensor]:
    return [
        torch.full((n,), value, dtype=torch.float64, device=where)
        for value in (temperature, min_p, u)
    ]


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("vocab", [1, 7, 512, BLOCK, BLOCK + 1, 3 * BLOCK + 5])
def test_a_draw_falls_where_the_weights_before_it_end(way, vocab, where) -> None:
    """float64 weights, summed as fractions: the uniform number lies in the drawn token's share."""
    generator = torch.Generator().manual_seed(vocab)
    n = 6
    x = 3 * torch.randn(n, vocab, generator=generator)
    temperature = torch.rand(n, generator=generator, dtype=torch.float64) * 2 + 0.1
    u = torch.rand(n, generator=generator, dtype=torch.float64)
    u[0], u[1] = 0.0, 1 - 2**-53
    given = [t.to(where) for t in (x, temperature, torch.zeros(n).double(), u)]
    tokens = way(*given).tolist()
    for row, token in enumerate(tokens):
        scores = (x[row].double() - x[row].double().max()) / temperature[row]
        weights = [Fraction(w) for w in np.exp(scores.numpy()).tolist()]
        total, slack = sum(weights), Fraction(1, 10**5)
        before = sum(weights[:token])
        target = Fraction(float(u[row])) * total
        assert before - slack * total <= target <= before + weights[token] + slack * total


@pytest.mark.parametrize("way", WAYS)
def test_equal_weights_are_drawn_exactly(way, where) -> None:
    vocab = 2 * BLOCK
    x = torch.zeros(4, vocab, device=where)
    for at in (0, 1, BLOCK - 1, BLOCK, vocab - 1):
        temperature, min_p, _ = knobs(4, where)
        u = torch.full((4,), at / vocab, dtype=torch.float64, device=where)
        assert way(x, temperature, min_p, u).tolist() == [at] * 4


@pytest.mark.parametrize("way", WAYS)
def test_greedy_rows_broken_rows_and_what_is_left_out(way, where) -> None:
    inf, nan = torch.inf, torch.nan
    x = torch.tensor(
        [
            [1.0, 3, 3, 0],  # greedy: the first of two equal ones
            [1, nan, 2, 0],
            [inf, 0, 0, 0],
            [-inf, -inf, -inf, -inf],
            [-inf, -inf, 0, -inf],
            [0, 5, 0, 0],  # min_p = 1 leaves the best alone
        ],
        device=where,
    )
    temperature, min_p, _ = knobs(6, where)
    temperature[0], min_p[5] = 0, 1
    for u in (0.0, 0.5, 1 - 2**-53):
        given = torch.full((6,), u, dtype=torch.float64, device=where)
        assert way(x, temperature, min_p, given).tolist() == [1, -1, -1, -1, 2, 1]


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
def test_kernels_and_pytorch_draw_the_same(dtype, where) -> None:
    """But for borders that exp rounds to another side: at most one draw in a hundred."""
    generator = torch.Generator().manual_seed(3)
    x = (2 * torch.randn(400, 300, generator=generator)).to(where, dtype)
    u = torch.rand(400, generator=generator, dtype=torch.float64).to(where)
    temperature, min_p, _ = knobs(400, where, 0.8, 0.01)
    same = draw_torch(x, temperature, min_p, u) == draw_triton(x, temperature, min_p, u)
    assert same.float().mean() >= 0.99
    assert torch.equal(
        draw_triton(x[:7], temperature[:7], min_p[:7], u[:7]),
        draw_triton(x, temperature, min_p, u)[:7],
    ), "a row does not depend on the others"


def test_scaled_logits_are_not_divided_again(where) -> None:
    x = torch.randn(5, 100, device=where)
    temperature, min_p, u = knobs(5, where, 0.5)
    divided = (x - x.amax(-1, keepdim=True)) / 0.5
    assert torch.equal(
        draw(x, temperature, min_p, u), draw(divided, temperature, min_p, u, scaled=True)
    )


def test_all_weights_fit_in_an_integer() -> None:
    for vocab in (1, 2, 49152, 151936, 262144):
        assert vocab * unit(vocab) <= 2.0**62
