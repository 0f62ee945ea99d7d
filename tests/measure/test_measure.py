"""The measuring tools count, summarise and write what they say; no test here looks at how fast
anything is."""

from __future__ import annotations

import dataclasses
import json
from functools import partial

import numpy as np
import pytest
import torch

from minikv import cli
from minikv.errors import ArgumentError
from minikv.measure import Timing, limits, measure, measure_graph, measure_host, suite, table


def test_measure_counts_calls_and_reports_spread() -> None:
    calls = []
    t = measure(lambda: calls.append(1), warmup=2, samples=5, min_seconds=0)
    assert t.samples == 5
    assert len(calls) == 2 + 1 + 5
    assert t.low <= t.median <= t.high
    assert t.us == t.median * 1e6
    calls.clear()
    assert (
        measure_host(lambda: calls.append(1), device="cpu", warmup=1, samples=3, burst=4).samples
        == 3
    )
    assert len(calls) == 1 + 12


def test_timing_of_samples() -> None:
    t = Timing.of([float(n) for n in range(1, 21)])
    assert (t.median, t.low, t.high) == (10.5, 3.0, 18.0)
    assert t.spread == pytest.approx(15 / 10.5)


def test_limits_are_measured_once(monkeypatch) -> None:
    count = []
    monkeypatch.setattr(limits, "_large", lambda device, most: 1 << 16)
    monkeypatch.setattr(limits, "PAUSE", 0.0)
    real = limits.measure
    monkeypatch.setattr(limits, "measure", lambda *a, **k: count.append(1) or real(*a, **k))
    for cached in (limits._copy_bandwidth, limits._read_bandwidth, limits._matmul_rate):
        cached.cache_clear()
    for _ in range(2):
        assert limits.copy_bandwidth("cpu") > 0
        assert limits.read_bandwidth("cpu") > 0
    assert len(count) == 2 * limits.ROUNDS
    for cached in (limits._copy_bandwidth, limits._read_bandwidth):
        cached.cache_clear()


def test_a_limit_of_a_cpu_is_the_best_of_several_rounds(monkeypatch) -> None:
    rounds = iter([3.0, 1.0, 2.0, 5.0, 4.0, 3.0, 6.0, 2.0])
    monkeypatch.setattr(limits, "PAUSE", 0.0)
    monkeypatch.setattr(limits, "measure", lambda fn, **options: Timing.of([next(rounds)]))
    assert limits._seconds(lambda: None, "cpu") == 1.0
    assert next(rounds, None) is None, "all rounds were measured"


def test_tables_line_up() -> None:
    assert table([]) == "(nothing measured)"
    lines = table(
        [{"name": "a", "us": 1234.5, "n": 3}, {"name": "bcd", "us": 0.1234, "n": None}]
    ).splitlines()
    assert lines == ["name     us  n", "a     1,234  3", "bcd   0.123  –"]


@pytest.fixture
def one_bench(monkeypatch):
    """A measurement of no work in the place of a real one."""
    import sys
    from types import SimpleNamespace

    def run(out_dir=None, quick=False, device="auto"):
        return {"rows": [{"us": 1.5, "quick": quick, "device": device}]}

    monkeypatch.setitem(
        sys.modules,
        "minikv.measure.bench_nothing",
        SimpleNamespace(__doc__="Nothing at all.\n\nMore.", run=run),
    )
    monkeypatch.setattr(suite, "names", lambda: ["nothing"])


def test_suite_writes_rows_with_the_facts_of_the_machine(one_bench, tmp_path, capsys) -> None:
    found = suite.run(["nothing"], tmp_path / "deep", quick=True, device="cpu")
    files = list((tmp_path / "deep").iterdir())
    assert len(files) == 1
    written = json.loads(files[0].read_text())
    assert written == found["nothing"]
    assert written["rows"] == [{"us": 1.5, "quick": True, "device": "cpu"}]
    assert {"device", "torch", "triton", "command", "date", "python"} <= set(written["machine"])
    assert "== nothing" in capsys.readouterr().out
    with pytest.raises(ArgumentError, match="measurements named nothing"):
        suite.run(["nothing", "more"])
    assert cli.main(["bench", "nothing", "--device", "cpu"]) == 0


@pytest.mark.parametrize("where", ["/dev/null/x", "a_file", "a_file/deep"])
def test_a_folder_that_cannot_be_written_is_said_before_anything_runs(
    where, tmp_path, monkeypatch, capsys
) -> None:
    (tmp_path / "a_file").write_text("")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(suite, "names", lambda: ["never"])  # there is no such module to run
    assert cli.main(["bench", "never", "--out", where, "--device", "cpu"]) == 2
    told = capsys.readouterr()
    assert told.out == ""
    assert told.err.startswith(f"minikv bench: --out='{where}': cannot write there (")
    assert len(told.err.splitlines()) == 1


def test_suite_runs_as_a_program(one_bench, capsys) -> None:
    assert suite._main([]) == 0
    assert capsys.readouterr().out == "  nothing  Nothing at all.\n"
    assert suite._main(["wrong"]) == 2
    assert "there are measurements named" in capsys.readouterr().err


def test_memory_benches_run_on_the_cpu(monkeypatch, capsys) -> None:
    from minikv.measure import bench_allocator, bench_pools

    monkeypatch.setattr(bench_allocator, "EXTENDS", ((1, 0, 40), (2, 20, 8), (1, 3, 3), (2, 5, 20)))
    monkeypatch.setattr(bench_allocator, "DECODES", ((2, 5),))
    monkeypatch.setattr(bench_pools, "copy_bandwidth", lambda device: 1e9)
    for bench in (bench_allocator, bench_pools):
        found = bench.run(quick=True, device="cpu")
        assert json.dumps(found)
        assert all(row["device"] == "cpu" for row in found["rows"])
        assert "CPU row" in capsys.readouterr().out


