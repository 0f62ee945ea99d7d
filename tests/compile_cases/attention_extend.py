"""Extend kernels, two-stage and unified: head shapes, each option alone and all together, on the
chips readers have."""

from __future__ import annotations

from typing import Any

import torch
from compile_check import Case

from minikv.attention.tiles import extend_tiles, head_sizes, power_of_two, unified_tiles

TWO_STAGE, UNIFIED = (
    "minikv.attention.extend:extend_kernel",
    "minikv.attention.unified:unified_kernel",
)
DTYPES = {"fp16": torch.float16, "bf16": torch.bfloat16, "fp32": torch.float32}
POINTERS = ("q", "k_cache", "v_cache", "out", "qo_indptr", "kv_indptr")
OPTIONAL = {
    "lse": "*fp32",
    "window_start": "*i64",
    "custom_mask": "*u8",
    "mask_indptr": "*i64",
    "sinks": "*fp32",
    "window": "i32",
    "cap": "fp32",
    "temperature_len": "i32",
}
SCALARS = ("batch", "steps", "places", "group")
STRIDES = ("qt", "qh", "ot", "oh")
SPILLS = 96  # bytes that a kernel may spill: both counts together, 12 words of stores and of loads


def extend_case(
    name: str,
    d: int = 128,
    d_v: int | None = None,
    dtype: str = "bf16",
    arch: int = 90,
    pool: str | None = None,
    unified: bool = False,
    paged: bool = False,
    given: tuple[str, ...] = (),
    prefix: bool = True,
    split: bool = False,
    max_spill_bytes: int = SPILLS,
    **options: Any,
) -> Case:
    """A kernel as its launcher would call it on a chip of this `arch`; `paged`: with pages that
    hold whole tiles."""
    d_v, pool = d_v or d, pool or dtype
    tiles = (unified_tiles if unified else extend_tiles)(divmod(arch, 10), d, d_v, DTYPES[dtype])
    sizes = head_sizes(d, d_v)
    constexprs: dict[str, Any] = {
        **sizes,
        "BLOCK_M": tiles.block_m,
        "BLOCK_N": tiles.block_n,
        "CAUSAL": True,
        "RULE": "log",
        "MASK_PREFIX": False,
        "COMPACT": False,
    }
    constexprs |= {name: None for name in OPTIONAL if name not in given}
    signature = {"q": f"*{dtype}", "k_cache": f"*{pool}", "v_cache": f"*{pool}", "out": f"*{dtype}"}
    signature |= dict.fromkeys(("qo_indptr", "kv_indptr", "kv_indices"), "*i32")
    signature |= {name: OPTIONAL[name] for name in given}
    signature |= dict.fromkeys(SCALARS, "i32") | dict.fromkeys(("scale", "v_scale"), "fp32")
    strides, pointers = (*STRIDES, "kh", "vh"), (*POINTERS, *(("kv_indices",) if prefix else ()))
    whole = tiles.descriptors and d_v == power_of_two(d_v)
    described = {"k": sizes["BLOCK_D"], "v": d_v} if whole else {}
    pool_name = "" if unified else "c"
    descs = {f"{x}{pool_name}_desc": width for x, width in described.items()} if paged else {}
    constexprs |= {"k_desc": None, "v_desc": None}
    if unified:
        signature |= {"prefix_lens": "*i32"}
        constexprs |= {"STRIDE_K": 8 * d, "STRIDE_V": 8 * d_v}
    else:
        pointers, strides = (*pointers, "k", "v"), (*strides, "kch", "vch")
        signature |= {"k": f"*{dtype}", "v": f"*{dtype}", "num_splits": "i32", "k_scale": "fp32"}
        constexprs |= {"STRIDE_KT": 8 * d, "STRIDE_VT": 8 * d_v}
        constexprs |= {"STRIDE_KC": 8 * d, "STRIDE_VC": 8 * d_v}
        constexprs |= {"kc_desc": None, "vc_desc": None}
        descs |= {f"{x}_desc": width for x, width in described.items()}
        if split:
            signature["out"] = "*fp32"
        else:
            del signature["num_splits"]
            constexprs["num_splits"] = None
        if not prefix:
            del signature["kv_indices"]
            constexprs["kv_indices"] = None
    for desc, width in descs.items():
        signature[desc] = f"tensordesc<{dtype}[{tiles.block_n},{width}]>"
        del constexprs[desc]
    signature |= {f"stride_{s}": "i32" for s in strides}
    return Case(
        name,
        UNIFIED if unified else TWO_STAGE,
        signature,
        {**constexprs, **options},
        pointers + tuple(f"stride_{s}" for s in strides),
        (arch,),
        tiles.num_warps,
        tiles.num_stages,
        max_spill_bytes,
    )


