"""The decoder, top to bottom: token ids in, logits out; keys and values live in the attention backend's pool."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from minikv.models.config import ModelConfig
from minikv.models.layers import MLP, RMSNorm, Rotary, SelfAttention, Views
from minikv.models.mla import LatentAttention

if TYPE_CHECKING:
    from minikv.attention.backend import AttentionBackend


class Decoder(nn.Module):
    """A Llama-style decoder for inference; parameters are uninitialised until a checkpoint or a seed fills them.

    There is no batch dimension: the tokens of all requests lie end to end, and only the attention backend knows where
    one request ends and the next begins.

    Parameters
    ----------
    config
        The model's shape.
    device, dtype
        Where the weights live, and as what.
    """

    def __init__(self, config: ModelConfig, device: torch.device | str, dtype: torch.dtype) -> None:
        super().__init__()
        where: dict[str, Any] = {"device": torch.device(device), "dtype": dtype}
        self.config = config
        self.embed = nn.Parameter(torch.empty(config.vocab_size, config.hidden_size, **where), requires_grad=False)
        self.layers = nn.ModuleList(Layer(config, i, **where) for i in range(config.num_layers))
        self.norm = RMSNorm(config.hidden_size, config.rms_eps, **where)
        self.lm_head = self.embed if config.tie_embeddings else nn.Parameter(torch.empty_like(self.embed), False)
        self.rotary = Rotary(config, where["device"])

    def forward(
        self, token_ids: Tensor, positions: Tensor, attention: AttentionBackend, logits_at: Tensor | None = None
    ) -> Tensor:
        """Run all layers on T tokens.

        Parameters
        ----------
        token_ids, positions
            int64 [T], requests laid end to end.
        attention
            A backend whose ``begin_extend`` or ``begin_decode`` was called for exactly these tokens.
        logits_at
            int64 [R], the rows whose logits are wanted, such as the last token of each request; None means all T.

        Returns
        -------
        Tensor
            Logits [R or T, vocab] in the weights' dtype.
        """
        hidden = self.hidden_states(token_ids, positions, attention)
        return self.logits(hidden if logits_at is None else hidden[logits_at])

    def hidden_states(self, token_ids: Tensor, positions: Tensor, attention: AttentionBackend) -> Tensor:
        """What the last layer leaves for each token, [T, hidden], before the final norm."""
        hidden = F.embedding(token_ids, self.embed)  # [T, hidden]
        cos, sin = self.rotary(positions, hidden.dtype)  # [T, 1, d / 2] each
        for layer in self.layers:
            hidden = layer(hidden, cos, sin, attention)
        return hidden

    def logits(self, hidden: Tensor) -> Tensor:
        """Final norm and output matrix: [R, hidden] -> [R, vocab]."""
        return F.linear(self.norm(hidden), self.lm_head)

    def checkpoint_views(self) -> Views:
        """Name of every tensor of a Hugging Face checkpoint, and the piece of a parameter that it fills."""
        views = {"model.embed_tokens.weight": self.embed.data, "model.norm.weight": self.norm.weight.data}
        if not self.config.tie_embeddings:
            views["lm_head.weight"] = self.lm_head.data
        for i, layer in enumerate(self.layers):
            assert isinstance(layer, Layer)
            views |= {f"model.layers.{i}.{name}": view.data for name, view in layer.views().items()}
        return views


class Layer(nn.Module):
    """Attention, then MLP, each on a normalised copy and added back to the stream."""

    def __init__(self, config: ModelConfig, layer: int, **where: Any) -> None:
        super().__init__()
        self.input_norm = RMSNorm(config.hidden_size, config.rms_eps, **where)
        self.self_attn = (LatentAttention if config.mla else SelfAttention)(config, layer, **where)
        self.post_norm = RMSNorm(config.hidden_size, config.rms_eps, **where)
        self.mlp = MLP(config, **where)

    def forward(self, hidden: Tensor, cos: Tensor, sin: Tensor, attention: AttentionBackend) -> Tensor:
        hidden = hidden + self.self_attn(self.input_norm(hidden), cos, sin, attention)  # [T, hidden]
        return hidden + self.mlp(self.post_norm(hidden))

    def views(self) -> Views:
        views = {
            "input_layernorm.weight": self.input_norm.weight,
            "post_attention_layernorm.weight": self.post_norm.weight,
        }
        views |= {f"self_attn.{name}": view for name, view in self.self_attn.views().items()}
        return views | {f"mlp.{name}": view for name, view in self.mlp.views().items()}
