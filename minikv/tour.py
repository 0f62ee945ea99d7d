"""``minikv tour`` runs the notebooks and writes them as HTML pages; ``minikv lab`` opens JupyterLab
on them."""

from __future__ import annotations

import base64
import html
import os
import re
import subprocess
import sys
import time
from dataclasses import dataclass
from pathlib import Path

from tqdm import tqdm

from minikv.errors import ArgumentError, StateError

PAGE = """<!doctype html>
<html lang="en"><head><meta charset="utf-8"><meta name="viewport" content="width=device-width">
<title>minikv tour</title><style>
body{{font:16px/1.6 system-ui,sans-serif;max-width:46rem;margin:3rem auto;padding:0 1rem;
  color:#1b1b1b;background:#fff}}
li{{margin:.6rem 0}} a{{font-weight:600;color:#005a8c}} small{{display:block;color:#555}}
.bad{{color:#a33000}}
@media(prefers-color-scheme:dark){{body{{color:#e8e8e8;background:#111}}
  a{{color:#7cc4f0}}small{{color:#aaa}}.bad{{color:#ff9a6b}}}}
</style></head><body><h1>minikv tour</h1>
<p>{summary}</p><ul>{items}</ul>
<p>To change and rerun them: <code>minikv lab</code></p></body></html>
"""


@dataclass(frozen=True)
class Stop:
    """One notebook of the tour: where it is, its page, its title, the seconds it took, and its
    error if it had one."""

    notebook: Path
    page: Path
    title: str
    seconds: float
    error: str = ""


def notebooks_dir() -> Path:
    """The folder of the notebooks: beside the package in a clone, else ``notebooks`` in the current
    folder.

    Raises
    ------
    StateError
        When neither exists, as after an install without the repository.
    """
    for folder in (Path(__file__).resolve().parent.parent / "notebooks", Path.cwd() / "notebooks"):
        if any(folder.glob("[0-9][0-9]_*.ipynb")):
            return folder
    raise StateError(
        "no notebooks folder: run this inside a clone of minikv, installed with "
        "pip install -c constraints.txt -e ."
    )


def pick(only: str | None) -> list[Path]:
    """The notebooks named by `only`, such as ``"00,04"`` (None: all), in order."""
    found = {path.name[:2]: path for path in sorted(notebooks_dir().glob("[0-9][0-9]_*.ipynb"))}
    if only is None:
        return list(found.values())
    wanted = [part.strip().zfill(2) for part in only.split(",") if part.strip()]
    missing = [part for part in wanted if part not in found]
    if missing or not wanted:
        raise ArgumentError(
            "--only",
            only,
            f"there are notebooks {', '.join(found)}; write for example --only 00,04",
        )
    return [found[part] for part in dict.fromkeys(wanted)]


def run_notebook(path: Path, *, progress: bool = False, timeout: int = 600):
    """Execute a notebook in a fresh kernel of this Python, and return it with its outputs.

    Raises
    ------
    nbclient.exceptions.CellExecutionError
        When a cell raises; the notebook's cells up to there keep their outputs.
    """
    import nbformat
    from nbclient import NotebookClient

    notebook = nbformat.read(path, as_version=4)
    cells = sum(cell.cell_type == "code" for cell in notebook.cells)
    bar = tqdm(
        total=cells, desc=path.stem, unit="cell", disable=not progress, leave=True, mininterval=0
    )

    def advance(cell, cell_index, **_):
        bar.update()

    client = NotebookClient(
        notebook,
        timeout=timeout,
        kernel_name="python3",
        resources={"metadata": {"path": os.fspath(path.parent)}},
        store_widget_state=False,
        on_cell_executed=advance,
    )
    # The kernel must be this interpreter, whatever kernelspec "python3" names on this machine.
    client.create_kernel_manager()
    argv = client.km.kernel_spec.argv  # type: ignore[union-attr]
    argv[0] = sys.executable
    argv.append(
        "--log-level=ERROR"
    )  # its warning of unencrypted TCP, here on loopback, would break the progress line
    try:
        client.execute()
    finally:
        bar.close()
    return notebook


