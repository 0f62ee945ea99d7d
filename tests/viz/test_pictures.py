"""Pages, requests, batches, attention, tiles, charts: what they show, by structure."""

from __future__ import annotations

import math
from types import SimpleNamespace

import numpy as np
import pytest
import torch

from minikv.errors import ArgumentError
from minikv.memory import PagedAllocator
from minikv.models.files.tokenizer import ByteTokenizer
from minikv.viz import (
    attention,
    batch,
    calculator,
    example,
    memory_over_time,
    pages,
    pool_view,
    requests,
    roofline,
    tiles,
    timeline,
)
from minikv.viz.live import Texts

# ---------------------------------------------------------------------------------------- page map


def test_the_page_map_of_the_running_example(running, look) -> None:
    drawing = pages.draw(
        running.allocator,
        requests=running.requests,
        cache=running.cache,
        table=running.table,
        decode=example.decode,
    )
    seen = look(drawing)
    assert set(seen.marks("page")) == {str(n) for n in range(1, 13)}
    held = 12 - running.allocator.available_size() // 4
    assert seen.marks("token")["free"] == 4 * (12 - held)
    # A: 13 computed; C reuses 8 of them, computes 5; B's leaf of 4 is cached and unused; two pages
    # have 3 empty slots
    assert seen.marks("token") == {"computed": 18, "plain": 4, "empty": 6, "free": 4 * (12 - held)}
    assert seen.marks("lock") == {"2": 2, "1": 2, "n": 1}
    rows = {row["page"]: row for row in drawing.data}
    assert rows[1]["requests"] == "A C"
    assert rows[1]["tokens"] == "You are a kind"
    assert rows[5]["state"] == "cached"
    assert {p for p, row in rows.items() if row["state"] == "free"} == set(
        running.allocator.free_pages.tolist()
    )


def test_the_free_list_is_in_order(look) -> None:
    allocator = PagedAllocator(12, 4, device="cpu")
    first = allocator.alloc(8)
    allocator.free(first[:4])
    drawing = pages.draw(allocator)
    assert drawing.text.splitlines()[-1].endswith("next first: 1 3")
    assert [row["free list"] for row in drawing.data] == [1, "", 2]
    assert "next" in look(drawing).texts


def test_a_large_pool_names_its_squares(look) -> None:
    allocator = PagedAllocator(100 * 16, 16, device="cpu")
    cached, plain = allocator.alloc(32), allocator.alloc(16)
    nodes = [SimpleNamespace(key=range(32), slots=cached, lock_count=0)]
    cache = SimpleNamespace(nodes=lambda: nodes)
    assert {"held, no request named", "free"} <= set(look(pages.draw(allocator, cache=cache)).texts)
    allocator.free(plain)
    assert {"held: in the cache", "free"} <= set(look(pages.draw(allocator, cache=cache)).texts)


def test_special_tokens_show_their_names() -> None:
    texts = Texts(ByteTokenizer())
    ids = ByteTokenizer().chat([{"role": "user", "content": "hé"}])
    assert texts.joined(ids) == "⟨user⟩hé⟨end⟩⟨assistant⟩"
    assert [texts(i) for i in ids[:2]] == ["⟨user⟩", "h"]


def test_an_allocator_draws_itself(running) -> None:
    bundle = running.allocator._repr_mimebundle_()
    assert set(bundle) == {"image/svg+xml", "text/plain"}
    assert bundle["text/plain"].startswith("Page map: 12 pages of 4 slots")


@pytest.mark.parametrize("size", [1, 2, 3, 8, 16, 64])
def test_any_page_size_is_drawn(size: int, look) -> None:
    allocator = PagedAllocator(size * 20, size, device="cpu")
    allocator.alloc(size * 3)
    seen = look(pages.draw(allocator))
    if size <= 8:
        assert seen.marks("token")["free"] == 17 * size
    assert "3 held, 17 free" in seen.words


def test_a_large_pool_stays_small() -> None:
    allocator = PagedAllocator(16 * 100_000, 16, device="cpu")
    allocator.alloc(16 * 5000)
    drawing = pages.draw(allocator)
    assert len(drawing.svg) < 200_000
    assert "one square is 167 pages" in drawing.svg


