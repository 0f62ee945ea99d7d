"""Notebooks and tour pages in real Chromium: run all, step by keyboard, play, in light and dark.

Asserted are roles, labels, texts and contrast. Screenshots are left in pytest's folder for people
to look at.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import nbformat
import pytest

from minikv import tour

pytestmark = pytest.mark.timeout(900)
RUN = 300_000  # milliseconds that Run All may take on a busy machine
BEGUN = """() => [...document.querySelectorAll(".jp-CodeCell .jp-InputPrompt")]
    .some((p) => /\\[[*\\d]/.test(p.textContent))"""
FINISHED = """() => {
    if (document.querySelector('[data-mime-type="application/vnd.jupyter.error"]')) return "error";
    const prompts = [...document.querySelectorAll(".jp-CodeCell .jp-InputPrompt")]
        .map((p) => p.textContent);
    return prompts.length > 0 && prompts.every((p) => /\\[\\d+\\]/.test(p)) && prompts;
}"""
# The least contrast (WCAG: 1 to 21) between a text and what is behind it, among the words of a part
# of the page. Pictures have a test of their own; the colours of code are JupyterLab's.
CONTRAST = """(root) => {
    const rgb = (colour) => (colour.match(/[\\d.]+/g) || [0, 0, 0, 0]).map(Number);
    const light = (c) => {
        const curve = (v) => v <= .03928 ? v / 12.92 : ((v + .055) / 1.055) ** 2.4;
        return .2126 * curve(c[0] / 255) + .7152 * curve(c[1] / 255) + .0722 * curve(c[2] / 255);
    };
    const behind = (e) => {
        for (; e; e = e.parentElement) {
            const c = rgb(getComputedStyle(e).backgroundColor);
            if (c.length === 3 || c[3] > .5) return c;
        }
        return [255, 255, 255];
    };
    let least = [21, ""];
    for (const e of root.querySelectorAll("*")) {
        const own = [...e.childNodes].some((n) => n.nodeType === 3 && n.textContent.trim());
        const other = e.closest("svg, style, script, .highlight, .cm-editor, [aria-disabled=true]");
        if (!own || other || !e.getClientRects().length) continue;
        const [a, b] = [light(rgb(getComputedStyle(e).color)), light(behind(e))]
            .sort((x, y) => y - x);
        const ratio = (a + .05) / (b + .05);
        if (ratio < least[0]) least = [ratio, e.textContent.slice(0, 60)];
    }
    return least;
}"""


@pytest.fixture
def expect():
    from playwright.sync_api import expect

    expect.set_options(timeout=60_000)
    return expect


def _run_all(page: Any, lab: Any, name: str) -> None:
    """Open a notebook and run all its cells, as a reader does: by the menu."""
    lab.end_kernels()  # of a test that failed
    page.goto(lab.url(name), timeout=180_000)
    page.wait_for_selector(".jp-Notebook .jp-CodeCell", timeout=180_000)
    for _ in range(600):  # a click before the kernel is connected would be lost
        if any(k["execution_state"] == "idle" and k["connections"] for k in lab.api("kernels")):
            break
        page.wait_for_timeout(300)
    for _ in range(10):  # and on a busy machine a click may be lost all the same
        page.get_by_role("menuitem", name="Run", exact=True).click()
        page.get_by_role("menuitem", name="Run All Cells", exact=True).click()
        if _begun(page):
            break
        page.keyboard.press("Escape")
    prompts = page.wait_for_function(FINISHED, timeout=RUN).json_value()
    assert prompts != "error", page.locator(
        '[data-mime-type="application/vnd.jupyter.error"]'
    ).first.text_content()
    assert [int(p.strip("[]: ")) for p in prompts] == list(range(1, len(prompts) + 1))
    assert page.locator('[data-mime-type="application/vnd.jupyter.stderr"]').count() == 0
    pictures = page.locator(".jp-RenderedSVG img")
    assert pictures.count() >= 5
    broken = "(all) => all.filter((i) => !(i.complete && i.naturalWidth > 0)).length"
    assert pictures.evaluate_all(broken) == 0


def _begun(page: Any) -> bool:
    from playwright.sync_api import TimeoutError

    try:
        page.wait_for_function(BEGUN, timeout=15_000)
    except TimeoutError:
        return False
    return True


def _theme(page: Any, name: str) -> None:
    page.emulate_media(color_scheme=name)
    page.wait_for_function(
        "(light) => document.body.dataset.jpThemeLight === light", arg=str(name == "light").lower()
    )


def _legible(part: Any) -> None:
    ratio, words = part.evaluate(CONTRAST)
    assert ratio >= 3, f"{words!r} has a contrast of {ratio:.1f}"


def _part(page: Any, button: str) -> Any:
    """The output that holds a button of this name."""
    part = page.locator(
        ".jp-OutputArea-output", has=page.get_by_role("button", name=button, exact=True)
    ).first
    part.scroll_into_view_if_needed()
    return part


def _step_through(page: Any, expect: Any, part: Any) -> None:
    """Arrow keys, Home and End, on the buttons and on the slider: the number and the picture
    follow."""
    picture, status = part.get_by_role("img"), part.get_by_role("status")
    part.get_by_role("button", name="next frame").focus()
    page.keyboard.press("Home")
    expect(status).to_have_text(f"1 of {_frames(status)}")
    seen = [picture.text_content()]
    for number in range(2, _frames(status) + 1):
        page.keyboard.press("ArrowRight")
        expect(status).to_have_text(f"{number} of {_frames(status)}")
        expect(picture).to_have_count(1)  # the other frames are hidden from screen readers as well
        seen.append(picture.text_content())
    assert len(set(seen)) == len(seen)
    page.keyboard.press("ArrowLeft")
    expect(picture).to_have_text(seen[-2])
    page.keyboard.press("Home")
    expect(picture).to_have_text(seen[0])
    part.locator(".noUi-handle").focus()
    page.keyboard.press("ArrowRight")
    expect(picture).to_have_text(seen[1])
    expect(status).to_have_text(f"2 of {_frames(status)}")


def _frames(status: Any) -> int:
    return int(status.text_content().split(" of ")[1])


def test_start_here(page, lab, expect, trouble, tmp_path: Path) -> None:
    _run_all(page, lab, "00_start_here.ipynb")
    expect(page.locator(".jp-OutputArea-output", has_text="prompt tokens in all:")).to_be_attached()
    for theme in ("light", "dark"):
        _theme(page, theme)
        page.get_by_text("Answer", exact=True).first.scroll_into_view_if_needed()
        page.wait_for_timeout(1000)  # cells are painted as they come into view
        page.screenshot(path=tmp_path / f"{theme}.png")
        _legible(page.locator(".jp-Notebook"))
    # A folded answer opens by keyboard.
    fold = page.locator("details").first
    fold.locator("summary").focus()
    page.keyboard.press("Enter")
    expect(fold).to_have_attribute("open", "")
    lab.end_kernels()
    assert trouble == []


def test_the_player_steps_by_keyboard_and_without_a_kernel(
    page, lab, expect, trouble, tmp_path: Path
) -> None:
    _run_all(page, lab, "04_pages.ipynb")
    part = _part(page, "next frame")
    _step_through(page, expect, part)
    part.screenshot(path=tmp_path / "light.png")
    _legible(part)
    assert trouble == []
    lab.end_kernels()
    _theme(page, "dark")
    _step_through(page, expect, _part(page, "next frame"))
    part.screenshot(path=tmp_path / "dark.png")
    _legible(part)


def test_the_playground_follows_two_prompts(page, lab, expect, trouble, tmp_path: Path) -> None:
    _run_all(page, lab, "06_radix_tree.ipynb")
    _step_through(page, expect, _part(page, "next frame"))
    part = _part(page, "Evict one leaf")
    picture, prompt = part.get_by_role("img"), part.get_by_label("prompt")
    seen = [picture.text_content()]
    for theme, text, found in (
        (
            "light",
            "You are a kind helper. Why is snow white?",
            "8 of 11 tokens reused, 3 more stored",
        ),
        (
            "dark",
            "You are a kind helper. Why is snow cold?",
            "9 of 11 tokens reused, 2 more stored, a node was split",
        ),
    ):
        _theme(page, theme)
        prompt.fill(text)
        prompt.press("Enter")
        expect(picture).to_contain_text(f"11 tokens, {found[0]} of them cached")
        seen.append(picture.text_content())
        part.get_by_role("button", name="Run", exact=True).click()
        expect(picture).to_contain_text(found)
        expect(picture).to_contain_text(text.split()[-1].strip("?"))
        seen.append(picture.text_content())
        part.screenshot(path=tmp_path / f"{theme}.png")
        _legible(part)
    assert len(set(seen)) == 5

    tree = page.get_by_role("tree", name="prefix tree")
    tree.scroll_into_view_if_needed()
    tree.focus()
    for key in ("Home", "Enter"):
        page.keyboard.press(key)
    expect(page.get_by_label("chosen node")).to_contain_text("token ids")
    page.get_by_label("search the text of all nodes").fill("kind helper that nobody is")
    expect(tree.get_by_role("treeitem")).to_have_count(0)
    page.get_by_label("search the text of all nodes").fill("moon moon")
    expect(tree.get_by_role("treeitem").first).to_be_visible()
    inspector = page.locator(".jp-OutputArea-output", has=tree)
    inspector.screenshot(path=tmp_path / "inspector.png")
    _legible(inspector)
    lab.end_kernels()
    assert trouble == []


def test_tour_pages(page, trouble, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    # From the outputs that the notebooks are committed with: other tests run them.
    monkeypatch.setattr(tour, "run_notebook", lambda path, **_: nbformat.read(path, as_version=4))
    pages, requests = tmp_path / "pages", []
    tour.tour("00,04,06", pages)
    page.on("request", lambda request: requests.append(request.url))
    page.goto((pages / "index.html").as_uri())
    links = page.get_by_role("listitem").get_by_role("link")
    assert links.count() == len(list(pages.glob("[0-9]*.html"))) == 3
    _look(page, tmp_path)
    for name in links.evaluate_all("(all) => all.map((a) => a.getAttribute('href'))"):
        page.goto((pages / name).as_uri())
        assert page.get_by_role("heading", level=1).count() == 1
        pictures = page.get_by_role("img").evaluate_all(
            "(all) => all.map((i) => ({seen: i.complete && i.naturalWidth > 0, words: i.alt}))"
        )
        assert len(pictures) >= 3
        assert all(p["seen"] and len(p["words"]) > 10 for p in pictures), page.url
        for target in page.locator("a[href]").evaluate_all(
            "(all) => all.map((a) => a.getAttribute('href'))"
        ):
            if target.startswith("#"):
                assert page.locator(f"[id={target[1:]!r}]").count() == 1, f"{page.url}: {target}"
            elif not target.startswith("http"):
                assert (pages / target).is_file(), f"{page.url}: {target}"
        _look(page, tmp_path)
    assert [url for url in requests if not url.startswith(("file:", "data:"))] == []
    assert trouble == []


def _look(page: Any, folder: Path) -> None:
    """Both colour schemes: the page is light or dark as the reader's system is, and its words can
    be read."""
    for scheme in ("light", "dark"):
        page.emulate_media(color_scheme=scheme)
        red = page.locator("body").evaluate(
            "(body) => Number(getComputedStyle(body).backgroundColor.match(/\\d+/)[0])"
        )
        assert (red > 200) == (scheme == "light"), page.url
        _legible(page.locator("body"))
        page.screenshot(path=folder / f"{Path(page.url).stem}-{scheme}.png")


def test_requests_are_put_into_another_order(page, lab, expect, trouble, tmp_path: Path) -> None:
    _run_all(page, lab, "08_batches.ipynb")
    part = page.locator(
        ".jp-OutputArea-output", has=page.get_by_role("button", name="A, place 1 of 6")
    )
    part.scroll_into_view_if_needed()
    picture = part.get_by_role("img")
    expect(picture).to_contain_text("In the order A B D E C F")
    part.get_by_role("button", name="C, place 5").focus()
    for order in ("A B D C E F", "A B C D E F"):
        page.keyboard.press("ArrowLeft")  # the letter keeps the focus while it moves
        expect(picture).to_contain_text(f"In the order {order}")
    expect(picture).to_contain_text("46 of 78 tokens computed")
    part.screenshot(path=tmp_path / "light.png")
    _legible(part)
    _theme(page, "dark")
    part.get_by_role("button", name="D, place 4").drag_to(
        part.get_by_role("button", name="B, place 2")
    )
    expect(picture).to_contain_text("In the order A D B C E F")
    part.screenshot(path=tmp_path / "dark.png")
    _legible(part)
    lab.end_kernels()
    assert trouble == []
