"""Models that are more than attention over pages: a decoder that looks at an encoder, and a layer with a state."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from minikv.graphs import Buffer, CudaGraphRunner, Padding

D = 4
on_devices = pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])


@on_devices
def test_a_decoder_with_cross_attention_has_two_graphs_a_size(device) -> None:
    w_q, w_k = (torch.randn(D, D).to(device) for _ in range(2))

    def layer(inputs: dict[str, Tensor], variant: str) -> Tensor:
        x = inputs["x"]  # [n, D]
        if variant == "text":
            return torch.tanh(x)
        states, length = inputs["encoder"], inputs["encoder_lens"]  # [n, T, D], [n]
        scores = torch.einsum("nd,ntd->nt", x @ w_q, states @ w_k)
        seen = torch.arange(states.shape[1], device=x.device) < length[:, None]
        weights = torch.softmax(scores.masked_fill(~seen, -torch.inf), -1)
        return torch.tanh(x + torch.einsum("nt,ntd->nd", weights, states))

    buffers = {
        "x": Buffer(torch.zeros(4, D, device=device)),
        "encoder": Buffer(torch.zeros(4, 6, D, device=device)),
        "encoder_lens": Buffer(torch.zeros(4, dtype=torch.int64, device=device), Padding.FILL, 1),
    }
    r = CudaGraphRunner(layer, buffers, [1, 2, 4], variants=("text", "cross"), progress=False)
    assert r.stats.captures == 6
    for n in (4, 3, 1, 2):
        batch = {"x": torch.randn(n, D), "encoder": torch.randn(n, 6, D), "encoder_lens": torch.randint(1, 7, (n,))}
        on_device = {k: v.to(device) for k, v in batch.items()}
        for variant in r.variants:
            got = r(batch, variant)
            assert got.isfinite().all()
            torch.testing.assert_close(got, layer(on_device, variant))
            assert torch.equal(got, layer(r.views(r.bucket(n)), variant)[:n])
    assert r.stats.replays == 8


@on_devices
def test_a_recurrent_layer_pads_state_slots(device) -> None:
    slots = 6
    state = torch.zeros(slots + 1, D, device=device)  # the last row belongs to padding

    def layer(inputs: dict[str, Tensor], variant: str) -> Tensor:
        read, write, x = inputs["read_slots"], inputs["write_slots"], inputs["x"]
        old = torch.where(read[:, None] < 0, 0.0, state[read.clamp_min(0)])  # -1: no state yet
        new = 0.5 * old + x
        state.index_copy_(0, write, new)
        return new * 2

    def slots_of(padding: Padding, fill: int) -> Buffer:
        return Buffer(torch.zeros(4, dtype=torch.int64, device=device), padding, fill)

    buffers = {
        "x": Buffer(torch.zeros(4, D, device=device), Padding.FILL, 9.0),
        "read_slots": slots_of(Padding.FILL, -1),
        "write_slots": slots_of(Padding.RESERVED, slots),
    }
    state[:slots] = torch.randn(slots, D)
    first = state.clone()
    r = CudaGraphRunner(layer, buffers, [2, 4], state={"state": state}, progress=False)
    assert torch.equal(state, first), "warm-ups left no trace"
    want = state.cpu()
    for mine in ([0, 3, 5, 1], [5, 0, 2], [4], [1, 2, 3]):
        x, at = torch.randn(len(mine), D), torch.tensor(mine)
        fresh = at == 4  # this request has just come
        want[at] = 0.5 * torch.where(fresh[:, None], 0.0, want[at]) + x
        got = r({"x": x, "read_slots": torch.where(fresh, -1, at), "write_slots": at})
        torch.testing.assert_close(got.cpu(), want[at] * 2)
        torch.testing.assert_close(state[:slots].cpu(), want[:slots])
    assert (r.stats.replays, r.stats.eager) == (4, 0)
