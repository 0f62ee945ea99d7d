"""The kernels around a decode graph's model: the newest tokens, and the greedy choice."""

from __future__ import annotations

from compile_check import Case

TOKENS = "minikv.engine.tokens"


def cases() -> list[Case]:
    part = {"logits": "*bf16", "best": "*fp32", "where": "*i32"}
    row = {"best": "*fp32", "where": "*i32", "out": "*i64", "rows": "*i64", "column": "*i64"}
    sizes = {"VOCAB": 151936, "BLOCK": 8192, "DEPENDENT": True}
    parts = {"PARTS": 19, "BLOCK": 32, "DEPENDENT": True}
    return [
        Case(
            "newest tokens",
            f"{TOKENS}:newest_kernel",
            {**dict.fromkeys(("token_ids", "rows", "column", "out"), "*i64"), "n": "i32"},
            {"BLOCK": 256},
            archs=(75, 90),
        ),
        Case(
            "move on",
            f"{TOKENS}:move_on_kernel",
            {
                **dict.fromkeys(
                    ("token_ids", "positions", "rows", "seq_lens", "kv_indptr", "out_slots"), "*i64"
                ),
                "table": "*i32",
                **dict.fromkeys(("n", "size", "stride_row"), "i32"),
            },
            {"BLOCK": 256},
            archs=(75, 90),
        ),
        Case("best of a part", f"{TOKENS}:best_of_part_kernel", part, sizes, archs=(90,)),
        Case("best of a row", f"{TOKENS}:best_of_row_kernel", row, parts, archs=(90,), num_warps=1),
        *(
            Case(
                f"keep likeliest by {what}",
                "minikv.engine.cuts:keep_likeliest_kernel",
                {"x": "*fp32", "limit": "*i64", **({"p": "*fp32"} if given else {})},
                {"VOCAB": 151936, "BLOCK": 4096, **({} if given else {"p": None})},
                archs=(80, 90),
                num_warps=16,
            )
            for what, given in (("number", False), ("mass", True))
        ),
    ]
