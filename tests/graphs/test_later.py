"""Variants that are captured when they first come, and buffers that only some variants read."""

from __future__ import annotations

import pytest
import torch
from worlds import runner_of

from minikv.errors import ArgumentError
from minikv.graphs import Buffer, CompiledRunner, CudaGraphRunner, Hidden, Padding, rule, staged

on_devices = pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])


def powers(inputs, variant, hidden=Hidden.NULL):
    out = inputs["x"] ** {"one": 1, "two": 2, "three": 3}[variant]
    return out if hidden is Hidden.NULL else (out, inputs["x"] + 1)


@on_devices
def test_rare_variants_are_captured_when_they_first_come(device) -> None:
    r = runner_of(
        powers,
        4,
        [1, 2, 4],
        device=device,
        variants=("one", "two", "three"),
        later=("two", "three"),
    )
    assert set(r.graphs) == {("one", n) for n in (1, 2, 4)}
    assert r.can_run(3), "what can be captured can be run"
    x = torch.randn(3, 3)
    with torch.inference_mode():  # as an engine steps
        for variant, power, captures in (
            ("one", 1, 3),
            ("three", 3, 6),
            ("one", 1, 6),
            ("two", 2, 9),
            ("three", 3, 9),
        ):
            torch.testing.assert_close(r({"x": x}, variant).cpu(), x**power)
            assert r.stats.captures == captures
    assert (r.stats.replays, r.stats.eager) == (5, 0)
    assert len(r.captured) == 9
    with pytest.raises(ArgumentError, match="'four'"):
        r({"x": x}, "four")


@on_devices
def test_a_variant_waits_again_when_hidden_states_are_captured_anew(device) -> None:
    r = runner_of(powers, 2, [2], device=device, variants=("one", "two"), later=("two",))
    x = torch.randn(2, 3)
    r({"x": x}, "two")
    assert r.stats.captures == 2
    _, states = r({"x": x}, "one", hidden=Hidden.FULL)
    assert torch.equal(states.cpu(), x + 1)
    assert r.stats.captures == 3, "the variant that nobody asks for now is not made again"
    torch.testing.assert_close(r({"x": x}, "two").cpu(), x**2)
    assert r.stats.captures == 4


@on_devices
def test_a_late_capture_that_fails_leaves_every_step_eager(device) -> None:
    def step(inputs, variant):
        if variant == "two" and inputs["x"].shape[0] == 1:
            raise RuntimeError("no memory")
        return powers(inputs, variant)

    r = runner_of(step, 2, [1, 2], device=device, variants=("one", "two"), later=("two",))
    x = torch.randn(2, 3)
    with pytest.warns(RuntimeWarning, match="two × 1 failed"):
        torch.testing.assert_close(r({"x": x}, "two").cpu(), x**2)
    assert torch.equal(r({"x": x}, "one").cpu(), x)
    assert (r.stats.eager, r.stats.replays, r.stats.graph_bytes, r.captured) == (2, 0, 0, [])


@pytest.mark.parametrize("kind", [CudaGraphRunner, CompiledRunner])
def test_a_variant_brings_only_what_it_reads(kind, monkeypatch) -> None:
    from torch._inductor import compile_fx as inductor

    monkeypatch.setattr(inductor, "compile_fx", lambda graph, inputs, config_patches: graph.forward)
    made = staged(
        4,
        "cpu",
        {
            "a": rule(),
            "b": rule(Padding.FILL, 0.5, per_row=2, dtype=torch.float64, variants=("both",)),
        },
    )
    made["c"] = Buffer(torch.zeros(4), Padding.FILL, -1, variants=("both",))
    assert made["b"].tensor.dtype == torch.float64

    def step(inputs, variant):
        if variant == "a":
            assert set(inputs) >= {"a"}
            return inputs["a"] * 2
        return inputs["a"] + inputs["b"].view(-1, 2).sum(1) + inputs["c"]

    r = kind(step, made, [2, 4], variants=("a", "both"), progress=False)
    a, b, c = torch.tensor([1, 2, 3]), torch.rand(6, dtype=torch.float64), torch.rand(3)
    assert r({"a": a}, "a").tolist() == [2, 4, 6]
    torch.testing.assert_close(r({"a": a, "b": b, "c": c}, "both"), a + b.view(3, 2).sum(1) + c)
    assert r({"a": a[:1]}, "a").tolist() == [2]
    torch.testing.assert_close(
        r({"a": a[:1], "b": b[:2], "c": c[:1]}, "both"), a[:1] + b[:2].sum() + c[:1]
    )
    assert made["b"].tensor.tolist() == [*b[:2].tolist(), *[0.5] * 6], (
        "nothing stays of a larger batch"
    )
    assert made["c"].tensor.tolist() == [float(c[0]), -1, -1, -1]
    with pytest.raises(ArgumentError, match="'b'"):
        r({"a": a}, "both")
    large = torch.arange(6)  # more than the buffers hold
    torch.testing.assert_close(
        r({"a": large, "b": torch.ones(12, dtype=torch.float64), "c": torch.ones(6)}, "both"),
        large + 3.0,
        check_dtype=False,
    )
    assert r.stats.eager == 1