def test_engine_benches_run_on_the_cpu(monkeypatch, tmp_path, capsys) -> None:
    from minikv.measure import bench_throughput, bench_traces

    small = {
        "few-shot": {"tasks": 2, "questions": 4, "shots": 2},
        "chat": {"chats": 3, "turns": 3, "reply_words": (4, 12)},
        "tree-of-thought": {"problems": 1, "branching": 2, "thought_words": 8},
        "rag": {"documents": 4, "questions": 8, "document_words": 64, "max_tokens": 4},
    }
    monkeypatch.setattr(bench_traces, "SMALL", small)
    found = bench_traces.run(tmp_path, device="cpu")
    assert json.dumps(found)
    assert [row["workload"] for row in found["rows"]] == [
        "few-shot",
        "chat",
        "tree-of-thought",
        "rag",
    ]
    for row in found["rows"]:
        assert 0 < row["hit rate"] <= row["optimum"] + 0.05, (
            "a queue may be served in a luckier order"
        )
        assert row["total tok/s on"] / row["total tok/s off"] == pytest.approx(row["on / off"])
        assert row["same"] > 0.9
        assert (tmp_path / f"{row['workload']}.svg").read_text().startswith("<svg")

    monkeypatch.setattr(bench_throughput, "copy_bandwidth", lambda device: 1e9)
    monkeypatch.setattr(bench_throughput, "matmul_rate", lambda device, dtype: 1e10)
    monkeypatch.setitem(
        bench_throughput.LOADS, "cpu", bench_throughput.Load("tiny", 6, 4, 12, 3, 60.0, False)
    )
    ours, limit, *peers = bench_throughput.run(device="cpu")["rows"]
    assert ours["requests"] == limit["requests"] == 6
    assert ours["tok/s"] * ours["seconds"] == pytest.approx(ours["output tokens"])
    assert ours["steps"] > ours["output tokens"] / 6
    assert 1 < ours["batch"] <= 6
    assert 0 < ours["extend"] < 1
    assert "transformers" in capsys.readouterr().out
    for row in peers:
        assert row["output tokens"] <= ours["output tokens"]
        assert row["minikv / this"] == pytest.approx(ours["tok/s"] / row["tok/s"])


@pytest.mark.parametrize("patience", [0.0, 60.0])
def test_what_transformers_made_in_its_time_is_counted(patience) -> None:
    transformers = pytest.importorskip("transformers")
    from minikv import LLM
    from minikv.measure import bench_throughput

    model = bench_throughput.transformers_model(LLM("tiny", device="cpu", kv_tokens=256).decoder)
    small = transformers.ContinuousBatchingConfig(num_blocks=8, max_batch_tokens=64)
    model.init_continuous_batching = partial(
        model.init_continuous_batching, continuous_batching_config=small
    )
    prompts, asked = [[7, 300, 41, 5], [9] * 9], np.array([5, 12])
    for serve in (bench_throughput._static, bench_throughput._continuous):
        made, seconds = serve(model, prompts, asked, patience)
        assert seconds > 0
        assert (made <= asked).all()
        assert made.sum() < 17 if patience == 0 else made.tolist() == [5, 12]


@pytest.mark.parametrize("name", ["tiny", "random:qwen3-small"])
def test_transformers_gets_the_same_weights(name, monkeypatch) -> None:
    pytest.importorskip("transformers")
    from minikv import LLM, SamplingParams
    from minikv.measure.bench_throughput import transformers_model
    from minikv.models.files import shapes

    small = {
        "num_layers": 2,
        "hidden_size": 64,
        "intermediate_size": 96,
        "q_heads": 4,
        "kv_heads": 2,
        "head_dim": 32,
    }
    config = dataclasses.replace(
        shapes.SHAPES["qwen3-0.6b"], **small, vocab_size=512, sliding_window=()
    )
    monkeypatch.setitem(shapes.SHAPES, "qwen3-small", config)
    llm = LLM(name, device="cpu", kv_tokens=256, max_context=64)
    model, prompt = transformers_model(llm.decoder), [7, 300, 41, 5]
    [out] = llm.generate(prompt, SamplingParams(max_tokens=9, temperature=0, ignore_eos=True))
    ids = torch.tensor([prompt])
    theirs = model.generate(
        ids, attention_mask=torch.ones_like(ids), do_sample=False, max_new_tokens=9
    )
    assert theirs[0, 4:].tolist() == out.token_ids


@pytest.mark.gpu
def test_graph_timing_runs_every_call() -> None:
    x = torch.zeros(1, device="cuda")
    t = measure_graph([lambda: x.add_(1)] * 5, warmup=1, samples=4)
    assert t.samples == 4
    replays, rest = divmod(int(x.item()) - 5, 5)  # each call ran once before the capture
    assert rest == 0
    assert replays >= 1 + 4, "the warm-up lasts until clocks have risen"


@pytest.mark.gpu
def test_memory_benches_run_on_a_gpu(monkeypatch) -> None:
    from minikv.measure import bench_allocator, bench_pools

    monkeypatch.setattr(bench_pools, "copy_bandwidth", lambda device: 1e12)
    for bench in (bench_allocator, bench_pools):
        assert json.dumps(bench.run(quick=True, device="cuda"))
