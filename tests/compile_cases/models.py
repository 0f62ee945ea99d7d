"""The kernels of a fused decode step: one row and few, every part alone and all together."""

from __future__ import annotations

from typing import Any

from compile_check import Case

from minikv.models.fused import few_rows, one_row

POINTERS = ("bias", "norm", "residual")


def linear(
    name: str,
    n: int,
    k: int,
    *parts: str,
    gated: bool = False,
    arch: int = 90,
    dtype: str = "bf16",
    tiles: Any = None,
) -> Case:
    """One row; `tiles` for trials."""
    tiles = tiles or one_row.tiles_of(n, k, gated)
    signature = dict.fromkeys(("x", "weight", "out", *parts), f"*{dtype}") | {
        "n": "i32",
        "eps": "fp32",
    }
    constexprs = {p: None for p in POINTERS if p not in parts}
    constexprs |= {"K": k, "BLOCK_N": tiles.block_n, "BLOCK_K": tiles.block_k}
    constexprs |= {"GATED": gated, "WARPS": tiles.num_warps, "DEPENDENT": arch >= 90}
    constexprs["AHEAD"] = k > tiles.block_k and n * k < 1 << 23
    kernel = "minikv.models.fused.one_row:one_row_kernel"
    return Case(
        name,
        kernel,
        signature,
        constexprs,
        ("x", "weight", "out", *parts),
        (arch,),
        tiles.num_warps,
    )


def product(
    name: str,
    rows: int,
    n: int,
    k: int,
    *parts: str,
    gated: bool = False,
    arch: int = 90,
    dtype: str = "bf16",
) -> Case:
    tiles = few_rows.tiles_of(rows, n, gated, 4 if dtype == "fp32" else 2, divmod(arch, 10))
    signature = dict.fromkeys(("x", "weight", *parts), f"*{dtype}") | {"rows": "i32", "n": "i32"}
    signature["out"] = f"*{dtype}" if tiles.parts == 1 else "*fp32"
    span = -(-k // tiles.parts // tiles.block_k) * tiles.block_k
    constexprs = {p: None for p in ("bias",) if p not in parts}
    constexprs |= {"K": k, "SPAN": span, "BLOCK_M": max(16, 1 << (rows - 1).bit_length())}
    constexprs |= {
        "BLOCK_N": tiles.block_n,
        "BLOCK_K": tiles.block_k,
        "GATED": gated,
        "DEPENDENT": arch >= 90,
    }
    return Case(
        name,
        "minikv.models.fused.few_rows:few_rows_kernel",
        signature,
        constexprs,
        ("x", "weight", "out", *parts),
        (arch,),
        tiles.num_warps,
        tiles.num_stages,
    )


def rotate(
    name: str,
    q_heads: int,
    kv_heads: int,
    d: int,
    norm: bool,
    arch: int = 90,
    pool: str = "bf16",
    parts: int = 1,
) -> Case:
    tensors = ("qkv", "q", "cos", "sin", *(("q_norm", "k_norm") if norm else ()))
    signature = dict.fromkeys(tensors, "*bf16") | dict.fromkeys(("k_cache", "v_cache"), f"*{pool}")
    signature["qkv"] = "*bf16" if parts == 1 else "*fp32"
    signature |= {"positions": "*i64", "slots": "*i64", "num_slots": "i32", "eps": "fp32"}
    constexprs = {p: None for p in ("q_norm", "k_norm") if not norm}
    constexprs |= {
        "Q_HEADS": q_heads,
        "KV_HEADS": kv_heads,
        "D": d,
        "HEADS": 4,
        "BLOCK": 1 << (d // 2 - 1).bit_length(),
    }
    constexprs |= {"PARTS": parts, "SATURATE": pool == "fp8e4nv", "DEPENDENT": arch >= 90}
    aligned = (*tensors, "k_cache", "v_cache")
    return Case(
        name, "minikv.models.fused.qkv:rotate_kernel", signature, constexprs, aligned, (arch,), 1
    )


def rows(name: str, kernel: str, k: int, *tensors: str, dtype: str = "bf16") -> Case:
    block, sum_up = 1 << (k - 1).bit_length(), kernel == "add_norm_kernel"
    signature = dict.fromkeys(tensors, f"*{dtype}") | ({"eps": "fp32"} if sum_up else {})
    constexprs = {"K": k, "BLOCK": block if sum_up else min(1024, block)}
    constexprs |= {"PARTS": 4} if sum_up else {}
    constexprs |= {"DEPENDENT": True} | (
        {} if "delta" in tensors or not sum_up else {"delta": None}
    )
    module = f"minikv.models.fused.between:{kernel}"
    return Case(
        name,
        module,
        signature,
        constexprs,
        tensors,
        (90,),
        min(8, max(1, block // 512)) if sum_up else 4,
    )


def cases() -> list[Case]:
    one = [
        linear("qkv", 4096, 1024, "norm"),
        linear("o", 1024, 2048, "residual"),
        linear("gate and up", 3072, 1024, "norm", gated=True),
        linear("down", 1024, 3072, "residual"),
        linear("logits", 151936, 1024, "norm"),
        linear("all parts, odd sizes", 600, 80, *POINTERS, gated=True),
        linear("large", 4096, 14336, "residual"),
        linear("fp32", 600, 576, *POINTERS, gated=True, dtype="fp32"),
        linear("fp32 logits", 49152, 576, "norm", dtype="fp32"),
        linear("sm80", 3072, 1024, *POINTERS, gated=True, arch=80),
    ]
    few = [
        case
        for rows in (8, 32)
        for case in (
            product(f"qkv, {rows}", rows, 4096, 1024, "bias"),
            product(f"o, {rows}", rows, 1024, 2048),
            product(f"gate and up, {rows}", rows, 3072, 1024, gated=True),
            product(f"down, {rows}", rows, 1024, 3072),
            product(f"logits, {rows}", rows, 151936, 1024),
            product(f"all parts, odd sizes, {rows}", rows, 600, 80, "bias", gated=True),
            product(f"large, {rows}", rows, 4096, 14336),
            product(f"fp32, {rows}", rows, 600, 576, "bias", gated=True, dtype="fp32"),
            product(f"sm80, {rows}", rows, 3072, 1024, gated=True, arch=80),
            product(f"sm86, {rows}", rows, 3072, 1024, gated=True, arch=86),
        )
    ]
    others = [
        rotate("heads of Qwen3", 16, 8, 128, True),
        rotate("heads of 80 without norm", 9, 3, 80, False),
        rotate("heads to fp8", 32, 8, 128, True, pool="fp8e4nv"),
        rotate("heads in parts", 16, 8, 128, True, parts=4),
        rotate("heads on sm80", 32, 8, 128, True, arch=80),
        rows("sum and norm", "add_norm_kernel", 4096, "x", "delta", "norm", "normed", "total"),
        rows("norm alone", "add_norm_kernel", 1000, "x", "norm", "normed", "total"),
        rows("silu and gate", "silu_mul_kernel", 3072, "gate_up", "out"),
    ]
    return one + few + others
