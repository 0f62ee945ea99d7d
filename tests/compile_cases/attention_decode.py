"""Decode kernels: head shapes, each option alone and all together, on the chips that readers have."""

from __future__ import annotations

from typing import Any

from compile_check import Case

from minikv.attention.tiles import decode_tiles, head_blocks, power_of_two

KERNEL = "minikv.attention.decode:decode_kernel"
MERGE = "minikv.attention.merge_kernel:merge_kernel"
BYTES = {"fp32": 4, "fp16": 2, "bf16": 2, "fp8e4nv": 1}
OPTIONAL = {"lse": "*fp32", "window_start": "*i64", "sinks": "*fp32", "items": "*i32"}
ALIGNED = ("q", "k_cache", "v_cache", "out", "partial", "partial_lse", "kv_indptr", "kv_indices")
STRIDES = ("qb", "qh", "kch", "vch", "ob", "oh")


def decode_case(
    name: str,
    d: int = 128,
    d_v: int | None = None,
    group: int = 4,
    dtype: str = "bf16",
    pool: str | None = None,
    shared: bool = False,
    arch: int = 90,
    tensors: tuple[str, ...] = ("items",),
    max_spill_bytes: int = 0,
    tiles: Any = None,
    **options: Any,
) -> Case:
    """The decode kernel as the launcher would call it on a chip of this `arch`."""
    d_v, pool = d_v or d, pool or dtype
    tiles = tiles or decode_tiles(divmod(arch, 10), d, d_v, group, BYTES[pool], shared)
    block_d, block_tail = head_blocks(d)
    constexprs: dict[str, Any] = {
        "D": d,
        "DV": d_v,
        "BLOCK_H": tiles.block_h,
        "BLOCK_N": tiles.block_n,
    }
    constexprs |= {
        "BLOCK_D": block_d,
        "BLOCK_TAIL": block_tail,
        "BLOCK_DV": max(16, power_of_two(d_v)),
    }
    constexprs |= {"STRIDE_K": 8 * d, "STRIDE_V": 8 * d_v}
    constexprs |= {
        "V_IN_K": shared,
        "WINDOW": False,
        "CAP": False,
        "RULE": 0,
        "DEPENDENT": arch >= 90,
        "EARLY": False,
        **options,
    }
    constexprs |= {tensor: None for tensor in OPTIONAL if tensor not in tensors}
    signature = {"q": f"*{dtype}", "k_cache": f"*{pool}", "v_cache": f"*{pool}", "out": f"*{dtype}"}
    signature |= {
        "partial": "*fp32",
        "partial_lse": "*fp32",
        "kv_indptr": "*i32",
        "kv_indices": "*i32",
    }
    signature |= {tensor: OPTIONAL[tensor] for tensor in tensors}
    signature |= dict.fromkeys(
        ("num_splits", "q_heads", "group", "window", "temperature_len"), "i32"
    )
    signature |= dict.fromkeys(("scale", "v_scale", "cap"), "fp32")
    signature |= {f"stride_{s}": "i32" for s in STRIDES}
    return Case(
        name,
        KERNEL,
        signature,
        constexprs,
        ALIGNED + tuple(f"stride_{s}" for s in STRIDES),
        (arch,),
        tiles.num_warps,
        tiles.num_stages,
        max_spill_bytes,
    )


def merge_case(
    name: str,
    d_v: int,
    arch: int,
    dtype: str = "bf16",
    planned: bool = True,
    sinks: bool = False,
    early: bool = False,
) -> Case:
    signature = {
        "partial": "*fp32",
        "partial_lse": "*fp32",
        "out": f"*{dtype}",
        "lse": "*fp32",
        "kv_indptr": "*i32",
    }
    signature |= {"num_splits": "i32", "stride_ob": "i32", "stride_oh": "i32"}
    constexprs = {
        "DV": d_v,
        "BLOCK_N": 64,
        "BLOCK_S": 16,
        "BLOCK_DV": power_of_two(d_v),
        "DEPENDENT": arch >= 90,
        "EARLY": early,
    }
    for tensor, used, kind in (("merges", planned, "*i32"), ("sinks", sinks, "*fp32")):
        signature |= {tensor: kind} if used else {}
        constexprs |= {} if used else {tensor: None}
    return Case(
        name, MERGE, signature, constexprs, ("partial", "partial_lse", "out"), (arch,), 4, 3
    )


ALL: dict[str, Any] = {"WINDOW": True, "CAP": True, "RULE": 1, "tensors": tuple(OPTIONAL)}


def cases() -> list[Case]:
    mla: dict[str, Any] = {
        "d": 576,
        "d_v": 512,
        "group": 128,
        "shared": True,
        "max_spill_bytes": 400,
    }
    crowded = decode_tiles((9, 0), 128, 128, 4, 2, False).crowded
    return [
        decode_case("plain 128"),
        decode_case("crowded chip 128", tiles=crowded),
        decode_case("early 128", EARLY=True),
        decode_case("window 128", WINDOW=True),
        decode_case("cap 128", CAP=True),
        decode_case("sinks and lse 128", tensors=("items", "sinks", "lse")),
        decode_case("temperature 128", RULE=2, tensors=("items", "window_start")),
        decode_case("all options 128", **ALL),
        decode_case("fixed splits 128", tensors=()),
        decode_case("group of 24", group=24),
        decode_case("d 64", d=64, group=3),
        decode_case("d 80", d=80),
        decode_case("d 192/128", d=192, d_v=128, group=16),
        decode_case("MLA 576/512", **mla),
        decode_case("MLA all options", **mla, **ALL),
        decode_case("fp32 128", dtype="fp32"),
        decode_case("fp8 pool 128", pool="fp8e4nv"),
        decode_case("early fp8 pool, window", pool="fp8e4nv", EARLY=True, WINDOW=True),
        merge_case("merge 128", 128, 90),
        merge_case("early merge", 128, 90, early=True),
        merge_case("merge 512", 512, 90, sinks=True, planned=False),
        decode_case("all options 128 sm80", arch=80, **ALL),
        decode_case("d 64 sm80", d=64, arch=80),
        decode_case("MLA sm80", arch=80, **mla),
        decode_case("plain 128 sm86", arch=86),
        decode_case("MLA sm86", arch=86, **mla),
        decode_case("fp8 pool 128 sm89", arch=89, pool="fp8e4nv"),
        decode_case("plain 64 sm75", d=64, arch=75, dtype="fp16"),
        decode_case("all options 128 sm75", arch=75, dtype="fp16", **ALL),
        merge_case("merge 128 sm75", 128, 75, "fp16"),
    ]
