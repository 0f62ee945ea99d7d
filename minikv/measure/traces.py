"""Workloads that share prefixes, made from a seed, and how many of their tokens any cache could
have found.

A trace is a list of requests in order of arrival. Its tokens are numbers of words in :data:`WORDS`,
which every model with a vocabulary of 512 or more takes as they are; `text` spells them, and the
text of a shared beginning is a shared beginning of the texts. The four workloads are those of the
RadixAttention paper (Zheng et al. 2024).
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from heapq import heappop, heappush
from typing import Any

import numpy as np

from minikv.errors import ArgumentError

_KINDS = {
    "adjective": "old new small large red blue green warm cold quiet loud early late happy tired "
    "clever simple dark light round long short soft heavy empty full young gentle brave "
    "slow quick clean famous distant narrow deep rich",
    "noun": "house river mountain garden teacher doctor farmer city village street table window "
    "letter book story song horse dog bird fish tree forest field road bridge ship train "
    "market school kitchen winter summer morning evening child friend neighbour king "
    "sailor painter baker clock lamp coat bread apple stone cloud island harbour tower",
    "verb": "sees finds follows carries opens closes paints builds remembers forgets visits "
    "leaves watches sells buys calls helps meets hides moves draws keeps crosses reaches",
}
MARKS = (
    "System:",
    "Example:",
    "Document:",
    "User:",
    "Assistant:",
    "Question:",
    "Answer:",
    "Problem:",
    "Thought:",
)
WORDS: tuple[str, ...] = (
    *MARKS,
    "the",
    ".",
    *(word for words in _KINDS.values() for word in words.split()),
)
"""What the token ids of a trace stand for."""

_NUMBER = {word: number for number, word in enumerate(WORDS)}
_SENTENCE = ("the", "adjective", "noun", "verb", "the", "adjective", "noun", ".")
_CHOICES = [np.array([_NUMBER[w] for w in _KINDS.get(kind, kind).split()]) for kind in _SENTENCE]
Pieces = list[np.ndarray]


@dataclass(frozen=True, eq=False)
class TraceRequest:
    """One request of a trace.

    Attributes
    ----------
    token_ids
        The prompt, int64 `[n]`, numbers of words in :data:`WORDS`.
    max_tokens
        Tokens to generate for it.
    group
        Number of the task, conversation, problem or first document: requests of one group share
        most.
    """

    token_ids: np.ndarray
    max_tokens: int
    group: int

    @property
    def text(self) -> str:
        """The prompt as text."""
        return spell(self.token_ids)


def spell(token_ids: Iterable[int]) -> str:
    """Words of a trace as text; what a model makes up beyond them is shown as a number.

    Examples
    --------
    >>> [request, *_] = few_shot(
    ...     seed=0, tasks=1, shots=0, questions=1, task_words=8, question_words=9
    ... )
    >>> print(request.text)
    System: the clean morning watches the quiet song.
    Question: the new house moves the distant winter. the
    Answer:
    """
    words = [WORDS[i] if 0 <= i < len(WORDS) else f"#{i}" for i in map(int, token_ids)]
    return "".join("\n" + w if w in MARKS else w if w == "." else " " + w for w in words).lstrip()


def few_shot(
    seed: int = 0,
    *,
    tasks: int = 4,
    shots: int = 8,
    questions: int = 32,
    task_words: int = 64,
    shot_words: int = 96,
    question_words: int = 32,
    max_tokens: int = 16,
) -> list[TraceRequest]:
    """Each task has an instruction and `shots` examples, and is asked `questions` questions; tasks
    mixed at random.

    A prompt has ``1 + task_words + shots * (2 + shot_words) + 2 + question_words`` tokens, and all
    but the last ``2 + question_words`` (its question) it shares with its whole task; there are
    ``tasks * questions`` requests.
    """
    rng = np.random.default_rng(seed)
    heads = [
        [
            *_part(rng, "System:", task_words),
            *(p for _ in range(shots) for p in _example(rng, shot_words)),
        ]
        for _ in range(tasks)
    ]
    order = rng.permutation(np.repeat(np.arange(tasks), questions))
    return [
        _request(
            [*heads[task], *_part(rng, "Question:", question_words, "Answer:")], max_tokens, task
        )
        for task in order
    ]


def multi_turn_chat(
    seed: int = 0,
    *,
    systems: int = 2,
    chats: int = 16,
    turns: int = 5,
    system_words: int = 128,
    user_words: tuple[int, int] = (8, 48),
    reply_words: tuple[int, int] = (16, 96),
) -> list[TraceRequest]:
    """Conversations below a few system prompts; whose turn comes next is drawn at random.

    The prompt of a turn is the system prompt, all earlier turns with their replies, and the new
    question. A reply is part of the trace (a model's own would differ from run to run), its length
    is the turn's `max_tokens`. Lengths are drawn from the ranges, both ends included; there are
    ``chats * turns`` requests, `group` is the conversation.
    """
    rng = np.random.default_rng(seed)
    openings = [_part(rng, "System:", system_words) for _ in range(systems)]
    talks = [list(openings[chat % systems]) for chat in range(chats)]
    trace = []
    for chat in rng.permutation(np.repeat(np.arange(chats), turns)):
        asked, told = (int(rng.integers(low, high + 1)) for low, high in (user_words, reply_words))
        talks[chat] += _part(rng, "User:", asked, "Assistant:")
        trace.append(_request(talks[chat], told, chat))
        talks[chat].append(_sentences(rng, told))
    return trace


def tree_of_thought(
    seed: int = 0,
    *,
    problems: int = 4,
    branching: int = 3,
    depth: int = 3,
    problem_words: int = 128,
    thought_words: int = 48,
) -> list[TraceRequest]:
    """Each thought is continued in `branching` ways, `depth` levels deep; level by level, problems
    in turn.

    Every request generates one thought from the problem and the thoughts above it, so the
    `branching` continuations of a thought have equal prompts. On level d (from 0) of a problem
    there are ``branching ** (d + 1)`` requests, of ``1 + problem_words + d * (1 + thought_words) +
    1`` tokens.
    """
    rng = np.random.default_rng(seed)
    levels = [
        [_part(rng, "Problem:", problem_words)] for _ in range(problems)
    ]  # of each problem: paths to this level
    trace = []
    for _ in range(depth):
        for problem, paths in enumerate(levels):
            asked = [path for path in paths for _ in range(branching)]
            trace += [
                _request([*path, _mark("Thought:")], thought_words, problem) for path in asked
            ]
            levels[problem] = [[*path, *_part(rng, "Thought:", thought_words)] for path in asked]
    return trace


def rag(
    seed: int = 0,
    *,
    documents: int = 32,
    per_question: int = 2,
    questions: int = 128,
    task_words: int = 32,
    document_words: int = 256,
    question_words: int = 32,
    max_tokens: int = 32,
) -> list[TraceRequest]:
    """Questions over shared documents: an instruction, `per_question` documents as retrieved, then
    the question.

    How often a document is retrieved falls with its number k as 1 / (k + 1). Two prompts share the
    instruction and the documents up to the first in which they differ; `group` is the first
    document.
    """
    if per_question > documents:
        raise ArgumentError(
            "per_question", per_question, f"must be at most the {documents} documents"
        )
    rng = np.random.default_rng(seed)
    task = _part(rng, "System:", task_words)
    shelf = [_part(rng, "Document:", document_words) for _ in range(documents)]
    weight = 1 / np.arange(1, documents + 1)
    trace = []
    for _ in range(questions):
        found = rng.choice(documents, per_question, replace=False, p=weight / weight.sum())
        pieces = [*task, *(piece for i in found for piece in shelf[i])]
        trace.append(
            _request(
                [*pieces, *_part(rng, "Question:", question_words, "Answer:")], max_tokens, found[0]
            )
        )
    return trace


WORKLOADS: dict[str, Callable[..., list[TraceRequest]]] = {
    "few-shot": few_shot, "chat": multi_turn_chat, "tree-of-thought": tree_of_thought, "rag": rag
}  # fmt: skip
"""The generators by name."""


# ---- what could be found


def optimal_hits(
    prompts: Sequence[Any],
    page_size: int,
    num_pages: int | None = None,
    *,
    spare_last: bool = False,
) -> list[int]:
    """How many tokens of each prompt the best possible prefix cache finds, for prompts that run one
    after another.

    Without `num_pages` nothing is ever given away: a prompt finds its longest common beginning with
    any earlier one, rounded down to pages. With it, the pages of the prompt that runs must be in
    the pool, and when room is needed the page goes whose next use lies farthest ahead (Belady
    1966), of equal ones the deepest. A page is never used again before the one above it, so that is
    always the end of a branch, and a tree can follow the rule. (With `spare_last` one page above
    may be of no use meanwhile, so the number is a bound that a tree need not reach.)

    Parameters
    ----------
    prompts
        Token ids, int64 `[n]` each, in order of arrival.
    page_size, num_pages
        Tokens per page, and pages in the pool (None: without end).
    spare_last
        Look up all but the last token of each prompt, as a scheduler does because it needs logits.

    Returns
    -------
    list of int
        Tokens found, one number per prompt. Their sum over the sum of lengths is the optimal hit
        rate.

    Raises
    ------
    ArgumentError
        For a prompt with more whole pages than `num_pages`.

    Examples
    --------
    >>> optimal_hits([[1, 2, 3, 4], [1, 2, 3, 9], [1, 2, 3, 4]], page_size=2)
    [0, 2, 4]
    >>> optimal_hits([[1, 2, 3, 4], [1, 2, 3, 9], [1, 2, 3, 4]], page_size=2, num_pages=2)
    [0, 2, 2]
    """
    chains = _page_numbers(prompts, page_size)
    most = max(map(len, chains), default=0)
    if num_pages is not None and most > num_pages:
        raise ArgumentError(
            "num_pages", num_pages, f"is less than the {most} pages of the longest prompt"
        )
    seen = [
        chain[: (len(prompt) - spare_last) // page_size]
        for chain, prompt in zip(chains, prompts, strict=True)
    ]  # what each looks up
    next_use: dict[int, int] = {}
    next_uses = []
    for time in range(len(chains) - 1, -1, -1):
        next_uses.append([next_use.get(page, len(chains)) for page in chains[time]])
        next_use.update(
            dict.fromkeys(chains[time], len(chains))
        )  # computed anew there, so not worth keeping for it
        next_use.update(dict.fromkeys(seen[time], time))
    held: dict[int, tuple[int, int, int]] = {}  # page -> its one valid entry in the heap
    heap: list[tuple[int, int, int]] = []  # the page to give away first
    hits = []
    for chain, looked, ahead in zip(chains, seen, reversed(next_uses), strict=True):
        hits.append(
            page_size * next((i for i, page in enumerate(looked) if page not in held), len(looked))
        )
        for depth, (page, use) in enumerate(zip(chain, ahead, strict=True)):
            held[page] = (-use, -depth, page)
            heappush(heap, held[page])
        own, kept = set(chain), []
        while num_pages is not None and len(held) > num_pages:
            entry = heappop(heap)
            if held.get(entry[2]) != entry:
                continue  # used again since
            if entry[2] in own:
                kept.append(entry)
            else:
                del held[entry[2]]
        for entry in kept:
            heappush(heap, entry)
    return hits


def _page_numbers(prompts: Sequence[Any], page_size: int) -> list[list[int]]:
    """Each prompt as numbers of its whole pages; one number stands for a page and all pages before
    it."""
    known: dict[tuple[int, bytes], int] = {}
    chains = []
    for prompt in prompts:
        tokens, chain, at = np.asarray(prompt, np.int64), [], -1
        for end in range(page_size, tokens.size + 1, page_size):
            at = known.setdefault((at, tokens[end - page_size : end].tobytes()), len(known))
            chain.append(at)
        chains.append(chain)
    return chains


# ---- words


def _request(pieces: Pieces, max_tokens: int, group: Any) -> TraceRequest:
    return TraceRequest(np.concatenate(pieces), max_tokens, int(group))


def _mark(mark: str) -> np.ndarray:
    return np.array([_NUMBER[mark]], np.int64)


def _part(rng: np.random.Generator, mark: str, words: int, then: str | None = None) -> Pieces:
    return [_mark(mark), _sentences(rng, words), *([_mark(then)] if then else [])]


def _example(rng: np.random.Generator, words: int) -> Pieces:
    """A question and its answer, 2 + `words` tokens."""
    answer = words // 4
    return [*_part(rng, "Example:", words - answer), *_part(rng, "Answer:", answer)]


def _sentences(rng: np.random.Generator, words: int) -> np.ndarray:
    """`words` words and full stops, int64; the last sentence may be cut."""
    rows = -(-words // len(_SENTENCE))
    return np.stack(
        [choices[rng.integers(0, choices.size, rows)] for choices in _CHOICES], 1
    ).reshape(-1)[:words]
