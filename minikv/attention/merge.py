"""Merging attention over two disjoint sets of keys, each given by its output and log-sum-exp.

With ``w_i = exp(lse_i)`` the whole is ``(w_1 o_1 + w_2 o_2) / (w_1 + w_2)`` and its own lse
``log(w_1 + w_2)``: split decode, shared prefixes and cascades all rest on this one line
(FlashInfer's "attention states", Ye et al. 2024).
"""

from __future__ import annotations

import torch
from torch import Tensor


def merge_states(o1: Tensor, lse1: Tensor, o2: Tensor, lse2: Tensor) -> tuple[Tensor, Tensor]:
    """Attention over the union of two disjoint sets of keys.

    Parameters
    ----------
    o1, o2
        Outputs [..., d_v] over each set.
    lse1, lse2
        Natural log of each row's summed exponentials [...]; -inf where a set has no key, and then
        the output of that set may hold anything, NaN included.

    Returns
    -------
    o, lse
        Output in o1's dtype and lse in fp32 (fp64 for fp64 outputs); 0 and -inf where both sets are
        empty.

    Examples
    --------
    >>> one, empty = torch.ones(1, 2), torch.full((1, 2), torch.nan)
    >>> merge_states(one, torch.tensor([0.0]), empty, torch.tensor([-torch.inf]))
    (tensor([[1., 1.]]), tensor([0.]))
    >>> merge_states(one, torch.tensor([0.0]), 3 * one, torch.tensor([0.0]))
    (tensor([[2., 2.]]), tensor([0.6931]))
    """
    wide = torch.float64 if o1.dtype == torch.float64 else torch.float32
    lse1, lse2 = lse1.to(wide), lse2.to(wide)
    highest = torch.maximum(lse1, lse2)
    highest = highest.masked_fill(highest == -torch.inf, 0)  # -inf minus -inf would be NaN
    w1, w2 = torch.exp(lse1 - highest), torch.exp(lse2 - highest)
    total = w1 + w2

    def share(o: Tensor, w: Tensor) -> Tensor:
        return torch.where(w[..., None] == 0, 0, o.to(wide) * w[..., None])

    merged = (share(o1, w1) + share(o2, w2)) / total.masked_fill(total == 0, 1)[..., None]
    return merged.to(o1.dtype), highest + torch.log(total)
