"""JupyterLab on a copy of the notebooks, and headless Chromium to look at it, for the browser
tests."""

from __future__ import annotations

import json
import os
import secrets
import shutil
import socket
import subprocess
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import nbformat
import pytest

NOTEBOOKS = Path(__file__).resolve().parents[2] / "notebooks"
PROGRAMS = ("chromium", "chromium-browser", "google-chrome", "chrome")
FLAGS = [
    "--no-sandbox",
    "--disable-gpu",
    "--disable-quic",
    "--disable-dev-shm-usage",
    "--no-first-run",
]
FLAGS += ["--disable-background-networking", "--disable-component-update", "--disable-sync"]
SETTINGS = {
    "notification": {"fetchNews": "false", "checkForUpdates": False},
    "themes": {
        "adaptive-theme": True
    },  # follows the browser's prefers-color-scheme, so a test can switch it
}


@dataclass
class Lab:
    """A running JupyterLab server and the copy of the notebooks that it serves."""

    folder: Path
    port: int
    token: str
    log: Path

    def url(self, notebook: str) -> str:
        return f"http://127.0.0.1:{self.port}/lab/tree/{notebook}?token={self.token}&reset"

    def api(self, path: str, method: str = "GET") -> Any:
        """What the server's REST interface answers; asked again if a kernel ended while the server
        listed it (500)."""
        address = f"http://127.0.0.1:{self.port}/api/{path}"
        request = urllib.request.Request(
            address, method=method, headers={"Authorization": f"token {self.token}"}
        )
        for attempt in range(10):
            try:
                with urllib.request.urlopen(request, timeout=60) as answer:
                    return json.loads(answer.read() or "null")
            except urllib.error.HTTPError as e:
                if e.code != 500 or attempt == 9:
                    raise
                time.sleep(0.5)

    def end_kernels(self) -> None:
        for kernel in self.api("kernels"):
            self.api(f"kernels/{kernel['id']}", "DELETE")


@pytest.fixture(scope="module")
def lab(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Lab]:
    """JupyterLab on the notebooks without their outputs: what a test sees was made by the test's
    own run."""
    home = tmp_path_factory.mktemp("lab")
    folder = home / "notebooks"
    shutil.copytree(NOTEBOOKS, folder, ignore=shutil.ignore_patterns("*.ipynb", ".*"))
    for path in NOTEBOOKS.glob("[0-9][0-9]_*.ipynb"):
        book = nbformat.read(path, as_version=4)
        for cell in book.cells:
            if cell.cell_type == "code":
                cell.outputs, cell.execution_count = [], None
        nbformat.write(book, folder / path.name)
    # XDG_CACHE_HOME stays: the model's file is there.
    names = [
        "JUPYTER_CONFIG_DIR",
        "JUPYTER_DATA_DIR",
        "JUPYTER_RUNTIME_DIR",
        "JUPYTERLAB_SETTINGS_DIR",
    ]
    names += ["JUPYTERLAB_WORKSPACES_DIR", "IPYTHONDIR", "XDG_CONFIG_HOME", "XDG_DATA_HOME"]
    env = {
        **os.environ,
        "HF_HUB_OFFLINE": "1",
        **{name: str(home / name.lower()) for name in names},
    }
    settings = Path(env["JUPYTERLAB_SETTINGS_DIR"]) / "@jupyterlab" / "apputils-extension"
    settings.mkdir(parents=True)
    for name, values in SETTINGS.items():
        (settings / f"{name}.jupyterlab-settings").write_text(json.dumps(values))

    server, process = _start(home, folder, env)
    try:
        yield server
    finally:
        process.terminate()  # ends the kernels as well
        try:
            process.wait(30)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()


def _start(home: Path, folder: Path, env: dict[str, str]) -> tuple[Lab, subprocess.Popen]:
    """A server that answers; another port is tried when somebody took the first one meanwhile."""
    for attempt in range(3):
        with socket.socket() as probe:
            probe.bind(("127.0.0.1", 0))
            port = probe.getsockname()[1]
        server = Lab(folder, port, secrets.token_hex(16), home / f"server-{attempt}.log")
        command = [
            sys.executable,
            "-m",
            "jupyterlab",
            "--no-browser",
            "--allow-root",
            "--ip=127.0.0.1",
        ]
        command += [
            f"--port={port}",
            "--ServerApp.port_retries=0",
            f"--ServerApp.root_dir={folder}",
        ]
        command += [f"--IdentityProvider.token={server.token}"]
        with server.log.open("w") as log:
            process = subprocess.Popen(command, env=env, stdout=log, stderr=subprocess.STDOUT)
        until = time.monotonic() + 180
        while process.poll() is None and time.monotonic() < until:
            try:
                server.api("status")
                return server, process
            except OSError:
                time.sleep(0.2)
        process.kill()
        process.wait()
    raise AssertionError(f"JupyterLab did not start:\n{server.log.read_text()[-2000:]}")


@pytest.fixture(scope="module")
def browser() -> Iterator[Any]:
    """Headless Chromium, the one that is installed: nothing is downloaded."""
    api = pytest.importorskip(
        "playwright.sync_api", reason="install it: pip install -c constraints.txt -e '.[test]'"
    )
    program = next(filter(None, map(shutil.which, PROGRAMS)), None)
    if program is None:
        pytest.skip("no Chromium; install it: apt-get install chromium")
    with api.sync_playwright() as driver:
        chromium = driver.chromium.launch(executable_path=program, args=FLAGS, timeout=120_000)
        yield chromium
        chromium.close()


class Trouble(list):
    """What a page complains about: errors on its console, uncaught exceptions, requests that
    failed."""

    def watch(self, page: Any) -> None:
        page.on(
            "console", lambda said: said.type == "error" and self.append(f"console: {said.text}")
        )
        page.on("pageerror", lambda error: self.append(f"exception: {error}"))
        page.on("requestfailed", lambda request: self.append(f"failed: {request.url[:200]}"))


@pytest.fixture
def trouble() -> Trouble:
    return Trouble()


@pytest.fixture
def page(browser: Any, trouble: Trouble, tmp_path: Path) -> Iterator[Any]:
    """An empty tab of a browser with a profile of its own; what it showed last is kept beside the
    screenshots."""
    context = browser.new_context(viewport={"width": 1400, "height": 1000}, color_scheme="light")
    context.set_default_timeout(60_000)
    tab = context.new_page()
    trouble.watch(tab)
    yield tab
    tab.screenshot(path=tmp_path / "last.png")
    context.close()
