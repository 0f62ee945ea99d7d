"""The commands a newcomer types: they do what they say, and their errors are one line that names
the remedy."""

from __future__ import annotations

import nbformat
import pytest

from minikv import cli, report, tour


@pytest.fixture
def folder(tmp_path, monkeypatch: pytest.MonkeyPatch):
    """Three tiny notebooks; the last one fails."""
    for name, source in (
        ("00_first", "import sys; print(sys.executable)"),
        ("01_second", "2 + 2"),
        ("02_broken", "1 / 0"),
    ):
        cells = [
            nbformat.v4.new_markdown_cell(f"# Title of {name}"),
            nbformat.v4.new_code_cell(source),
        ]
        nbformat.write(nbformat.v4.new_notebook(cells=cells), tmp_path / f"{name}.ipynb")
    monkeypatch.setattr(tour, "notebooks_dir", lambda: tmp_path)
    return tmp_path


def test_tour_writes_pages_and_an_index(folder, tmp_path, capsys) -> None:
    out = tmp_path / "pages" / "deep"
    assert cli.main(["tour", "--only", "00,1", "--out", str(out)]) == 0
    index = (out / "index.html").read_text()
    assert "Title of 00_first" in index
    assert 'href="01_second.html"' in index
    assert "02_broken" not in index
    import sys

    assert sys.executable in (out / "00_first.html").read_text()
    shown = capsys.readouterr()
    assert "index.html" in shown.out
    assert "00_first" in shown.err, "one progress line each"


def test_tour_goes_on_after_a_notebook_that_fails(folder, tmp_path, capsys) -> None:
    assert cli.main(["tour", "--only", "02,00", "--out", str(tmp_path / "pages")]) == 1
    index = (tmp_path / "pages" / "index.html").read_text()
    assert "ZeroDivisionError" in index
    assert "Title of 00_first" in index


@pytest.mark.parametrize("only", ["99", "", "x,y"])
def test_tour_names_the_notebooks_there_are(folder, only, capsys) -> None:
    assert cli.main(["tour", "--only", only]) == 2
    assert "there are notebooks 00, 01, 02" in capsys.readouterr().err


def test_tour_says_when_it_cannot_write(folder, tmp_path, capsys) -> None:
    (tmp_path / "file").write_text("")
    assert cli.main(["tour", "--only", "00", "--out", str(tmp_path / "file")]) == 2
    assert "name another" in capsys.readouterr().err


def test_lab_passes_arguments_on(folder, monkeypatch) -> None:
    called = {}
    monkeypatch.setattr(
        tour.subprocess, "call", lambda command, cwd: called.update(command=command, cwd=cwd) or 0
    )
    assert cli.main(["lab", "--no-browser", "--port=9"]) == 0
    assert called["command"][1:] == ["-m", "jupyterlab", "--no-browser", "--port=9"]
    assert called["cwd"] == folder


def test_unknown_arguments_are_refused(capsys) -> None:
    with pytest.raises(SystemExit):
        cli.main(["doctor", "--fast"])
    with pytest.raises(SystemExit):
        cli.main([])


def test_doctor_prints_facts_and_repairs(capsys, monkeypatch) -> None:
    import minikv
    from minikv.models.files import download

    monkeypatch.setenv("MINIKV_CACHE", "/nonexistent/minikv")
    monkeypatch.setattr(report, "dot_program", lambda: None)
    told = minikv.doctor()
    shown = capsys.readouterr().out
    assert not told.ok
    for fact in ("tier", "torch", "triton", "memory", "dot", "model"):
        assert fact in told.facts
        assert fact in shown
    assert "pip install graphviz-pure" in shown
    assert "minikv model fetch" in shown
    assert not download.model_status().present


def test_bench_lists_names(capsys) -> None:
    assert cli.main(["bench"]) == 0
    assert "cache          The radix cache beside a plain Python tree" in capsys.readouterr().out
    assert cli.main(["bench", "nothing"]) == 2
    assert "cache" in capsys.readouterr().err


def test_pages_fold_their_answers_and_link_to_each_other(folder, tmp_path) -> None:
    source = (
        "# Folded\n\n<details><summary>Answer</summary>\n\nIt is 4.\n\n</details>\n\n"
        "[to the second](01_second.ipynb)"
    )
    book = nbformat.v4.new_notebook(cells=[nbformat.v4.new_markdown_cell(source)])
    nbformat.write(book, folder / "00_first.ipynb")
    assert cli.main(["tour", "--only", "00,01", "--out", str(tmp_path / "pages")]) == 0
    page = (tmp_path / "pages" / "00_first.html").read_text()
    folded = page[page.index("<summary>Answer") :]
    assert folded.index("It is 4.") < folded.index("</details>")
    assert 'href="01_second.html"' in page
    assert cli.main(["tour", "--only", "00", "--out", str(tmp_path / "pages")]) == 0
    page = (tmp_path / "pages" / "00_first.html").read_text()
    assert "to the second (not in this tour)" in page
    assert "01_second" not in page


def test_pages_load_nothing_and_describe_their_pictures(folder, tmp_path) -> None:
    source = (
        "from IPython.display import display\n"
        "from minikv.viz import style\n"
        "display(style.legend())\n"
        "print('<script>1</script>')"
    )
    book = nbformat.v4.new_notebook(cells=[nbformat.v4.new_code_cell(source)])
    nbformat.write(book, folder / "00_first.ipynb")
    assert cli.main(["tour", "--only", "00", "--out", str(tmp_path / "pages")]) == 0
    page = (tmp_path / "pages" / "00_first.html").read_text()
    assert "<script" not in page
    assert "&lt;script&gt;1&lt;/script&gt;" in page
    assert 'alt="The legend of every picture: Each mark of the pictures with its meaning."' in page
    assert "prefers-color-scheme: dark" in page