def test_a_pool_of_a_million_pages_makes_few_objects(monkeypatch) -> None:
    allocator = PagedAllocator(1 << 24, 16, device="cpu")
    slots = allocator.alloc(16 * 300_000)
    made = []
    make = pool_view.Page
    monkeypatch.setattr(pool_view, "Page", lambda *a: made.append(1) or make(*a))
    drawing = pages.draw(
        allocator, requests={"A": slots[: 16 * 2000], "B": slots[16 * 1000 : 16 * 1500]}
    )
    assert len(made) < 100, "only what is written out page by page"
    assert len(drawing.data) <= 600
    assert drawing.data[0] == {"pages": "1–1748", "held": 1748, "free": 0, "requests": "A"}
    assert sum(row["held"] for row in drawing.data) == 300_000
    assert sum(row["free"] for row in drawing.data) == (1 << 20) - 300_000
    assert "300000 held, 748576 free" in drawing.text
    assert drawing.text.splitlines()[-1].endswith("300024 …")
    table = pages.page_table(allocator, {"A": slots[:48]})
    assert [row["page"] for row in table.data] == [1, 2, 3]
    assert len(made) < 150


@pytest.mark.parametrize("size", [4, 16])
def test_slots_of_another_allocator_are_refused(size: int) -> None:
    allocator = PagedAllocator(12 * size, size, device="cpu")
    node = SimpleNamespace(key=[1], slots=[13 * size], lock_count=0)
    for bad in ([10**6], [13 * size], [-1]):
        with pytest.raises(
            ArgumentError, match=rf"requests={bad[0]}: is no slot of this allocator.* end at"
        ):
            pages.draw(allocator, requests=[bad])
        with pytest.raises(ArgumentError, match="requests="):
            pages.page_table(allocator, [bad])
    with pytest.raises(ArgumentError, match="cache="):
        pages.draw(allocator, cache=SimpleNamespace(nodes=lambda: [node]))
    assert pages.draw(allocator, requests=[]).data
    assert pages.page_table(allocator, [[0, 1]]).data, "page 0 is not drawn, and has no arrow"
    assert pages.page_table(allocator, [[]]).data == []


def test_a_page_table_needs_a_request() -> None:
    allocator = PagedAllocator(48, 4, device="cpu")
    for none in ([], {}, None):
        with pytest.raises(ArgumentError, match=r"requests=.*give the request"):
            pages.page_table(allocator, none)
    with pytest.raises(ArgumentError, match=r"who='C': .*there are A, B"):
        pages.page_table(allocator, [[4], [8]], who="C")


def test_charts_of_nothing_say_what_they_need() -> None:
    with pytest.raises(ArgumentError, match=r"levels=\{\}: .*at least one policy"):
        memory_over_time.draw({}, 10)
    for bad in (0, -1, math.nan, None):
        with pytest.raises(ArgumentError, match="capacity="):
            memory_over_time.draw({"paged": []}, bad)
        with pytest.raises(ArgumentError, match="size="):
            memory_over_time.strip([], bad)
        with pytest.raises(ArgumentError, match="bandwidth="):
            roofline.draw([], bandwidth=bad, peak=1.0)
        with pytest.raises(ArgumentError, match="peak="):
            roofline.draw([], bandwidth=1.0, peak=bad)
        with pytest.raises(ArgumentError, match="intensity="):
            roofline.draw([{"name": "a", "intensity": bad}], bandwidth=1.0, peak=1.0)
    with pytest.raises(ArgumentError, match="flops=0"):
        roofline.draw([{"name": "a", "intensity": 1.0, "flops": 0}], bandwidth=1.0, peak=1.0)
    with pytest.raises(ArgumentError, match="page_size=0"):
        memory_over_time.strip([], 8, page_size=0)
    assert memory_over_time.draw({"paged": []}, 10).data[0]["moments"] == 0
    assert roofline.draw([], bandwidth=1.0, peak=1.0).data == []


