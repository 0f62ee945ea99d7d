"""What attention calls accept: one dataclass of options, one table of tensors, and one check that
runs before anything else.

The check looks at shapes, dtypes and devices. It looks at values only where they lie on the CPU and
the call brings no plan: reading a device would wait for it, and a call with a plan may be recorded
once and run again with other values in the same buffers.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from minikv.errors import ArgumentError

# What queries, keys and values may be; a pool may also hold the narrower formats below.
FLOATS = (torch.float32, torch.float16, torch.bfloat16)

# q's dtype -> the dtypes that a pool may have; what is read from it is converted to q's dtype.
NARROWER = {
    torch.float32: (torch.float32, torch.float16, torch.bfloat16, torch.float8_e4m3fn),
    torch.float16: (torch.float16, torch.float8_e4m3fn),
    torch.bfloat16: (torch.bfloat16, torch.float8_e4m3fn),
}

# Every tensor of the three public functions: its shape, and its dtypes (or whose dtype it has). All
# lie on q's device; the last dimension of those with heads is dense.
TENSORS = {
    "q": (("tokens", "q_heads", "d_qk"), "float"),
    "k_cache": (("slots", "kv_heads", "d_qk"), "pool"),
    "v_cache": (("slots", "kv_heads", "d_v"), "k_cache"),
    "kv_indptr": (("batch + 1",), "int"),
    "kv_indices": (("entries",), "int"),
    "qo_indptr": (("batch + 1",), "int"),
    "prefix_lens": (("batch",), "int"),
    "k": (("tokens", "kv_heads", "d_qk"), "q"),
    "v": (("tokens", "kv_heads", "d_v"), "q"),
    "out": (("tokens", "q_heads", "d_v"), "q"),
    "window_start": (("batch",), "int"),
    "custom_mask": (("mask entries",), "bool"),
    "mask_indptr": (("batch + 1",), "int"),
    "sinks": (("q_heads",), "float"),
}
OPTIONAL = {"out", "window_start", "custom_mask", "mask_indptr", "sinks"}
REQUIRED = [name for name in TENSORS if name not in OPTIONAL]
KINDS = {"float": FLOATS, "int": (torch.int32, torch.int64), "bool": (torch.bool,)}

# Numbers of the three public functions: their least value, and what to pass instead.
FINITE = -math.inf, "must be a finite Python number"
NUMBERS = {
    "sm_scale": FINITE,
    "k_scale": FINITE,
    "v_scale": FINITE,
    "logit_cap": (0, "must be positive and finite, or 0 for no cap"),
    "sliding_window": (-1, "must be n - 1 for a window of n keys, or -1 for none"),
    "page_size": (1, "must be at least 1"),
    "max_extend_len": (0, "must be the longest new part, or None if it is not known"),
    "num_kv_splits": (1, "must be at least 1, or None to choose by length"),
}

UNCAPPED = 1e20  # a cap beyond all scores changes none of them


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

    @property
    def mask_bytes(self) -> Tensor | None:
        """The custom mask as kernels read it."""
        return None if self.custom_mask is None else self.custom_mask.view(torch.uint8)


# Arguments of the public functions that are no field of `Options`.
BESIDE = ("max_extend_len", "num_kv_splits", "plan", "early")
NOT_OPTIONS = {*REQUIRED, *BESIDE, "out", "return_lse", "backend"}


def check(arguments: dict[str, Any]) -> Options:
    """Check the arguments of one attention call and gather its options.

    Parameters
    ----------
    arguments
        Name -> value, as ``locals()`` gives them at the top of a public function. The names say
        which form is called: with ``qo_indptr`` several queries per request, without it one.

    Raises
    ------
    ArgumentError
        Naming the first argument that does not fit, and what would.
    TypeError
        For a name that no attention call has.
    """
    _check_tensors(arguments)
    opts = _check_numbers(arguments)
    if arguments["q"].device.type == "cpu" and arguments.get("plan") is None:
        _check_values(arguments, opts)
    return opts


def _check_tensors(arguments: dict[str, Any]) -> None:
    """Walk the table: each tensor has its shape, dtype, device and a dense last dimension."""
    sizes: dict[str, int] = {}
    for name, (shape, kind) in TENSORS.items():
        tensor = arguments.get(name)
        if tensor is None and (name in OPTIONAL or name not in arguments):
            continue
        misfit = _misfit(tensor, shape, kind, sizes, arguments)
        if misfit is not None:
            raise ArgumentError(name, _shown(tensor), misfit)
        if name == "kv_indptr":
            sizes["batch"] = sizes["batch + 1"] - 1
    q = arguments["q"]
    out = arguments.get("out")
    batch = sizes["batch"]
    if sizes["kv_heads"] == 0 or sizes["q_heads"] % sizes["kv_heads"]:
        heads = f"{sizes['q_heads']} query heads cannot share {sizes['kv_heads']} KV heads evenly"
        raise ArgumentError("q", _shown(q), heads)
    if out is not None:
        for name in ("q", "k", "v", "k_cache", "v_cache"):
            if name in arguments and _overlap(out, arguments[name]):
                remedy = f"lies in the memory of {name}, which is read while out is written"
                raise ArgumentError("out", _shown(out), remedy)
    if batch < 0 or ("qo_indptr" not in arguments and batch != sizes["tokens"]):
        remedy = "must have one entry more than there are requests; in decode each has one row of q"
        raise ArgumentError("kv_indptr", _shown(arguments["kv_indptr"]), remedy)


def _misfit(
    tensor: Any,
    shape: tuple[str, ...],
    kind: str,
    sizes: dict[str, int],
    arguments: dict[str, Any],
) -> str | None:
    """What is wrong with one tensor, or None; sizes that were not known are noted in `sizes`."""
    fits = isinstance(tensor, Tensor) and tensor.dim() == len(shape)
    if not fits or any(
        sizes.setdefault(symbol, size) != size
        for symbol, size in zip(shape, tensor.shape, strict=True)
    ):
        words = [f"{symbol}={sizes[symbol]}" if symbol in sizes else symbol for symbol in shape]
        return f"must have shape [{', '.join(words)}]"
    if kind == "pool":
        dtypes = NARROWER[arguments["q"].dtype]
    else:
        dtypes = KINDS.get(kind) or (arguments[kind].dtype,)
    if tensor.dtype not in dtypes:
        return f"must be {' or '.join(str(dtype).removeprefix('torch.') for dtype in dtypes)}"
    if tensor.device != arguments["q"].device:
        return f"must live on {arguments['q'].device}, as q does"
    if len(shape) == 3 and tensor.stride(2) != 1:
        return "its last dimension must be dense; call .contiguous() first"
    return None


def _overlap(a: Tensor, b: Tensor) -> bool:
    """Whether two tensors share memory; of strided ones only the beginnings are compared."""
    start_a, start_b = a.data_ptr(), b.data_ptr()
    cross = start_a < start_b + b.nbytes and start_b < start_a + a.nbytes
    dense = a.is_contiguous() and b.is_contiguous()
    return (start_a == start_b or (cross and dense)) and a.numel() > 0 and b.numel() > 0


def _check_numbers(arguments: dict[str, Any]) -> Options:
    """Fill in defaults, and refuse options that are out of range or come alone."""
    chosen = {name: value for name, value in arguments.items() if name not in NOT_OPTIONS}
    if chosen.get("sm_scale") is None:
        chosen["sm_scale"] = arguments["q"].shape[2] ** -0.5
    for name, (least, remedy) in NUMBERS.items():
        number = arguments.get(name)
        if number is None:
            continue
        if isinstance(number, Tensor) or not math.isfinite(number) or number < least:
            raise ArgumentError(name, number, remedy)
    if chosen.get("logit_cap", 0.0) > UNCAPPED:
        chosen["logit_cap"] = 0.0
    opts = Options(**chosen)
    length, rule = opts.xai_temperature_len, opts.xai_temperature_rule
    if length < 2 and length != -1:
        raise ArgumentError("xai_temperature_len", length, "must be at least 2, or -1 for none")
    if rule not in ("log", "inverse"):
        raise ArgumentError("xai_temperature_rule", rule, "use 'log' or 'inverse'")
    if (opts.custom_mask is None) != (opts.mask_indptr is None):
        missing = "custom_mask" if opts.custom_mask is None else "mask_indptr"
        raise ArgumentError(missing, None, "custom_mask and mask_indptr come together")
    return opts


def _check_values(arguments: dict[str, Any], opts: Options) -> None:
    """Bounds, slots and masks stay inside their tensors: others would make kernels read and write
    foreign memory."""
    kv_indptr, kv_indices = arguments["kv_indptr"], arguments["kv_indices"]
    _check_bounds("kv_indptr", kv_indptr, kv_indices.shape[0], "entries of kv_indices")
    slots, listed = arguments["k_cache"].shape[0], kv_indices[: int(kv_indptr[-1])]
    if listed.shape[0]:
        least, most = (int(bound) for bound in torch.aminmax(listed))
        if least < 0 or most >= slots:
            wrong = least if least < 0 else most
            raise ArgumentError("kv_indices", wrong, f"must be slots of the pool, 0..{slots - 1}")
    if "qo_indptr" not in arguments:
        return
    _check_bounds("qo_indptr", arguments["qo_indptr"], arguments["q"].shape[0], "rows of q")
    new, keys = arguments["qo_indptr"].diff(), kv_indptr.diff()
    if "prefix_lens" in arguments:
        prefix = arguments["prefix_lens"]
        r = _first((new > 0) & ((prefix < 0) | (prefix + new != keys)))
        if r is not None:
            need = f"of request {r} must be {keys[r]} listed slots less {new[r]} new tokens"
            raise ArgumentError("prefix_lens", int(prefix[r]), need)
    else:
        keys = keys + new
    if opts.custom_mask is not None and opts.mask_indptr is not None:
        _check_mask(opts.custom_mask, opts.mask_indptr, new, keys)


def _check_bounds(name: str, indptr: Tensor, end: int, of_what: str) -> None:
    """Bounds begin at 0, never fall, and pass no `end`."""
    if int(indptr[0]) != 0 or bool((indptr.diff() < 0).any()):
        raise ArgumentError(name, indptr[:8].tolist(), "must begin with 0 and never fall")
    if int(indptr[-1]) > end:
        raise ArgumentError(name, int(indptr[-1]), f"ends past the {end} {of_what}")


def _check_mask(mask: Tensor, begins: Tensor, new: Tensor, keys: Tensor) -> None:
    """Every request's part of the mask has exactly ``new * keys`` entries."""
    r = _first((begins[:-1] < 0) | (begins.diff() != new * keys))
    if r is not None:
        need = f"of request {r} must be {new[r]} new tokens × {keys[r]} keys apart"
        raise ArgumentError("mask_indptr", begins[r : r + 2].tolist(), need)
    r = _first(begins[1:] > mask.shape[0])
    if r is not None:
        need = f"request {r} needs {new[r]} × {keys[r]} entries from {begins[r]} on"
        raise ArgumentError("custom_mask", tuple(mask.shape), f"is too short: {need}")


def _first(wrong: Tensor) -> int | None:
    """The first request of which this is true."""
    return int(wrong.int().argmax()) if bool(wrong.any()) else None


def _shown(tensor: Any) -> object:
    if not isinstance(tensor, Tensor):
        return tensor
    return f"{str(tensor.dtype).removeprefix('torch.')}{list(tensor.shape)} on {tensor.device}"


def on(value: Any, off: Any) -> Any:
    """An option as kernels take it: None when it is off."""
    return None if value == off else value