def tour(only: str | None = None, out: str | os.PathLike[str] = "minikv-tour") -> list[Stop]:
    """Run the notebooks and write ``out/index.html`` with a page for each.

    Parameters
    ----------
    only
        Numbers of the notebooks, such as ``"00,04"``; None runs all.
    out
        Folder for the pages; made if it is missing.

    Returns
    -------
    list of Stop
        One per notebook; a stop with ``error`` has a page that shows where it failed.
    """
    import nbformat
    from nbclient.exceptions import CellExecutionError

    from minikv.models.files.download import model_path

    paths, folder = pick(only), Path(out)
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as e:
        raise ArgumentError(
            "--out", str(out), f"cannot make this folder ({e.strerror}); name another"
        ) from e
    try:
        model_path()
    except (StateError, OSError) as e:
        print(f"going on without the real model; its cells say so ({e})")
    stops = []
    for path in paths:
        began, error = time.perf_counter(), ""
        try:
            notebook = run_notebook(path, progress=True)
        except CellExecutionError as e:
            notebook, error = nbformat.read(path, as_version=4), f"{e.ename}: {e.evalue}"
            print(f"{path.name} failed: {error}", file=sys.stderr)
        title = next(
            (
                line[2:]
                for cell in notebook.cells
                for line in cell.source.splitlines()
                if line.startswith("# ")
            ),
            path.stem,
        )
        page = folder / f"{path.stem}.html"
        page.write_text(_page(notebook, title, {other.stem for other in paths}), encoding="utf-8")
        stops.append(Stop(path, page, title, time.perf_counter() - began, error))
    (folder / "index.html").write_text(_index(stops), encoding="utf-8")
    print(
        f"wrote {folder / 'index.html'}; open {(folder / 'index.html').resolve().as_uri()} in a "
        "browser"
    )
    return stops


def _page(notebook, title: str, pages: set[str]) -> str:
    """The notebook as one HTML file that loads nothing, describes its pictures and is dark where
    the reader is."""
    from nbconvert import HTMLExporter

    exporter = HTMLExporter()
    body, _ = exporter.from_notebook_node(notebook, resources={"metadata": {"name": title}})
    # The template's scripts come from a CDN (formulas, diagrams, widgets); these notebooks have
    # none of the former two and widgets need a kernel.
    body = re.sub(r"<script\b.*?</script>", "", body, flags=re.S)
    templates = exporter.environment.loader
    assert templates is not None
    dark, *_ = templates.get_source(exporter.environment, "static/theme-dark.css")
    # Lines break between words, and what has no "Out [n]" beside it stands in the same column as
    # what has.
    ours = ".jp-OutputArea-output pre{word-break:normal;overflow-wrap:anywhere}"
    ours += (
        ".jp-OutputArea-prompt:empty{padding:var(--jp-code-padding);border:1px solid transparent}"
    )
    styles = f"<style>{ours}@media (prefers-color-scheme: dark) {{{dark}}}</style>"
    body = body.replace("</head>", f"{styles}</head>", 1)

    body = re.sub(
        r'<img (?:alt="[^"]*" )?src="data:image/svg\+xml;base64,([^"]+)"', _described, body
    )

    def link(match: re.Match[str]) -> str:
        stem, words = match.groups()
        return (
            f'<a href="{stem}.html">{words}</a>' if stem in pages else f"{words} (not in this tour)"
        )

    return re.sub(r'<a href="(\d\d_\w+)\.ipynb">(.*?)</a>', link, body, flags=re.S)


def _described(match: re.Match[str]) -> str:
    """An ``<img>`` of an SVG with the SVG's own title and description as alternative text."""
    svg = base64.b64decode(match[1]).decode()
    words = [
        found[1]
        for tag in ("title", "desc")
        if (found := re.search(rf"<{tag}[^>]*>([^<]*)</{tag}>", svg))
    ]
    return f'<img alt="{": ".join(words)}" src="data:image/svg+xml;base64,{match[1]}"'


def _index(stops: list[Stop]) -> str:
    from minikv.report import examine

    report = examine()
    items = "".join(
        f'<li><a href="{html.escape(stop.page.name)}">{html.escape(stop.title)}</a>'
        + (f'<small class="bad">{html.escape(stop.error)}</small>' if stop.error else "")
        + f"<small>{stop.notebook.name}, {stop.seconds:.0f} s</small></li>"
        for stop in stops
    )
    count = "1 notebook" if len(stops) == 1 else f"{len(stops)} notebooks"
    summary = (
        f"{count}, run on {report.facts['device']}, tier {report.tier}, torch "
        f"{report.facts['torch']}."
    )
    return PAGE.format(summary=html.escape(summary), items=items)


def lab(arguments: list[str]) -> int:
    """Open JupyterLab in the notebooks folder; `arguments` go to ``jupyter lab``."""
    folder = notebooks_dir()
    return subprocess.call([sys.executable, "-m", "jupyterlab", *arguments], cwd=folder)
