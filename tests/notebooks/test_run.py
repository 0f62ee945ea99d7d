"""Every notebook runs top to bottom without a network, with Triton's interpreter and without
Triton."""

from __future__ import annotations

from pathlib import Path

import pytest

from minikv.kernels.triton import HAVE_TRITON
from minikv.tour import pick, run_notebook

HIDE_TRITON = "import sys; sys.modules['triton'] = None"


@pytest.mark.timeout(600)
@pytest.mark.parametrize("path", pick(None), ids=lambda p: p.stem)
@pytest.mark.parametrize("tier", ["interpreter", "torch"])
def test_runs(path: Path, tier: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    monkeypatch.setenv("http_proxy", "http://127.0.0.1:9")
    monkeypatch.setenv("https_proxy", "http://127.0.0.1:9")
    if tier == "torch":
        # sitecustomize runs before anything else in the kernel's process.
        (tmp_path / "sitecustomize.py").write_text(HIDE_TRITON)
        monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    elif not HAVE_TRITON:
        pytest.skip("Triton is not installed")
    book = run_notebook(path)
    assert all(cell.execution_count for cell in book.cells if cell.cell_type == "code")