MASKS: dict[str, Any] = {"CAUSAL": False, "given": ("custom_mask", "mask_indptr")}
ALL: dict[str, Any] = {"COMPACT": True}
ALL |= {"given": ("lse", "window_start", "sinks", "window", "cap", "temperature_len")}


def cases() -> list[Case]:
    listed = [
        extend_case("plain 128"),
        extend_case("no prefix 128", prefix=False),
        extend_case("all options 128", **ALL),
        extend_case("all options 128, split", **ALL, split=True),
        extend_case("not causal 128", CAUSAL=False),
        extend_case("window 128", given=("window",)),
        extend_case("cap 128", given=("cap",)),
        extend_case("temperature 128", RULE="inverse", given=("window_start", "temperature_len")),
        extend_case("sinks and lse 128", given=("sinks", "lse")),
        extend_case("custom mask 128", MASK_PREFIX=True, max_spill_bytes=2048, **MASKS),
        extend_case("custom mask 128, prefix not read", max_spill_bytes=2048, **MASKS),
        extend_case("fp8 pool 128", pool="fp8e4nv"),
        extend_case("large pages 128", paged=True),
        extend_case("large pages 192/128", d=192, d_v=128, paged=True),
        extend_case("unified, large pages 128", unified=True, paged=True),
        extend_case("unified, large pages 64", d=64, unified=True, paged=True),
        extend_case("plain 64", d=64),
        extend_case("plain 80", d=80),
        extend_case("plain 192/128", d=192, d_v=128),
        extend_case("plain 256", d=256),
        extend_case("plain 576/512", d=576, d_v=512),
        extend_case("fp32 64", d=64, dtype="fp32", prefix=False),
    ]
    for arch in (80, 90):
        listed += [
            extend_case(f"unified 128 sm{arch}", arch=arch, unified=True),
            extend_case(f"unified all options 128 sm{arch}", arch=arch, unified=True, **ALL),
            # 128 rows of 192 + 128 columns: 38 words too many for sm80's registers, 23 % faster on
            # Hopper
            extend_case(
                f"unified 192/128 sm{arch}",
                arch=arch,
                d=192,
                d_v=128,
                unified=True,
                max_spill_bytes=160,
            ),
        ]
    for d, d_v in ((64, 64), (80, 80), (128, 128), (192, 128), (576, 512)):
        listed.append(extend_case(f"plain {d}/{d_v} sm80", d=d, d_v=d_v, arch=80))
    for arch in (86, 89):
        listed.append(extend_case(f"plain 128 sm{arch}", arch=arch))
        listed.append(
            extend_case(f"unified 576/512 sm{arch}", arch=arch, d=576, d_v=512, unified=True)
        )
    listed += [
        extend_case("all options 128 sm80", arch=80, **ALL),
        extend_case("unified 256 sm86", arch=86, d=256, unified=True),
        extend_case("unified 64 sm75", arch=75, d=64, dtype="fp16", unified=True),
        extend_case("no prefix 128 sm75", arch=75, dtype="fp16", prefix=False),
    ]
    return listed
