"""The kernels around a decode graph's model: moving its inputs on, and the greedy choice."""

from __future__ import annotations

from compile_check import Case

from minikv.engine.advance import NAMES

FIRST_MAX = "minikv.engine.argmax"
ADVANCE = {
    **dict.fromkeys((*NAMES, "tokens", "new_slots"), "*i64"),
    "table": "*i32",
    **dict.fromkeys(("step", "n", "size", "stride_row"), "i32"),
}


def cases() -> list[Case]:
    part = {"logits": "*bf16", "best": "*fp32", "where": "*i32"}
    row = {"best": "*fp32", "where": "*i32", "out": "*i64"}
    sizes = {"VOCAB": 151936, "BLOCK": 8192, "DEPENDENT": True}
    parts = {"PARTS": 19, "BLOCK": 32, "DEPENDENT": True}
    return [
        Case(
            "advance",
            "minikv.engine.advance:advance_kernel",
            ADVANCE,
            {"BLOCK": 256},
            archs=(75, 90),
        ),
        Case("best of a part", f"{FIRST_MAX}:best_of_part_kernel", part, sizes, archs=(90,)),
        Case(
            "best of a row", f"{FIRST_MAX}:best_of_row_kernel", row, parts, archs=(90,), num_warps=1
        ),
    ]
