"""The allocator's and the pools' kernels."""

from __future__ import annotations

from compile_check import Case

EXTEND = {
    "out_ptr": "*i64",
    "free_ptr": "*i64",
    "state_ptr": "*u8",
    "lost_ptr": "*i64",
    "before_ptr": "*i64",
    "last_loc_ptr": "*i32",
    **dict.fromkeys(("first", "seen", "num_pages", "n", "total", "last_loc_stride"), "i32"),
}
DECODE = {
    **{k: t for k, t in EXTEND.items() if k not in ("before_ptr", "total")},
    "new_pages": "i32",
}
STORE = {
    "slots_ptr": "*i64",
    **dict.fromkeys(("n", "num_slots"), "i32"),
    **dict.fromkeys(("k_scale", "v_scale"), "fp32"),
    **dict.fromkeys(
        ("k_token_stride", "k_head_stride", "v_token_stride", "v_head_stride", "width"), "i32"
    ),
}
POINTERS = ("k_ptr", "v_ptr", "k_cache_ptr", "v_cache_ptr")


def cases() -> list[Case]:
    kernels = "minikv.memory.slots:"
    found = []
    for page in (1, 3, 16):
        found += [
            Case(
                f"alloc_extend page {page}",
                kernels + "extend_kernel",
                EXTEND,
                {"PAGE": page, "BLOCK": 512},
            ),
            Case(
                f"alloc_decode page {page}",
                kernels + "decode_kernel",
                DECODE,
                {"PAGE": page, "BLOCK": 256},
            ),
        ]
    for dtype, row in (("fp16", "fp16"), ("bf16", "bf16"), ("fp32", "bf16"), ("fp8e4nv", "bf16")):
        fp8 = dtype == "fp8e4nv"
        for heads, dim, columns in ((8, 128, 1024), (3, 64, 64)):
            options = {
                "HEAD_DIM": dim,
                "HAS_V": True,
                "SCALED": fp8,
                "SATURATE": fp8,
                "TOKENS": 2048 // columns,
            }
            found.append(
                Case(
                    f"set_kv {row} to {dtype}, {heads} heads of {dim}",
                    "minikv.memory.store:store_kernel",
                    {
                        **STORE,
                        "k_ptr": f"*{row}",
                        "v_ptr": f"*{row}",
                        "k_cache_ptr": f"*{dtype}",
                        "v_cache_ptr": f"*{dtype}",
                    },
                    {**options, "COLUMNS": columns},
                    aligned=tuple(n for n in STORE if n.endswith("stride") or n == "width")
                    + POINTERS,
                    archs=(89, 90) if fp8 else (75, 90) if dtype == "fp16" else (80, 90),
                )
            )
    return found
