"""Extend as a graph captures it: one launch that follows from shapes alone, replayed over buffers
that hold other batches by then."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from cases import Case, assert_close, make_case, random_mask
from torch import Tensor

from minikv.attention import AttentionPlan, extend_attention, extend_attention_unified
from minikv.errors import ArgumentError, StateError
from minikv.graphs.tape import Tape

ROWS, LONGEST = 3, 20
BATCHES = [([33, 5, 0], [20, 20, 20]), ([40, 0, 7], [3, 0, 20]), ([1, 2, 3], [0, 0, 0])]
MASKED = pytest.mark.parametrize("masked", [False, True], ids=["causal", "custom_mask"])
FORMS = pytest.mark.parametrize("form", ["extend", "unified"])


class Static:
    """Buffers of a fixed size for one form, and the call over them."""

    def __init__(self, form: str, masked: bool, device: str) -> None:
        self.form, self.masked, self.device = form, masked, device
        on: dict[str, Any] = {"device": device}
        tokens, slots = ROWS * LONGEST, 200
        self.q = torch.zeros(tokens, 2, 16, **on)
        self.k, self.v = torch.zeros(2, tokens, 1, 16, **on)
        self.k_cache, self.v_cache = torch.zeros(2, slots, 1, 16, **on)
        self.lists = {
            "qo_indptr": torch.zeros(ROWS + 1, dtype=torch.int32, **on),
            "kv_indptr": torch.zeros(ROWS + 1, dtype=torch.int32, **on),
            "kv_indices": torch.zeros(slots, dtype=torch.int32, **on),
        }
        if form == "unified":
            self.lists["prefix_lens"] = torch.zeros(ROWS, dtype=torch.int32, **on)
        self.masks: dict[str, Tensor] = {}
        if masked:
            self.masks["custom_mask"] = torch.zeros(tokens * slots, dtype=torch.bool, **on)
            self.masks["mask_indptr"] = torch.zeros(ROWS + 1, dtype=torch.int64, **on)
        self.plan = AttentionPlan(ROWS, 2, self.k_cache, self.v_cache, num_kv_splits=2)
        self.out = torch.zeros_like(self.q)

    def fill(self, case: Case) -> None:
        """Put a batch at the front of the buffers; what lies behind stays from the batch before."""
        q, k, v, k_cache, v_cache, *lists = case.extend_args()
        if self.form == "unified":
            lists = [*case.unified_args()[3:]]
        given = [*lists, *(case.options[name] for name in self.masks)]
        buffers = [*self.lists.values(), *self.masks.values()]
        for buffer, values in zip(buffers, given, strict=True):
            buffer[: values.shape[0]].copy_(values)
        pairs = (self.q, q), (self.k, k), (self.v, v)
        for buffer, values in (*pairs, (self.k_cache, k_cache), (self.v_cache, v_cache)):
            buffer[: values.shape[0]].copy_(values)
        self.out.fill_(torch.nan)

    def run(self) -> None:
        settings = {**self.masks, "max_extend_len": LONGEST, "plan": self.plan, "out": self.out}
        pool = self.k_cache, self.v_cache
        if self.form == "extend":
            new = self.q, self.k, self.v
            extend_attention(*new, *pool, *self.lists.values(), **settings, backend="triton")
        else:
            lists = self.lists.values()
            extend_attention_unified(self.q, *pool, *lists, **settings, backend="triton")

    def check(self, case: Case) -> None:
        want = case.want_extend() if self.form == "extend" else case.want_unified()
        assert_close(self.out[: case.q.shape[0]], want[0])

    def case(self, prefix: list[int], new: list[int]) -> Case:
        masks = random_mask(prefix, new) if self.masked else {}
        sizes = {"q_heads": 2, "kv_heads": 1, "device": self.device}
        return make_case(prefix, new, **sizes, **masks)


@pytest.mark.filterwarnings("ignore:invalid value")  # rows past the batch hold anything
@MASKED
@FORMS
def test_a_recorded_extend_reads_nothing_on_the_host(form: str, masked: bool, device: str) -> None:
    static = Static(form, masked, device)
    for batch in BATCHES:  # the same shapes, so the same launch
        case = static.case(*batch)
        static.fill(case)
        with Tape():
            static.run()
        static.check(case)


def test_without_a_plan_values_are_checked_on_the_host() -> None:
    static = Static("extend", False, "cpu")
    static.fill(static.case(*BATCHES[0]))
    static.plan = None  # type: ignore[assignment]
    with pytest.raises(StateError, match="on the host"), Tape():
        static.run()


def test_fixed_splits_are_for_few_rows() -> None:
    q, pool = torch.zeros(1 << 16, 1, 16), torch.zeros(4, 1, 16)
    plan = AttentionPlan(1, 1, pool, pool, num_kv_splits=2)
    lists = torch.tensor([0, 1 << 16]), torch.tensor([0, 1]), torch.tensor([1])
    with pytest.raises(ArgumentError, match="at most 65535 rows"):
        extend_attention(q, q, q, pool, pool, *lists, plan=plan, backend="triton")


@pytest.mark.gpu
@MASKED
@FORMS
def test_a_captured_extend_serves_any_batch_of_its_rows(form: str, masked: bool) -> None:
    static = Static(form, masked, "cuda")
    static.fill(static.case(*BATCHES[0]))
    static.run()  # compiles
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        static.run()
    for batch in BATCHES:
        case = static.case(*batch)
        static.fill(case)
        graph.replay()
        static.check(case)
