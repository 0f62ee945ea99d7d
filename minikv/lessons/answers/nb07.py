"""Notebook 07: solutions and known wrong answers."""

from __future__ import annotations

from minikv.lessons.engine import Mistake


def _agree(key, tokens):
    n = 0
    while n < min(len(key), len(tokens)) and key[n] == tokens[n]:
        n += 1
    return n


def matched_tokens(key, tokens, page_size):
    return _agree(key, tokens) // page_size * page_size


def _no_floor(key, tokens, page_size):
    return _agree(key, tokens)


def _round_up(key, tokens, page_size):
    return -(-_agree(key, tokens) // page_size) * page_size


def _counts_all_equal(key, tokens, page_size):
    return sum(a == b for a, b in zip(key, tokens, strict=False)) // page_size * page_size


def _first_token_of_page(key, tokens, page_size):
    n = 0
    while n + page_size <= min(len(key), len(tokens)) and key[n] == tokens[n]:
        n += page_size
    return n


def plan_prefill(tokens, cached, page_size):
    best = max((matched_tokens(row, tokens[:-1], page_size) for row in cached), default=0)
    return best, len(tokens) - best


def _plan_whole_prompt(tokens, cached, page_size):
    best = max((matched_tokens(row, tokens, page_size) for row in cached), default=0)
    return best, len(tokens) - best


def _plan_one_token_left(tokens, cached, page_size):
    best = max((matched_tokens(row, tokens, page_size) for row in cached), default=0)
    best = min(best, len(tokens) - 1)
    return best, len(tokens) - best


def _plan_first_row(tokens, cached, page_size):
    best = matched_tokens(cached[0], tokens[:-1], page_size) if cached else 0
    return best, len(tokens) - best


def _evict(nodes, num_tokens, leaves_only=True, locks=True, oldest=True, again=True, exact=False):
    left, gone, freed = list(nodes), [], 0
    parents = {n["parent"] for n in left}
    while freed < num_tokens:
        if again:
            parents = {n["parent"] for n in left}
        free = [
            n
            for n in left
            if (not leaves_only or n["name"] not in parents) and (not locks or n["locks"] == 0)
        ]
        if exact:
            free = [n for n in free if freed + n["tokens"] <= num_tokens]
        if not free:
            break
        chosen = sorted(free, key=lambda n: n["last_use"])[0 if oldest else -1]
        left.remove(chosen)
        gone.append(chosen["name"])
        freed += chosen["tokens"]
    return gone


def evict(nodes, num_tokens):
    return _evict(nodes, num_tokens)


def _evict_any_node(nodes, num_tokens):
    return _evict(nodes, num_tokens, leaves_only=False)


def _evict_locked(nodes, num_tokens):
    return _evict(nodes, num_tokens, locks=False)


def _evict_newest(nodes, num_tokens):
    return _evict(nodes, num_tokens, oldest=False)


def _evict_first_leaves(nodes, num_tokens):
    return _evict(nodes, num_tokens, again=False)


def _evict_not_more(nodes, num_tokens):
    return _evict(nodes, num_tokens, exact=True)


def adopt(row, tree, protected):
    pairs = list(zip(row, tree, strict=False))
    return [own for own, theirs in pairs[protected:] if own != theirs], [*tree, *row[len(tree) :]]


def _adopt_keeps_row(row, tree, protected):
    return adopt(row, tree, protected)[0], list(row)


def _adopt_frees_nothing(row, tree, protected):
    return [], [*tree, *row[len(tree) :]]


def _adopt_frees_all_pages(row, tree, protected):
    return row[protected : len(tree)], [*tree, *row[len(tree) :]]


def _adopt_frees_borrowed(row, tree, protected):
    return adopt(row, tree, 0)


def _adopt_drops_tail(row, tree, protected):
    return [*adopt(row, tree, protected)[0], *row[len(tree) :]], list(tree)


SOLUTIONS = {
    "07-page-floor": matched_tokens,
    "07-fully-cached": plan_prefill,
    "07-evict-leaves": evict,
    "07-duplicate-insert": adopt,
}
MISTAKES = {
    "07-page-floor": [
        Mistake(
            "a page that agrees only in part counts; only whole pages can be shared", _no_floor
        ),
        Mistake("the last page is rounded up although it agrees only in part", _round_up),
        Mistake("tokens behind the first difference are counted", _counts_all_equal),
        Mistake("only the first token of each page is compared", _first_token_of_page),
    ],
    "07-fully-cached": [
        Mistake(
            "a fully cached prompt leaves nothing to run, so there are no logits",
            _plan_whole_prompt,
        ),
        Mistake(
            "one token is left, but the cached part then ends inside a page; look up tokens[:-1] instead",
            _plan_one_token_left,
        ),
        Mistake("only the first cached sequence is looked at", _plan_first_row),
    ],
    "07-evict-leaves": [
        Mistake("a node with children goes; they would hang in the air", _evict_any_node),
        Mistake("a locked node goes while a request still reads it", _evict_locked),
        Mistake("the most recently used leaf goes first; the oldest should", _evict_newest),
        Mistake(
            "a parent that loses its last child becomes a leaf and may go too", _evict_first_leaves
        ),
        Mistake(
            "it stops short; at least num_tokens must be freed, a leaf goes whole", _evict_not_more
        ),
    ],
    "07-duplicate-insert": [
        Mistake(
            "the row still points at freed slots, which others will soon overwrite",
            _adopt_keeps_row,
        ),
        Mistake("the duplicates are never freed, so memory leaks", _adopt_frees_nothing),
        Mistake(
            "slots that the tree took over are freed; it owns them now", _adopt_frees_all_pages
        ),
        Mistake(
            "borrowed slots are freed; only the request's own copies may go", _adopt_frees_borrowed
        ),
        Mistake(
            "the tail that fills no page is lost; it stays the request's own", _adopt_drops_tail
        ),
    ],
}