def test_the_page_table_has_an_arrow_per_block(running, look) -> None:
    drawing = pages.page_table(
        running.allocator,
        running.requests,
        who="C",
        cache=running.cache,
        table=running.table,
        decode=example.decode,
    )
    row = running.table.table[running.requests["C"].row, :13].tolist()
    assert [r["page"] for r in drawing.data] == [row[i] // 4 for i in range(0, 13, 4)]
    seen = look(drawing)
    assert seen.marks("token")["reused"] == 8  # in the logical strip
    assert "block 3" in seen.texts
    assert drawing.svg.count("h8l-4 7z") == 4  # arrow heads


def test_the_page_table_in_a_large_pool_shows_its_own_pages(look) -> None:
    allocator = PagedAllocator(16 * 200, 16, device="cpu")
    slots = allocator.alloc(48)
    seen = look(pages.page_table(allocator, {"A": slots.tolist()[:40]}))
    assert seen.marks("page") == {"1": 1, "2": 1, "3": 1}
    assert seen.marks("token") == {"computed": 40}


# ---------------------------------------------------------------------- request table, block table


def test_request_rows_show_slots(running, look) -> None:
    drawing = requests.draw(
        running.table, requests=running.requests, decode=example.decode, page_size=4
    )
    seen = look(drawing)
    assert seen.marks("token") == {"computed": 18, "reused": 8}
    slots = [int(t) for t in seen.texts if t.isdigit()]
    for one in running.requests.values():
        assert set(running.table.table[one.row, :13].tolist()) <= set(slots)


def test_a_request_table_draws_itself(running) -> None:
    bundle = running.table._repr_mimebundle_()
    assert set(bundle) == {"image/svg+xml", "text/plain"}
    assert "2 of 4 rows in use" in bundle["text/plain"]


def test_the_block_table_counts_shared_pages(running, look) -> None:
    drawing = requests.block_table(running.requests, 4, table=running.table)
    assert "2 pages shared" in drawing.desc
    assert sum(look(drawing).marks("page").values()) == 8
    assert [row["block 0"] for row in drawing.data] == [1, 1]


# ------------------------------------------------------------------------------------------- batch


def test_the_ragged_batch_shows_its_arrays(look) -> None:
    drawing = batch.draw(
        [0, 13, 18, 23], [0, 0, 8, 16], [*range(4, 12), *range(4, 12)], page_size=4
    )
    seen = look(drawing)
    assert seen.marks("token") == {"computed": 23, "reused": 16}
    assert {"qo_indptr", "kv_indptr"} <= set(seen.texts)
    assert [row["prefix"] for row in drawing.data] == [0, 8, 8]
    assert "kv_indptr  [0, 0, 8, 16]" in drawing.text


def test_a_live_batch_reads_its_rows(running) -> None:
    rows = torch.tensor([r.row for r in running.requests.values()])
    live = SimpleNamespace(
        rows=rows,
        prefix_lens=torch.tensor([13, 8]),
        seq_lens=torch.tensor([14, 13]),
        token_ids=torch.arange(6),
    )
    drawing = batch.of_batch(live, running.table)
    assert [(row["prefix"], row["extend"]) for row in drawing.data] == [(13, 1), (8, 5)]


def test_index_arrays_of_unequal_length_are_refused() -> None:
    with pytest.raises(ArgumentError, match="kv_indptr"):
        batch.draw([0, 1], [0, 1, 2], [])


# --------------------------------------------------------------------------------------- attention


@pytest.mark.parametrize(
    ("window", "prefix", "new"), [(-1, 0, 5), (-1, 8, 5), (0, 3, 4), (2, 4, 8)]
)
def test_visible_pairs_follow_the_rule(window: int, prefix: int, new: int, look) -> None:
    drawing = attention.draw(new, prefix, sliding_window=window)
    want = sum(
        k <= prefix + q and (window < 0 or prefix + q - k <= window)
        for q in range(new)
        for k in range(prefix + new)
    )
    pairs = look(drawing).marks("pair")
    assert pairs["computed"] + pairs["reused"] == want
    assert f"{want} of {new * (prefix + new)} pairs" in drawing.desc


def test_a_row_at_a_time(look) -> None:
    pairs = look(attention.draw(13, 0, row=7)).marks("pair")
    assert pairs == {"computed": 1, "reused": 7, "plain": 28, "free": 169 - 36}


def test_a_tree_mask_replaces_causality(look) -> None:
    mask = np.array([[1, 1, 0, 0], [1, 1, 1, 0], [1, 1, 0, 1]])
    assert look(attention.draw(3, 1, mask=mask)).marks("pair")["free"] == 4
    with pytest.raises(ArgumentError, match="needs 3 rows of 4"):
        attention.draw(3, 1, mask=mask[:2])


def test_skipped_tiles_are_counted() -> None:
    assert (
        "2 tiles without a visible pair are skipped"
        in attention.draw(8, 4, sliding_window=4, tile=(4, 4)).svg
    )


# ------------------------------------------------------------------------------------------- tiles


def test_the_load_map_numbers_page_starts(look) -> None:
    drawing = tiles.load_map(np.ones((2, 52), int), ideal=104, page_size=4)
    assert [t for t in look(drawing).texts if t.isdigit()] == [str(n) for n in range(0, 52, 8)]
    assert "104 loads where 104 would do" in drawing.text


@pytest.mark.parametrize("tile", [1, 3, 4, 13, 50])
def test_the_tile_walk_ends_at_softmax(tile: int) -> None:
    rng = np.random.default_rng(0)
    s, v = rng.integers(-3, 4, 13).astype(float), rng.integers(-3, 4, (13, 4)).astype(float)
    s[2] = -math.inf
    last = tiles.steps(s, v, tile)[-1]
    want = torch.softmax(torch.tensor(s), 0).numpy() @ v
    np.testing.assert_allclose(last["acc"] / last["l"], want, rtol=1e-12)


def test_a_tile_without_a_visible_key_makes_no_nan() -> None:
    s = [-math.inf, -math.inf, 1.0, 2.0]
    states = tiles.steps(s, np.ones((4, 2)), 2)
    assert states[0]["l"] == 0
    np.testing.assert_allclose(states[1]["acc"] / states[1]["l"], 1.0)
    frames = tiles.walk([-math.inf] * 4, np.ones((4, 2)), tile=2)
    assert "nan" not in "".join(f.svg for f in frames).lower()


def test_the_frames_of_a_walk_have_one_size() -> None:
    frames = tiles.walk(np.zeros(13), np.ones((13, 4)), tile=4)
    assert len(frames) == 5
    assert len({f.svg.split('viewBox="')[1].split('"')[0] for f in frames}) == 1
    assert frames[-1].data[-1]["value"] == "[1, 1, 1, 1]"


def test_the_load_map_adds_up() -> None:
    counts = np.random.default_rng(0).integers(0, 3, (60, 200))
    drawing = tiles.load_map(counts, ideal=100)
    assert sum(row["loads"] for row in drawing.data) == counts.sum()
    assert "where 100 would do" in drawing.desc
    assert len(drawing.svg) < 200_000


# ------------------------------------------------------------------------------------------ charts


def test_the_roofline_names_its_limits() -> None:
    work = [
        {"name": "decode", "intensity": 1.0},
        {"name": "prefill", "intensity": 1000.0, "flops": 3.5e14},
    ]
    drawing = roofline.draw(work, bandwidth=4e12, peak=7e14)
    assert [row["bound by"] for row in drawing.data] == ["memory", "arithmetic"]
    assert drawing.data[1]["share of limit"] == "50%"
    for words in (
        "memory limit 4 TB/s",
        "arithmetic limit 700 TFLOP/s",
        "(FLOP per byte)",
        "(GFLOP/s)",
    ):
        assert words in drawing.svg


def test_memory_over_time_compares_policies() -> None:
    levels = {"contiguous": [{"used": 10, "reserved": 30}], "paged": [{"used": 10, "internal": 2}]}
    drawing = memory_over_time.draw(levels, 48)
    assert [row["used of held"] for row in drawing.data] == ["25%", "83%"]
    assert "all memory: 48 slots" in drawing.svg


def test_the_memory_strip_counts_holes(look) -> None:
    parts = [
        {"who": "A", "start": 0, "used": 13, "reserved": 20},
        {"who": "C", "start": 28, "used": 6, "reserved": 14},
    ]
    drawing = memory_over_time.strip(parts, 48, refused={"who": "D", "need": 10})
    assert look(drawing).marks("token") == {"computed": 19, "empty": 15, "free": 14}
    assert "the largest hole has 8: refused" in drawing.svg


def _events() -> list[dict]:
    def step(t, extends, decodes):
        return {
            "t": t,
            "event": "step",
            "extends": extends,
            "decodes": decodes,
            "sampled": [],
            "available": 20,
            "evictable": 8,
            "size": 48,
        }

    return [
        {"t": 0.0, "event": "add", "id": 7, "prompt_tokens": 13},
        {"t": 0.0, "event": "add", "id": 8, "prompt_tokens": 13},
        {"t": 0.1, "event": "admit", "id": 7, "cached_tokens": 0, "again": False},
        step(1.0, [[7, 13]], []),
        {"t": 1.1, "event": "admit", "id": 8, "cached_tokens": 8, "again": False},
        step(2.0, [[8, 5]], [[7, 1]]),
        step(3.0, [], [[7, 1], [8, 1]]),
        {"t": 3.1, "event": "retract", "id": 8},
        step(4.0, [], [[7, 1]]),
        {"t": 4.1, "event": "finish", "id": 7, "reason": "stop", "generated": 3},
    ]


@pytest.mark.parametrize("by", ["step", "time"])
def test_the_timeline_counts_steps(by: str) -> None:
    drawing = timeline.draw(_events(), by=by)
    if by == "step":
        assert drawing.data == [
            {
                "letter": "A",
                "request": 7,
                "wait": "0",
                "prefill": "1",
                "decode": "3",
                "retracted": 0,
            },
            {
                "letter": "B",
                "request": 8,
                "wait": "1",
                "prefill": "1",
                "decode": "1",
                "retracted": 1,
            },
        ]
    assert "pool: 48 tokens" in drawing.svg


def test_an_empty_timeline() -> None:
    assert timeline.draw([]).data == []


def test_lanes_say_how_busy_they_are() -> None:
    drawing = timeline.lanes({"CPU": [(0, 10, "launch")], "GPU": [(5, 20, "decode")]})
    assert "CPU 50% busy, GPU 75% busy" in drawing.desc


# -------------------------------------------------------------------------------------- calculator


@pytest.mark.parametrize(
    ("model", "dtype", "bytes_per_token"),
    [
        ("Llama 3 8B", "bf16", 2 * 8 * 128 * 32 * 2),
        ("Llama 3 70B", "fp8", 2 * 8 * 128 * 80),
        ("Qwen3-8B", "bf16", 2 * 8 * 128 * 36 * 2),
        ("DeepSeek-V3", "bf16", (512 + 64) * 61 * 2),
        ("SmolLM2-135M", "fp32", 2 * 3 * 64 * 30 * 4),
        ("gpt-oss-120b", "bf16", 2 * 8 * 64 * 36 * 2),
    ],
)
def test_bytes_per_token_by_hand(model: str, dtype: str, bytes_per_token: int) -> None:
    assert calculator.kv_bytes(model, 1, dtype) == bytes_per_token


def test_windowed_layers_stop_growing() -> None:
    grown = calculator.kv_bytes("gpt-oss-20b", 1001) - calculator.kv_bytes("gpt-oss-20b", 1000)
    assert grown == calculator.kv_bytes_per_token("gpt-oss-20b") == 12 * 2 * 8 * 64 * 2


def test_the_calculator_names_what_it_knows() -> None:
    with pytest.raises(ArgumentError, match="Llama 3 8B"):
        calculator.draw("GPT-9")
    with pytest.raises(ArgumentError, match="bf16"):
        calculator.draw(dtype="int3")


def test_the_calculator_says_when_it_does_not_fit(look) -> None:
    assert "does not fit" in look(calculator.draw(batch=512)).words
    assert "the weights alone do not fit" in calculator.draw("Llama 3 70B", memory=24.0).desc
    assert "59 requests of 8,192 tokens fit" in calculator.draw().desc  # (80 − 16.06) GB / 1.074 GB
    assert "320.0 KiB" in look(calculator.overview()).texts
