"""Models that are more than attention over pages: a decoder that looks at an encoder, and a layer
with a state."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch._inductor import compile_fx as inductor

from minikv.graphs import Buffer, CompiledRunner, CudaGraphRunner, GraphRunner, Padding

D, HEADS, SOURCE = 8, 2, 6
gpu = pytest.mark.gpu
ways = pytest.mark.parametrize(
    ("kind", "device"),
    [
        pytest.param(CudaGraphRunner, "cpu", id="tape"),
        pytest.param(CompiledRunner, "cpu", id="compiled"),
        pytest.param(CudaGraphRunner, "cuda", id="graph", marks=gpu),
        pytest.param(CompiledRunner, "cuda", id="compiled-cuda", marks=gpu),
    ],
)


def indices(device: str, padding: Padding, fill: int, variants: tuple[str, ...] = ()) -> Buffer:
    return Buffer(
        torch.zeros(4, dtype=torch.int64, device=device), padding, fill, variants=variants
    )


def close(got: Tensor, want: Tensor, kind: type[GraphRunner]) -> None:
    """The same bits from a graph; compiled code may round otherwise."""
    tolerance = 0.0 if kind is CudaGraphRunner else 1e-5
    torch.testing.assert_close(got, want, atol=tolerance, rtol=tolerance)


class CrossLayer(nn.Module):
    """A decoder layer: what it holds of the text so far, then what it looks up in the encoder's
    states, then an MLP."""

    def __init__(self) -> None:
        super().__init__()
        self.q, self.k, self.v, self.o, self.text = (nn.Linear(D, D) for _ in range(5))
        self.up, self.down = nn.Linear(D, 2 * D), nn.Linear(2 * D, D)

    def forward(self, inputs: dict[str, Tensor], variant: str) -> Tensor:
        x = inputs["x"] + torch.tanh(self.text(inputs["x"]))  # [n, D]
        if variant == "cross":
            states, lens = inputs["encoder"], inputs["encoder_lens"]  # [n, SOURCE, D], [n]
            q, k, v = (
                t.unflatten(-1, (HEADS, -1)) for t in (self.q(x), self.k(states), self.v(states))
            )  # [n, H, d], [n, SOURCE, H, d] twice
            scores = torch.einsum("nhd,nthd->nht", q, k) * (D / HEADS) ** -0.5
            seen = torch.arange(SOURCE, device=x.device) < lens[:, None, None]
            weights = torch.softmax(scores.masked_fill(~seen, -torch.inf), -1)
            x = x + self.o(torch.einsum("nht,nthd->nhd", weights, v).flatten(1))
        return x + self.down(torch.relu(self.up(x)))


@ways
def test_a_decoder_with_cross_attention_has_two_graphs_a_size(kind, device, monkeypatch) -> None:
    if device == "cpu":  # traced, but no code is generated, which would take long
        monkeypatch.setattr(
            inductor, "compile_fx", lambda graph, inputs, config_patches: graph.forward
        )
    layer = CrossLayer().to(device)
    buffers = {
        "x": Buffer(torch.zeros(4, D, device=device)),
        "encoder": Buffer(torch.zeros(4, SOURCE, D, device=device), variants=("cross",)),
        "encoder_lens": indices(
            device, Padding.FILL, 1, ("cross",)
        ),  # 0 would be a row without keys: NaN
    }
    r = kind(layer, buffers, [2, 4], variants=("text", "cross"), progress=False)
    for n in (4, 3, 1, 2, 4):
        texts = {"x": torch.randn(n, D)}
        both = {
            **texts,
            "encoder": torch.randn(n, SOURCE, D),
            "encoder_lens": torch.randint(1, SOURCE + 1, (n,)),
        }
        for variant, batch in (("text", texts), ("cross", both), ("text", both)):
            got = r(batch, variant)
            assert got.isfinite().all()
            with torch.no_grad():
                want = layer({name: t.to(device) for name, t in batch.items()}, variant)
                torch.testing.assert_close(got, want)
                close(got, layer(r.views(r.bucket(n)), variant)[:n], kind)
        assert (r.buffers["encoder_lens"].tensor[n:] == 1).all()
        assert not r.buffers["encoder"].tensor[n:].any(), (
            "nothing stays of a larger batch's encoder"
        )
    assert r(None, "cross").shape == (0, D), "an idle replay looks at a source of one state"
    assert (r.stats.captures, r.stats.replays, r.stats.eager) == (4, 16, 0)
    with pytest.raises(ValueError, match="encoder"):
        r(texts, "cross")


class RecurrentLayer(nn.Module):
    """``state = decay * state + x``, one line of state per request: a linear recurrence, as hybrid
    models have."""

    def __init__(self, slots: int, device: str) -> None:
        super().__init__()
        self.decay = nn.Parameter(torch.rand(D, device=device))
        self.slots = slots
        self.register_buffer(
            "state", torch.zeros(slots + 1, D, device=device)
        )  # the last line is padding's

    def forward(self, inputs: dict[str, Tensor], variant: str) -> Tensor:
        read, write, state = inputs["read_slots"], inputs["write_slots"], self.get_buffer("state")
        old = torch.where(
            read[:, None] < 0, 0.0, state[read.clamp_min(0)]
        )  # -1: nobody's, or no state yet
        new = self.decay * old + inputs["x"]
        state.index_copy_(0, write, new)
        return torch.tanh(new)


@ways
def test_a_recurrent_layer_pads_state_slots(kind, device) -> None:
    slots, layer = 6, RecurrentLayer(6, device)
    state, decay = layer.get_buffer("state"), layer.decay.detach().cpu()
    state[:slots] = torch.randn(slots, D)
    state[slots] = torch.nan  # must never be read
    before = state.clone()
    buffers: dict[str, Any] = {
        "x": Buffer(torch.zeros(4, D, device=device), Padding.FILL, 9.0),
        "read_slots": indices(device, Padding.FILL, -1),
        "write_slots": indices(device, Padding.RESERVED, slots),
    }
    r = kind(layer, buffers, [2, 4], state={"state": state}, progress=False)
    assert torch.equal(state[:slots], before[:slots]), "warm-ups left no trace"
    want = state[:slots].cpu()
    for mine in ([0, 3, 5, 1], [5, 0, 2], [4], [1, 2, 3], [0]):
        x, at = torch.randn(len(mine), D), torch.tensor(mine)
        fresh = at == 4  # this request has just come
        want[at] = decay * torch.where(fresh[:, None], 0.0, want[at]) + x
        got = r({"x": x, "read_slots": torch.where(fresh, -1, at), "write_slots": at})
        torch.testing.assert_close(got.cpu(), torch.tanh(want[at]))
        torch.testing.assert_close(state[:slots].cpu(), want)  # slot 0, too
        assert (r.buffers["read_slots"].tensor[len(mine) :] == -1).all()
        assert (r.buffers["write_slots"].tensor[len(mine) :] == slots).all()
    kept = state[:slots].clone()
    assert r(None).shape == (0, D)
    assert torch.equal(state[:slots], kept), "an idle replay changes nobody's state"
    assert (r.stats.replays, r.stats.eager) == (6, 0)


def test_eager_on_the_same_buffers_and_the_replay_leave_the_same_state() -> None:
    layer = RecurrentLayer(3, "cpu")
    state = layer.get_buffer("state")
    buffers: dict[str, Any] = {
        "x": Buffer(torch.zeros(2, D)),
        "read_slots": indices("cpu", Padding.FILL, -1),
        "write_slots": indices("cpu", Padding.RESERVED, 3),
    }
    r = CudaGraphRunner(layer, buffers, [2], state={"state": state}, progress=False)
    start = state.copy_(torch.randn(4, D)).clone()
    got = r(
        {"x": torch.randn(1, D), "read_slots": torch.tensor([1]), "write_slots": torch.tensor([1])}
    )
    after = state.clone()
    state.copy_(start)
    with torch.no_grad():
        assert torch.equal(r.run_step(r.views(2), "greedy")[:1], got)
    assert torch.equal(state, after)
