"""What all attention implementations accept: one dataclass of options, and one set of checks before
anything runs.

The checks look at shapes, dtypes and devices only. They never read a value from the device, so they
cost no wait.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from minikv.errors import ArgumentError

FLOATS = (torch.float32, torch.float16, torch.bfloat16)
"""What queries, keys and values may be; a pool may also hold the narrower formats below."""

NARROWER = {
    torch.float32: (torch.float32, torch.float16, torch.bfloat16, torch.float8_e4m3fn),
    torch.float16: (torch.float16, torch.float8_e4m3fn),
    torch.bfloat16: (torch.bfloat16, torch.float8_e4m3fn),
}
"""q's dtype -> the dtypes that a pool may have; what is read from it is converted to q's dtype."""


@dataclass(frozen=True, eq=False)
class Options:
    """Every option of one attention call, checked and with defaults filled in.

    Attributes
    ----------
    sm_scale
        What multiplies ``q . k``.
    causal
        A query sees no key after itself (ignored where a custom mask is given).
    logit_cap
        ``c`` in ``c * tanh(score / c)``; 0 is off.
    sliding_window
        A key is seen when ``q_pos - k_pos <= sliding_window``; -1 is off.
    window_start
        int [batch]: the position of the first listed key of each request; None means 0.
    custom_mask, mask_indptr
        bool [sum of new * (listed prefix + new)] and int [batch + 1]; replaces causality.
    skip_prefix_mask
        The prefix is wholly visible and its columns of the mask are not read.
    sinks
        float [q_heads]: a logit per head that joins the denominator once and has no value.
    xai_temperature_len, xai_temperature_rule
        Scores of far queries are multiplied: "log" by ``log2(pos) / log2(len)`` for ``pos > len``,
        "inverse" by ``len / (pos + 1)`` for ``pos >= len``; -1 is off.
    k_scale, v_scale
        What multiplies keys and values read from the pool.
    page_size
        Promise that entries ``j * page_size ..`` of each request's list lie in one page, in order.
    """

    sm_scale: float
    causal: bool = True
    logit_cap: float = 0.0
    sliding_window: int = -1
    window_start: Tensor | None = None
    custom_mask: Tensor | None = None
    mask_indptr: Tensor | None = None
    skip_prefix_mask: bool = False
    sinks: Tensor | None = None
    xai_temperature_len: int = -1
    xai_temperature_rule: str = "log"
    k_scale: float = 1.0
    v_scale: float = 1.0
    page_size: int = 1


def given(arguments: dict[str, Any]) -> dict[str, Any]:
    """The options among the arguments of a function, ``given(locals())``, as :func:`check_extend`
    and others take."""
    return {name: arguments[name] for name in Options.__dataclass_fields__ if name in arguments}


def check_extend(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    qo_indptr: Tensor,
    kv_indptr: Tensor,
    kv_indices: Tensor,
    *,
    max_extend_len: int | None = None,
    out: Tensor | None = None,
    **options: Any,
) -> Options:
    """Check the arguments of ``extend_attention`` and gather its options.

    Raises
    ------
    ArgumentError
        Naming the first argument that does not fit, and what would.
    """
    _check_tensors(q, k_cache, v_cache, kv_indptr, kv_indices, qo_indptr, max_extend_len, out)
    for name, new, cache in (("k", k, k_cache), ("v", v, v_cache)):
        _expect(name, new, (q.shape[0], cache.shape[1], cache.shape[2]), (q.dtype,), q.device)
        _last_dim_dense(name, new)
        if out is not None:
            _expect_apart(out, name, new)
    new_tokens = qo_indptr.diff()
    return _check_mask(_options(q, kv_indptr, **options), new_tokens, kv_indptr.diff() + new_tokens)


def check_unified(
    q: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    qo_indptr: Tensor,
    kv_indptr: Tensor,
    kv_indices: Tensor,
    prefix_lens: Tensor,
    *,
    max_extend_len: int | None = None,
    out: Tensor | None = None,
    **options: Any,
) -> Options:
    """Check the arguments of ``extend_attention_unified`` and gather its options; raises as
    :func:`check_extend`."""
    _check_tensors(q, k_cache, v_cache, kv_indptr, kv_indices, qo_indptr, max_extend_len, out)
    _expect_ints("prefix_lens", prefix_lens, kv_indptr.shape[0] - 1, q.device)
    if q.device.type == "cpu":
        new, listed = qo_indptr.diff(), kv_indptr.diff()
        wrong = (new > 0) & ((prefix_lens < 0) | (prefix_lens + new != listed))
        if wrong.any():
            r = int(wrong.int().argmax())
            need = f"{int(listed[r])} listed slots less {int(new[r])} new tokens"
            raise ArgumentError(
                "prefix_lens", int(prefix_lens[r]), f"of request {r} must be {need}"
            )
    return _check_mask(_options(q, kv_indptr, **options), qo_indptr.diff(), kv_indptr.diff())


def check_layer(
    q: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    kv_indptr: Tensor,
    kv_indices: Tensor,
    **options: Any,
) -> Options:
    """Check what all forms have in common and gather the options; raises as :func:`check_extend`."""
    _check_tensors(q, k_cache, v_cache, kv_indptr, kv_indices, None, None, None)
    return _options(q, kv_indptr, **options)


def check_decode(
    q: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    kv_indptr: Tensor,
    kv_indices: Tensor,
    *,
    num_kv_splits: int | None = None,
    out: Tensor | None = None,
    **options: Any,
) -> Options:
    """Check the arguments of ``decode_attention`` and gather its options; raises as
    :func:`check_extend`."""
    _check_tensors(q, k_cache, v_cache, kv_indptr, kv_indices, None, None, out)
    if kv_indptr.shape[0] != q.shape[0] + 1:
        need = f"decode has one query per request: [{q.shape[0] + 1}]"
        raise ArgumentError("kv_indptr", tuple(kv_indptr.shape), need)
    if num_kv_splits is not None and num_kv_splits < 1:
        raise ArgumentError(
            "num_kv_splits", num_kv_splits, "must be at least 1, or None to choose by length"
        )
    return _options(q, kv_indptr, **options)


def _check_tensors(
    q: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    kv_indptr: Tensor,
    kv_indices: Tensor,
    qo_indptr: Tensor | None,
    max_extend_len: int | None,
    out: Tensor | None,
) -> None:
    if q.dim() != 3 or q.dtype not in FLOATS:
        raise ArgumentError(
            "q", _shown(q), "must be [tokens, q_heads, d] in float32, float16 or bfloat16"
        )
    tokens, q_heads, d_qk = q.shape
    _last_dim_dense("q", q)
    _expect("k_cache", k_cache, (None, None, d_qk), NARROWER[q.dtype], q.device)
    slots, kv_heads, _ = k_cache.shape
    if kv_heads == 0 or q_heads % kv_heads:
        raise ArgumentError(
            "q", _shown(q), f"{q_heads} query heads cannot share {kv_heads} KV heads evenly"
        )
    _expect("v_cache", v_cache, (slots, kv_heads, None), (k_cache.dtype,), q.device)
    _last_dim_dense("k_cache", k_cache)
    _last_dim_dense("v_cache", v_cache)
    _expect_ints("kv_indptr", kv_indptr, None, q.device)
    _expect_ints("kv_indices", kv_indices, None, q.device)
    if kv_indptr.shape[0] < 1:
        raise ArgumentError(
            "kv_indptr", tuple(kv_indptr.shape), "must have batch + 1 entries, the first of them 0"
        )
    if qo_indptr is not None:
        _expect_ints("qo_indptr", qo_indptr, kv_indptr.shape[0], q.device)
    if q.device.type == "cpu":  # looking at values on a device would wait for it
        _check_bounds("kv_indptr", kv_indptr)
        _check_list(kv_indptr, kv_indices, slots)
        if qo_indptr is not None:
            _check_bounds("qo_indptr", qo_indptr, tokens)
    if max_extend_len is not None and max_extend_len < 0:
        raise ArgumentError(
            "max_extend_len",
            max_extend_len,
            "must be the longest new part, or None to read it back",
        )
    if out is not None:
        _expect("out", out, (tokens, q_heads, v_cache.shape[2]), (q.dtype,), q.device)
        _last_dim_dense("out", out)
        for name, read in (("q", q), ("k_cache", k_cache), ("v_cache", v_cache)):
            _expect_apart(out, name, read)


def _check_bounds(name: str, indptr: Tensor, end: int | None = None) -> None:
    """Bounds begin at 0, never fall, and pass no `end`: others would make kernels read and write
    foreign memory."""
    if int(indptr[0]) != 0 or bool((indptr.diff() < 0).any()):
        raise ArgumentError(name, indptr[:8].tolist(), "must begin with 0 and never fall")
    if end is not None and int(indptr[-1]) > end:
        raise ArgumentError(name, int(indptr[-1]), f"ends past the {end} rows of q")


def _check_mask(opts: Options, new: Tensor, keys: Tensor) -> Options:
    """The mask holds every request's ``[new, keys]`` part; like the lists, it is looked at on the
    CPU only."""
    mask, begins = opts.custom_mask, opts.mask_indptr
    if mask is not None and begins is not None and mask.device.type == "cpu":
        ends = begins[:-1] + new * keys
        wrong = (new > 0) & ((begins[:-1] < 0) | (ends > mask.shape[0]))
        if wrong.any():
            r = int(wrong.int().argmax())
            need = f"{int(new[r])} × {int(keys[r])} entries from {int(begins[r])} on"
            raise ArgumentError(
                "custom_mask", tuple(mask.shape), f"is too short: request {r} needs {need}"
            )
    return opts


def _check_list(kv_indptr: Tensor, kv_indices: Tensor, slots: int) -> None:
    """The listed slots exist: a list that overruns would otherwise read other requests' keys
    without a word."""
    listed = int(kv_indptr[-1])
    if listed > kv_indices.shape[0]:
        raise ArgumentError(
            "kv_indptr", listed, f"ends past the {kv_indices.shape[0]} entries of kv_indices"
        )
    if listed:
        least, most = (int(bound) for bound in torch.aminmax(kv_indices[:listed]))
        if least < 0 or most >= slots:
            wrong = least if least < 0 else most
            raise ArgumentError("kv_indices", wrong, f"must be slots of the pool, 0..{slots - 1}")


def _options(q: Tensor, kv_indptr: Tensor, **options: Any) -> Options:
    batch = kv_indptr.shape[0] - 1
    if options.get("sm_scale") is None:
        options["sm_scale"] = q.shape[2] ** -0.5
    cap = options.get("logit_cap", 0.0)
    for name in ("sm_scale", "logit_cap", "k_scale", "v_scale"):
        number = options.get(name, 1.0)
        if isinstance(number, Tensor) or not math.isfinite(number):
            raise ArgumentError(name, number, "must be a finite Python number")
        if name in options:
            options[name] = float(number)
    if cap < 0:
        raise ArgumentError("logit_cap", cap, "must be positive, or 0 for no cap")
    opts = Options(**options)
    window, length = opts.sliding_window, opts.xai_temperature_len
    if window < -1:
        raise ArgumentError(
            "sliding_window", window, "must be n - 1 for a window of n keys, or -1 for none"
        )
    if length < 2 and length != -1:
        raise ArgumentError("xai_temperature_len", length, "must be at least 2, or -1 for none")
    if opts.xai_temperature_rule not in ("log", "inverse"):
        raise ArgumentError(
            "xai_temperature_rule", opts.xai_temperature_rule, "use 'log' or 'inverse'"
        )
    if opts.page_size < 1:
        raise ArgumentError("page_size", opts.page_size, "must be at least 1")
    if opts.window_start is not None:
        _expect_ints("window_start", opts.window_start, batch, q.device)
    if opts.sinks is not None:
        _expect("sinks", opts.sinks, (q.shape[1],), FLOATS, q.device)
    if (opts.custom_mask is None) != (opts.mask_indptr is None):
        missing = "custom_mask" if opts.custom_mask is None else "mask_indptr"
        raise ArgumentError(missing, None, "custom_mask and mask_indptr come together")
    if opts.custom_mask is not None and opts.mask_indptr is not None:
        _expect("custom_mask", opts.custom_mask, (None,), (torch.bool,), q.device)
        _expect_ints("mask_indptr", opts.mask_indptr, batch + 1, q.device)
    return opts


def _expect(
    name: str,
    tensor: Tensor,
    shape: tuple[int | None, ...],
    dtypes: Sequence[torch.dtype],
    device: torch.device,
) -> None:
    """Raise unless `tensor` has this shape (None: any size), one of these dtypes, and lives on
    `device`."""
    fits = tensor.dim() == len(shape)
    if not fits or any(
        want not in (None, got) for want, got in zip(shape, tensor.shape, strict=True)
    ):
        wanted = ", ".join("*" if size is None else str(size) for size in shape)
        raise ArgumentError(name, _shown(tensor), f"must have shape [{wanted}]")
    if tensor.dtype not in dtypes:
        wanted = " or ".join(str(d).removeprefix("torch.") for d in dtypes)
        raise ArgumentError(name, _shown(tensor), f"must be {wanted}")
    if tensor.device != device:
        raise ArgumentError(name, _shown(tensor), f"must live on {device}, as q does")


def _expect_ints(name: str, tensor: Tensor, length: int | None, device: torch.device) -> None:
    _expect(name, tensor, (length,), (torch.int32, torch.int64), device)


def _last_dim_dense(name: str, tensor: Tensor) -> None:
    if tensor.stride(-1) != 1:
        raise ArgumentError(
            name, _shown(tensor), "its last dimension must be dense; call .contiguous() first"
        )


def _expect_apart(out: Tensor, name: str, read: Tensor) -> None:
    """Refuse an `out` in the memory of an input; of two strided tensors only the beginnings are
    compared."""
    a, b = out.data_ptr(), read.data_ptr()
    cross = (
        out.is_contiguous() and read.is_contiguous() and a < b + read.nbytes and b < a + out.nbytes
    )
    if (a == b or cross) and out.numel() and read.numel():
        raise ArgumentError(
            "out", _shown(out), f"lies in the memory of {name}, which is read while out is written"
        )


def _shown(tensor: Tensor) -> str:
    return f"{str(tensor.dtype).removeprefix('torch.')}{list(tensor.shape)} on {tensor.device}"
