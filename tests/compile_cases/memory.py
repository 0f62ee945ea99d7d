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
    **dict.fromkeys(("first", "seen", "num_pages", "n", "last_loc_stride"), "i32"),
}
DECODE = {**{k: t for k, t in EXTEND.items() if k != "before_ptr"}, "new_pages": "i32"}


def cases() -> list[Case]:
    kernels = "minikv.memory.allocator_kernels:"
    found = []
    for page in (1, 3, 16):
        found += [
            Case(f"alloc_extend page {page}", kernels + "extend_kernel", EXTEND, {"PAGE": page, "BLOCK": 512}),
            Case(f"alloc_decode page {page}", kernels + "decode_kernel", DECODE, {"PAGE": page, "BLOCK": 256}),
        ]
    return found
