"""The kernels of a fused decode step: one row and few, every part alone and all together."""

from __future__ import annotations

from typing import Any

from compile_check import Case

from minikv.models.fused_linear import tiles_of

POINTERS = ("bias", "norm", "residual")
BYTES = {"fp32": 4, "fp16": 2, "bf16": 2}


def linear(
    name: str,
    rows: int,
    n: int,
    k: int,
    *parts: str,
    gated: bool = False,
    arch: int = 90,
    dtype: str = "bf16",
    tiles: Any = None,
) -> Case:
    tiles = tiles or tiles_of(rows, n, k, gated, BYTES[dtype])
    kernel = "one_row_kernel" if rows == 1 else "few_rows_kernel"
    signature = dict.fromkeys(("x", "weight", "out", *parts), f"*{dtype}") | {"eps": "fp32"}
    signature |= dict.fromkeys(("rows", "n", "stride_x"), "i32")
    constexprs = {p: None for p in POINTERS if p not in parts}
    constexprs |= {"K": k, "BLOCK_N": tiles.block_n, "BLOCK_K": tiles.block_k, "ROW": 1 << (k - 1).bit_length()}
    constexprs |= {"GATED": gated, "WARPS": tiles.num_warps, "DEPENDENT": arch >= 90}
    if rows > 1:
        constexprs["BLOCK_M"] = 16
    aligned = ("x", "weight", "out", "stride_x", *parts)
    return Case(
        name, f"minikv.models.fused_linear:{kernel}", signature, constexprs, aligned, (arch,), tiles.num_warps,
        tiles.num_stages,
    )  # fmt: skip


def cases() -> list[Case]:
    return [
        case
        for rows in (1, 8)
        for case in (
            linear(f"qkv, {rows}", rows, 4096, 1024, "norm"),
            linear(f"o, {rows}", rows, 1024, 2048, "residual"),
            linear(f"gate and up, {rows}", rows, 3072, 1024, "norm", gated=True),
            linear(f"down, {rows}", rows, 1024, 3072, "residual"),
            linear(f"logits, {rows}", rows, 151936, 1024, "norm"),
            linear(f"all parts, odd sizes, {rows}", rows, 600, 80, *POINTERS, gated=True),
            linear(f"large, {rows}", rows, 4096, 14336, "residual"),
            linear(f"fp32, {rows}", rows, 600, 576, *POINTERS, gated=True, dtype="fp32"),
            linear(f"sm80, {rows}", rows, 3072, 1024, *POINTERS, gated=True, arch=80),
        )
    ]
