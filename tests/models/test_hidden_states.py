"""Hidden states that a forward pass returns beside its logits, for draft heads."""

from __future__ import annotations

import pytest
import torch
from model_standins import DenseAttention

from minikv.errors import ArgumentError
from minikv.models import Decoder, random_model
from minikv.models.files.shapes import SHAPES

IDS = torch.tensor([5, 6, 7, 8])


def run(decoder: Decoder, **options):
    attention = DenseAttention().begin((0, len(IDS)))
    return decoder(IDS, torch.arange(len(IDS)), attention, decoder.attention_layers, **options)


@pytest.mark.parametrize("name", ["tiny", "mla-tiny"])
@pytest.mark.parametrize("keep", [(0,), (1,), (0, 1), (1, 0)])
def test_what_layers_leave_is_returned_in_the_order_asked_for(name: str, keep: tuple) -> None:
    decoder = random_model(SHAPES[name], seed=4)
    left = {}
    for i, layer in enumerate(decoder.layers):
        layer.register_forward_hook(lambda module, args, out, i=i: left.__setitem__(i, out))
    logits, states = run(decoder, keep=keep)
    assert torch.equal(states, torch.stack([left[i] for i in keep], dim=1))
    assert states.shape == (len(IDS), len(keep), decoder.config.hidden_size)
    assert torch.equal(logits, run(decoder))


def test_the_last_layers_states_become_the_logits() -> None:
    decoder = random_model("tiny", seed=4)
    at = torch.tensor([3, 1])
    logits, states = run(decoder, logits_at=at, keep=(decoder.config.num_layers - 1,))
    assert states.shape[0] == len(IDS), "of all tokens, whichever logits are wanted"
    torch.testing.assert_close(logits, decoder.lm_head(decoder.norm(states[at, 0])))


@pytest.mark.parametrize("keep", [(3,), (-1,), (0, 9)])
def test_a_layer_that_there_is_not_is_refused(keep: tuple) -> None:
    attention = DenseAttention().begin((0, len(IDS)))
    decoder = random_model("tiny")
    with pytest.raises(ArgumentError, match=r"keep=.*the layers are 0 to 2"):
        decoder(IDS, torch.arange(4), attention, decoder.attention_layers, keep=keep)
    assert not attention.history, "nothing was written"
