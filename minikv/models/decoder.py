"""The decoder, top to bottom: token ids in, logits out; keys and values live in the attention
backend's pool."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from minikv.attention.backend import AttentionBackend, LayerAttention
from minikv.errors import ArgumentError
from minikv.models.config import ModelConfig
from minikv.models.layers import MLP, Linear, RMSNorm, SelfAttention, StepContext
from minikv.models.mla import LatentAttention
from minikv.models.rope import Rotary


class Decoder(nn.Module):
    """A Llama-style decoder for inference; parameters are uninitialised until a checkpoint or a
    seed fills them.

    There is no batch dimension: the tokens of all requests lie end to end, and only the attention
    backend knows where one request ends and the next begins.

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
        self.embed_tokens = Linear(config.hidden_size, config.vocab_size, **where)  # a row per id
        layers = (Layer(config, i, **where) for i in range(config.num_layers))
        self.layers: Any = nn.ModuleList(layers)
        self.norm = RMSNorm(config.hidden_size, config.rms_eps, **where)
        self.lm_head = self.embed_tokens
        if not config.tie_embeddings:
            self.lm_head = Linear(config.hidden_size, config.vocab_size, **where)
        self.rotary = Rotary(config, where["device"])

    def forward(
        self,
        token_ids: Tensor,
        positions: Tensor,
        attention: AttentionBackend,
        metadata: Any,
        logits_at: Tensor | None = None,
        keep: Sequence[int] = (),
    ) -> Any:
        """Run all layers on T tokens.

        Parameters
        ----------
        token_ids, positions
            int64 [T], requests laid end to end.
        attention, metadata
            A backend over the model's pool, and what its ``prepare`` gave for these tokens.
        logits_at
            int64 [R], the rows whose logits are wanted, such as the last token of each request;
            None means all T.
        keep
            Numbers of layers whose outputs are wanted, too (draft heads read them), counted from 0;
            the last layer's is what the final norm reads.

        Returns
        -------
        Tensor
            Logits [R or T, vocab] in the weights' dtype. With `keep` a pair: the logits, and the
            hidden states of all tokens, [T, len(keep), hidden] in the order of `keep`.

        Raises
        ------
        ArgumentError
            For a layer in `keep` that the model does not have.
        """
        if keep:
            self.check_keep(keep)
        hidden = F.embedding(token_ids, self.embed_tokens.weight)  # [T, hidden]
        cos, sin = self.rotary(positions, hidden.dtype)  # [T, 1, d / 2] each
        context = StepContext(cos, sin, attention, metadata)
        kept: dict[int, Tensor] = {}
        for i, layer in enumerate(self.layers):
            hidden = layer(hidden, context)
            if i in keep:
                kept[i] = hidden
        if logits_at is not None:
            hidden = hidden[logits_at]
        logits = self.lm_head(self.norm(hidden))
        return (logits, torch.stack([kept[i] for i in keep], 1)) if keep else logits

    def check_keep(self, keep: Sequence[int]) -> None:
        """Refuse numbers that no layer has."""
        if any(i not in range(len(self.layers)) for i in keep):
            raise ArgumentError("keep", keep, f"the layers are 0 to {len(self.layers) - 1}")

    @property
    def attention_layers(self) -> list[LayerAttention]:
        """The attention options of each layer, as the backend takes them."""
        return [layer.self_attn.options for layer in self.layers]

    def checkpoint_views(self) -> dict[str, Tensor]:
        """Name of every tensor of a Hugging Face checkpoint, and the (piece of a) parameter that it
        fills."""
        config = self.config
        kv, ff = config.kv_heads * config.head_dim, config.intermediate_size
        pieces = {
            "qkv_proj": {"q_proj": config.q_heads * config.head_dim, "k_proj": kv, "v_proj": kv},
            "gate_up_proj": {"gate_proj": ff, "up_proj": ff},
        }
        views: dict[str, Tensor] = {}
        for name, weight in self.named_parameters():
            if not name.startswith("lm_head"):
                name = f"model.{name}"
            module = name.split(".")[-2]
            rows = pieces.get(module, {module: weight.shape[0]})
            for piece, part in zip(rows, weight.data.split(list(rows.values())), strict=True):
                views[name.replace(module, piece)] = part
        return views


class Layer(nn.Module):
    """Attention, then MLP, each on a normalised copy and added back to the stream."""

    def __init__(self, config: ModelConfig, layer: int, **where: Any) -> None:
        super().__init__()
        self.input_layernorm = RMSNorm(config.hidden_size, config.rms_eps, **where)
        self.self_attn = (LatentAttention if config.mla else SelfAttention)(config, layer, **where)
        self.post_attention_layernorm = RMSNorm(config.hidden_size, config.rms_eps, **where)
        self.mlp = MLP(config, **where)

    def forward(self, hidden: Tensor, context: StepContext) -> Tensor:
        hidden = hidden + self.self_attn(self.input_layernorm(hidden), context)  # [T, hidden]
        return hidden + self.mlp(self.post_attention_layernorm(hidden))
