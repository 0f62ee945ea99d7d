"""Decode kernels: head shapes, each option alone and all together, on readers' chips."""

from __future__ import annotations

from typing import Any

from compile_check import Case

from minikv.attention.tiles import decode_tiles, head_sizes, power_of_two

KERNEL = "minikv.attention.decode:decode_kernel"
MERGE = "minikv.attention.merge:merge_kernel"
BYTES = {"fp32": 4, "fp16": 2, "bf16": 2, "fp8e4nv": 1}
OPTIONAL = {
    "lse": "*fp32",
    "window_start": "*i64",
    "sinks": "*fp32",
    "items": "*i32",
    "window": "i32",
    "cap": "fp32",
    "temperature_len": "i32",
}
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
    given: tuple[str, ...] = ("items",),
    max_spill_bytes: int = 0,
    tiles: Any = None,
    **options: Any,
) -> Case:
    """The decode kernel as the launcher would call it on a chip of this `arch`."""
    d_v, pool = d_v or d, pool or dtype
    tiles = tiles or decode_tiles(divmod(arch, 10), d, d_v, group, BYTES[pool], shared)
    constexprs: dict[str, Any] = {
        **head_sizes(d, d_v),
        "STRIDE_K": 8 * d,
        "STRIDE_V": 8 * d_v,
        "BLOCK_H": tiles.block_h,
        "BLOCK_N": tiles.block_n,
        "V_IN_K": shared,
        "RULE": "log",
        "DEPENDENT": arch >= 90,
        "EARLY": False,
        **options,
    }
    constexprs |= {name: None for name in OPTIONAL if name not in given}
    signature = {"q": f"*{dtype}", "k_cache": f"*{pool}", "v_cache": f"*{pool}", "out": f"*{dtype}"}
    signature |= dict.fromkeys(("partial", "partial_lse"), "*fp32")
    signature |= dict.fromkeys(("kv_indptr", "kv_indices"), "*i32")
    signature |= {name: OPTIONAL[name] for name in given}
    signature |= dict.fromkeys(("num_splits", "q_heads", "group"), "i32")
    signature |= dict.fromkeys(("scale", "v_scale"), "fp32")
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
    block_s: int = 16,
) -> Case:
    """The kernel that adds up parts: of split decode, or with `block_s` of split extend."""
    num_warps, of_decode = (4, True) if block_s == 16 else (1, False)
    signature = {
        "partial": "*fp32",
        "partial_lse": "*fp32",
        "out": f"*{dtype}",
        "lse": "*fp32",
    }
    signature |= {"num_splits": "i32", "stride_ot": "i32", "stride_oh": "i32"}
    constexprs = {
        "DV": d_v,
        "BLOCK_N": 64,
        "BLOCK_S": block_s,
        "BLOCK_DV": power_of_two(d_v),
        "DEPENDENT": arch >= 90,
        "EARLY": early,
    }
    used_tensors = (
        ("merges", planned, "*i32"),
        ("sinks", sinks, "*fp32"),
        ("kv_indptr", of_decode, "*i32"),
    )
    for tensor, used, kind in used_tensors:
        signature |= {tensor: kind} if used else {}
        constexprs |= {} if used else {tensor: None}
    return Case(
        name, MERGE, signature, constexprs, ("partial", "partial_lse", "out"), (arch,), num_warps, 3
    )


ALL: dict[str, Any] = {"given": tuple(OPTIONAL)}


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
        decode_case("window 128", given=("items", "window")),
        decode_case("cap 128", given=("items", "cap")),
        decode_case("sinks and lse 128", given=("items", "sinks", "lse")),
        decode_case(
            "temperature 128", RULE="inverse", given=("items", "window_start", "temperature_len")
        ),
        decode_case("all options 128", **ALL),
        decode_case("fixed splits 128", given=()),
        decode_case("group of 24", group=24),
        decode_case("d 64", d=64, group=3),
        decode_case("d 80", d=80),
        decode_case("d 192/128", d=192, d_v=128, group=16),
        decode_case("MLA 576/512", **mla),
        decode_case("MLA all options", **mla, **ALL),
        decode_case("fp32 128", dtype="fp32"),
        decode_case("fp8 pool 128", pool="fp8e4nv"),
        decode_case(
            "early fp8 pool, window", pool="fp8e4nv", EARLY=True, given=("items", "window")
        ),
        merge_case("merge 128", 128, 90),
        merge_case("early merge", 128, 90, early=True),
        merge_case("merge 512", 512, 90, sinks=True, planned=False),
        merge_case("merge of split extend 128", 128, 90, sinks=True, planned=False, block_s=4),
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
