"""Random ragged batches for attention, and the one comparison that all attention tests use.

Every slot that no request lists holds NaN, as does slot 0, so an implementation that reads one
shows it.
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import Any, NamedTuple

import torch
from torch import Tensor

from minikv.attention import decode_attention, extend_attention, extend_attention_unified
from minikv.attention.reference import reference_attention

TOLERANCE = {torch.float32: 2e-5, torch.float16: 2e-3, torch.bfloat16: 1e-2}


class Way(NamedTuple):
    """A way of running attention: which implementation, on which device."""

    backend: str
    device: str


def assert_close(got: Tensor, want: Tensor, dtype: torch.dtype | None = None) -> None:
    """``|got - want| <= tol * max(1, max |want|)`` with the tolerance of `dtype` (default: got's);
    -inf equals -inf."""
    assert got.shape == want.shape, f"shape {tuple(got.shape)}, expected {tuple(want.shape)}"
    got, want, tol = got.double().cpu(), want.double().cpu(), TOLERANCE[dtype or got.dtype]
    assert not got.isnan().any(), f"{int(got.isnan().sum())} NaN in the result"
    empty = want == -torch.inf
    assert torch.equal(got == -torch.inf, empty)
    error = torch.where(empty, 0.0, got.masked_fill(empty, 0) - want.masked_fill(empty, 0)).abs()
    limit = tol * max(1.0, float(want.masked_fill(empty, 0).abs().max())) if want.numel() else 0.0
    assert error.numel() == 0 or float(error.max()) <= limit, (
        f"error {float(error.max()):.3g}, allowed {limit:.3g}"
    )


@dataclass
class Case:
    """One batch: everything the three forms need, and the options they share."""

    q: Tensor  # [tokens, q_heads, d_qk]
    k: Tensor  # [tokens, kv_heads, d_qk]: new keys
    v: Tensor  # [tokens, kv_heads, d_v]
    k_cache: Tensor  # [slots, kv_heads, d_qk]; new keys and values are in the pool too
    v_cache: Tensor
    qo_indptr: Tensor  # [batch + 1]
    prefix_indptr: Tensor  # [batch + 1]
    prefix_indices: Tensor
    kv_indptr: Tensor  # [batch + 1], of lists that hold prefix and new tokens
    kv_indices: Tensor
    prefix_lens: Tensor  # [batch]
    options: dict[str, Any] = field(default_factory=dict)

    def with_options(self, **options: Any) -> Case:
        return replace(self, options={**self.options, **options})

    def extend_args(self) -> tuple[Tensor, ...]:
        return (
            self.q,
            self.k,
            self.v,
            self.k_cache,
            self.v_cache,
            self.qo_indptr,
            self.prefix_indptr,
            self.prefix_indices,
        )

    def unified_args(self) -> tuple[Tensor, ...]:
        return (
            self.q,
            self.k_cache,
            self.v_cache,
            self.qo_indptr,
            self.kv_indptr,
            self.kv_indices,
            self.prefix_lens,
        )

    def decode_args(self) -> tuple[Tensor, ...]:
        """The last token of each request as its query; only for cases with one new token (or none)
        per request."""
        return self.q, self.k_cache, self.v_cache, self.kv_indptr, self.kv_indices

    def poisoned_out(self) -> Tensor:
        return torch.full(
            (*self.q.shape[:2], self.v.shape[2]),
            torch.nan,
            dtype=self.q.dtype,
            device=self.q.device,
        )

    def want_extend(self) -> tuple[Tensor, Tensor]:
        q, k, v, *cache, qo, indptr, indices = self.extend_args()
        return reference_attention(
            q, *cache, indptr, indices, k=k, v=v, qo_indptr=qo, **self.options
        )

    def want_unified(self) -> tuple[Tensor, Tensor]:
        q, k_cache, v_cache, qo, indptr, indices, prefix = self.unified_args()
        return reference_attention(
            q, k_cache, v_cache, indptr, indices, qo_indptr=qo, prefix_lens=prefix, **self.options
        )

    def want_decode(self) -> tuple[Tensor, Tensor]:
        return reference_attention(*self.decode_args(), **self.options)


def attend(form: str, case: Case, backend: str, return_lse: bool = False, **more: Any) -> Any:
    """Run one form ("extend", "unified" or "decode") of `case` into a poisoned output."""
    call = {
        "extend": extend_attention,
        "unified": extend_attention_unified,
        "decode": decode_attention,
    }[form]
    args = {"extend": case.extend_args, "unified": case.unified_args, "decode": case.decode_args}[
        form
    ]()
    return call(
        *args,
        **case.options,
        **more,
        return_lse=return_lse,
        out=case.poisoned_out(),
        backend=backend,
    )


def check(case: Case, backend: str, forms: str = "extend unified") -> None:
    """Compare the named forms with the oracle, without and with the log-sum-exp (a path of its own
    in PyTorch)."""
    for form in forms.split():
        want, want_lse = getattr(case, f"want_{form}")()
        out, lse = attend(form, case, backend, return_lse=True)
        assert_close(out, want)
        assert_close(lse, want_lse, case.q.dtype)
        if backend == "torch":
            assert_close(attend(form, case, backend), want)


def make_case(
    prefix: list[int],
    new: list[int],
    *,
    q_heads: int = 4,
    kv_heads: int = 2,
    d: int = 16,
    d_v: int | None = None,
    shared_kv: bool = False,
    dtype: torch.dtype = torch.float32,
    kv_dtype: torch.dtype | None = None,
    k_scale: float = 1.0,
    v_scale: float = 1.0,
    page_size: int = 1,
    index_dtype: torch.dtype = torch.int32,
    seed: int = 0,
    device: str = "cpu",
    **options: Any,
) -> Case:
    """A batch of ``len(prefix)`` requests over shuffled pages; unlisted slots hold NaN.

    Parameters
    ----------
    prefix, new
        Lengths of each request.
    d, d_v
        Head sizes of keys and values (`d_v` defaults to `d`); with `shared_kv` the values are the
        first `d_v` columns of the key pool, as in MLA.
    kv_dtype, k_scale, v_scale
        How the pool stores: value / scale.
    """
    gen = torch.Generator().manual_seed(seed)
    d_v, kv_dtype = d if d_v is None else d_v, kv_dtype or dtype
    batch, tokens, total = len(prefix), sum(new), [p + n for p, n in zip(prefix, new, strict=True)]
    pages = [-(-t // page_size) for t in total]
    order = 1 + torch.randperm(sum(pages) + 3, generator=gen)  # three pages stay unused, and page 0
    slots = (len(order) + 1) * page_size
    k_pool, v_pool = (
        torch.full((slots, kv_heads, d), torch.nan),
        torch.full((slots, kv_heads, d_v), torch.nan),
    )
    q = torch.randn(tokens, q_heads, d, generator=gen)
    k, v = (
        torch.randn(tokens, kv_heads, d, generator=gen),
        torch.randn(tokens, kv_heads, d_v, generator=gen),
    )
    if shared_kv:
        v = k[..., :d_v]

    lists, first_page, first_row = [], 0, 0
    for r in range(batch):
        mine = order[first_page : first_page + pages[r]]
        first_page += pages[r]
        listed = (mine[:, None] * page_size + torch.arange(page_size)).flatten()[: total[r]]
        lists.append(listed)
        rows = slice(first_row, first_row + new[r])
        first_row += new[r]
        k_pool[listed] = (
            torch.cat((torch.randn(prefix[r], kv_heads, d, generator=gen), k[rows])) / k_scale
        )
        v_pool[listed] = (
            torch.cat((torch.randn(prefix[r], kv_heads, d_v, generator=gen), v[rows])) / v_scale
        )

    k_cache = k_pool.to(dtype).to(kv_dtype).to(device)
    v_cache = k_cache[..., :d_v] if shared_kv else v_pool.to(dtype).to(kv_dtype).to(device)
    ints = {"dtype": index_dtype, "device": device}

    def indptr(lengths: list[int]) -> Tensor:
        return torch.tensor(
            [0, *torch.tensor(lengths, dtype=torch.int64).cumsum(0).tolist()], **ints
        )

    none = [torch.empty(0, dtype=torch.int64)]
    moved = {
        name: value.to(device) if isinstance(value, Tensor) else value
        for name, value in options.items()
    }
    if (k_scale, v_scale) != (1.0, 1.0):
        moved |= {"k_scale": k_scale, "v_scale": v_scale}
    return Case(
        q.to(dtype).to(device),
        k.to(dtype).to(device),
        v.to(dtype).to(device),
        k_cache,
        v_cache,
        indptr(new),
        indptr(prefix),
        torch.cat([s[:p] for s, p in zip(lists, prefix, strict=True)] or none).to(**ints),
        indptr(total),
        torch.cat(lists or none).to(**ints),
        torch.tensor(prefix, **ints),
        {"page_size": page_size, **moved},
    )


def random_mask(
    prefix: list[int], new: list[int], seed: int = 0, keep: float = 0.6
) -> dict[str, Tensor]:
    """A custom mask for these lengths, some of whose rows may be empty."""
    sizes = [n * (p + n) for p, n in zip(prefix, new, strict=True)]
    gen = torch.Generator().manual_seed(seed)
    bounds = torch.tensor([0, *torch.tensor(sizes, dtype=torch.int64).cumsum(0).tolist()])
    return {"custom_mask": torch.rand(sum(sizes), generator=gen) < keep, "mask_indptr": bounds}


OPTION_SETS: dict[str, dict[str, Any]] = {
    "plain": {},
    "scale": {"sm_scale": 0.3},
    "scale0": {"sm_scale": 0.0},
    "not_causal": {"causal": False},
    "window": {"sliding_window": 3},
    "window0": {"sliding_window": 0},
    "window_not_causal": {"sliding_window": 2, "causal": False},
    "cap": {"logit_cap": 2.0},
    "log_temperature": {"xai_temperature_len": 4},
    "inverse_temperature": {"xai_temperature_len": 4, "xai_temperature_rule": "inverse"},
    "cap_and_temperature": {"logit_cap": 1.5, "xai_temperature_len": 3},
}
"""Option sets without tensors, each alone; for tests that walk through them."""
