"""The radix playground: type prompts, see what matches, splits and is shared; with a pool limit,
what is evicted."""

from __future__ import annotations

from typing import Any

import ipywidgets
import torch

from minikv.errors import ArgumentError, StateError
from minikv.memory import PagedAllocator
from minikv.prefix import RadixCache
from minikv.viz import pages as page_map
from minikv.viz import style, tree, tree_frames
from minikv.viz.player import Player
from minikv.viz.style import Drawing, many
from minikv.viz.widgets import Box, Live

TITLE = "Radix playground"


class Words:
    """A tokenizer for trying things out: every new word gets the next number."""

    def __init__(self) -> None:
        self.words: list[str] = []

    def encode(self, text: str) -> list[int]:
        for word in text.split():
            if word not in self.words:
                self.words.append(word)
        return [self.words.index(word) for word in text.split()]

    def decode(self, ids: Any) -> str:
        return " ".join(self.words[i] for i in ids)


class Playground:
    """A radix cache to play with.

    Every prompt that is run is matched and inserted; the picture shows reused tokens hatched and
    new ones solid. All that the buttons do can be called: ``run``, ``preview``, ``evict_one``,
    ``finish``, ``reset``.

    Parameters
    ----------
    tokenizer
        Anything with ``encode`` and ``decode``, such as ``llm.tokenizer``; by default every word is
        a token.
    page_size
        Tokens per page.
    pages
        Size of the pool. With it pages are really allocated, a full pool evicts, and the page map
        is drawn as well.
    eviction
        Policy of the cache.
    prompts
        Run at the start.

    Attributes
    ----------
    cache, allocator
        The live objects (`allocator` None without `pages`).
    drawing
        The present picture; `log` says in a line what each run did.
    widget
        Prompt, buttons and picture.
    """

    def __init__(
        self,
        tokenizer: Any = None,
        *,
        page_size: int = 4,
        pages: int | None = None,
        eviction: str = "lru",
        prompts: Any = (),
    ) -> None:
        self.tokenizer = tokenizer or Words()
        self._make = (page_size, pages, eviction)
        self.prompt = ipywidgets.Text(
            description="prompt", continuous_update=False, layout=ipywidgets.Layout(width="560px"),
            placeholder="type a prompt: Enter shows its match, Run caches it",
        )  # fmt: skip
        self.hold = ipywidgets.Checkbox(description="keep it running (locked)", indent=False)
        self.buttons = {
            name: ipywidgets.Button(
                description=text, tooltip=tip, layout=ipywidgets.Layout(width="auto")
            )
            for name, text, tip in (
                ("run", "Run", "match the prompt, then insert it"),
                ("evict", "Evict one leaf", "free the leaf that the policy chooses"),
                ("finish", "Finish oldest", "unlock the request that runs longest"),
                ("reset", "Reset", "an empty tree"),
            )
        }
        self.reset()
        self._live = Live(self._draw, text=self.prompt)
        for name, action in (
            ("run", lambda: self.run(self.prompt.value, hold=self.hold.value)),
            ("evict", self.evict_one),
            ("finish", self.finish),
            ("reset", self.reset),
        ):
            self.buttons[name].on_click(self._safely(action))
        for prompt in prompts:
            self.run(prompt)
        self.static = self.drawing
        row = ipywidgets.HBox(
            [*self.buttons.values(), self.hold], layout=ipywidgets.Layout(flex_flow="row wrap")
        )
        parts = [self.prompt, row, self._live.errors, self._live.picture]
        self.widget = Box(parts, "type prompts and watch this tree change")

    @property
    def errors(self) -> Any:
        """The Output that shows the last error."""
        return self._live.errors

    def reset(self) -> Drawing:
        """Start again with an empty tree."""
        page_size, pages, eviction = self._make
        self.allocator = (
            PagedAllocator(pages * page_size, page_size, device="cpu") if pages else None
        )
        self.cache = RadixCache(page_size, self.allocator, eviction=eviction)
        self.running: dict[str, Any] = {}
        self.log: list[str] = []
        self.count = 0
        self._recorder: Any = None
        return self._show(self._tree(note="empty tree"))

    def preview(self, text: str) -> Drawing:
        """What `text` would find; nothing is counted, split or stored."""
        tokens = self.tokenizer.encode(text)
        node, length = self.cache.peek(tokens)
        note = (
            f"{many(len(tokens), 'token')}, {length} of them cached" if tokens else "type a prompt"
        )
        who = style.letter(self.count)
        return self._show(self._tree(reused=_path(node), reused_tokens=length, who=who, note=note))

    def run(self, text: str, *, hold: bool = False) -> Drawing:
        """Match `text` and insert it as the next request; with `hold` it keeps its lock.

        Raises
        ------
        ArgumentError
            When the text has no token.
        StateError
            When the pool cannot hold it, even after evicting all that is not locked.
        """
        tokens = self.tokenizer.encode(text)
        if not tokens:
            raise ArgumentError("text", text, "has no token; type at least one word")
        who, splits = style.letter(self.count), self.cache.stats.splits
        with self.cache.record() as self._recorder:
            match = self.cache.match_prefix(tokens)
            evicted = self._insert(tokens, match)
            node = self.cache.peek(tokens)[0]
            if hold:
                self.cache.lock(node)
                self.running[who] = node
        self.count += 1
        page_size, whole = (
            self.cache.page_size,
            len(tokens) // self.cache.page_size * self.cache.page_size,
        )
        note = (
            f"{who}: {match.length} of {many(len(tokens), 'token')} reused, {whole - match.length} "
            "more stored"
        )
        note += (
            f", {len(tokens) - whole} do not fill a page of {page_size}"
            if whole < len(tokens)
            else ""
        )
        note += ", a node was split" if self.cache.stats.splits > splits else ""
        note += f", {many(evicted, 'token')} evicted" if evicted else ""
        self.log.append(note)
        path = _path(node)
        fresh = path[-1:] if whole > match.length else []
        return self._show(
            self._tree(reused=path[: len(path) - len(fresh)], computed=fresh, who=who, note=note)
        )

    def _insert(self, tokens: Any, match: Any) -> int:
        """Store the tokens; with a pool, take pages for the new ones first. Returns how many were
        evicted."""
        need = len(tokens) // self.cache.page_size * self.cache.page_size - match.length
        if self.allocator is None:
            self.cache.insert(tokens)
            return 0
        self.cache.lock(match.node)
        try:
            size, free = self.allocator.page_size, self.allocator.available_size()
            if need > free + self.cache.evictable_size:
                can = (
                    f"{free // size} are free and {self.cache.evictable_size // size} can be "
                    "evicted"
                )
                raise StateError(
                    f"the prompt needs {need // size} new pages; of the pool's "
                    f"{self.allocator.num_pages}, {can}: "
                    "finish a request, shorten the prompt or make the pool larger"
                )
            evicted = self.cache.evict(need - free) if need > free else 0
            slots = self.allocator.alloc(need)
            assert slots is not None
            self.cache.insert(tokens, torch.cat([match.slots, slots]))
        finally:
            self.cache.unlock(match.node)
        return evicted

    def evict_one(self) -> Drawing:
        """Evict the leaf that the policy chooses, and show it struck through.

        Raises
        ------
        StateError
            When every leaf is locked, or the tree is empty.
        """
        with self.cache.record() as self._recorder:
            if not self.cache.evict(1):
                raise StateError(
                    "nothing can be evicted: the tree is empty, or all of it is locked; finish a "
                    "request"
                )
        drawing = tree_frames.frames(
            self._recorder, kinds=["evict"], decode=self.tokenizer, title=TITLE
        )[-1]
        return self._show(drawing)

    def finish(self, who: str | None = None) -> Drawing:
        """Unlock a running request: the oldest, or the one with this letter."""
        if not self.running:
            raise StateError("no request is running; run one with 'keep it running'")
        who = who or next(iter(self.running))
        self.cache.unlock(self.running.pop(who))
        return self._show(self._tree(note=f"{who} has finished; its pages stay cached"))

    def steps(self) -> Player:
        """The last run or eviction, event by event."""
        if self._recorder is None:
            raise StateError("nothing has been run yet")
        who = style.letter(max(self.count - 1, 0))
        return Player(
            tree_frames.frames(self._recorder, who=lambda event: who, decode=self.tokenizer)
        )

    def _tree(self, **options: Any) -> Drawing:
        running = {who: _Running(node) for who, node in self.running.items()}
        return tree.draw(
            self.cache, decode=self.tokenizer, requests=running, title=TITLE, **options
        )

    def _draw(self, text: str) -> Drawing:
        return self.preview(text)

    def _show(self, drawing: Drawing) -> Drawing:
        self.drawing = drawing
        if hasattr(self, "_live"):
            self._live.show(drawing)  # also takes the last error away
            if self.allocator is not None:
                pages = page_map.draw(self.allocator, cache=self.cache, decode=self.tokenizer)
                self._live.picture.value = drawing.svg + pages.svg
        return drawing

    def _safely(self, action: Any) -> Any:
        def clicked(button: Any) -> None:
            try:
                action()
            except Exception as e:
                self._live.fail(e)

        return clicked

    def __repr__(self) -> str:
        return f"{self.drawing}"

    def _ipython_display_(self, **_: Any) -> None:
        from IPython.display import display

        display(self.static)
        display(self.widget)


class _Running:
    """A request that holds a node, as the tree picture reads it."""

    token_ids, computed, row = (), 0, None

    def __init__(self, node: Any) -> None:
        self.node = node


def _path(node: Any) -> list[Any]:
    """Nodes from the top to `node`, the root left out."""
    path = []
    while node is not None and len(node.key):
        path.append(node)
        node = node.parent
    return path[::-1]
