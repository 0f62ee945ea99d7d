"""Notebook 06: solutions and known wrong answers."""

from __future__ import annotations

from minikv.lessons.engine import Mistake


def _agree(key, tokens):
    n = 0
    while n < len(key) and n < len(tokens) and key[n] == tokens[n]:
        n += 1
    return n


def match_prefix(root, tokens):
    node, found = root, []
    while tokens and tokens[0] in node["children"]:
        child = node["children"][tokens[0]]
        n = _agree(child["key"], tokens)
        found += child["slots"][:n]
        if n < len(child["key"]):
            break
        node, tokens = child, tokens[n:]
    return found


def _match_whole_nodes(root, tokens):
    node, found = root, []
    while tokens and tokens[0] in node["children"]:
        child = node["children"][tokens[0]]
        n = _agree(child["key"], tokens)
        if n < len(child["key"]):
            break
        found += child["slots"]
        node, tokens = child, tokens[n:]
    return found


def _match_first_token_only(root, tokens):
    node, found = root, []
    while tokens and tokens[0] in node["children"]:
        node = node["children"][tokens[0]]
        found += node["slots"]
        tokens = tokens[len(node["key"]) :]
    return found


def _match_stops_at_first_node(root, tokens):
    if not tokens or tokens[0] not in root["children"]:
        return []
    child = root["children"][tokens[0]]
    return child["slots"][: _agree(child["key"], tokens)]


def _match_runs_on(root, tokens):
    node, found = root, []
    while tokens and tokens[0] in node["children"]:
        node = node["children"][tokens[0]]
        n = _agree(node["key"], tokens)
        found += node["slots"][:n]
        tokens = tokens[n:]
    return found


def _split(parent, child, n):
    key, slots = child["key"], child["slots"]
    upper = {"key": key[:n], "slots": slots[:n], "children": {key[n]: child}}
    parent["children"][key[0]] = upper
    child["key"], child["slots"] = key[n:], slots[n:]
    return upper


def insert(root, tokens, slots):
    node, present = root, 0
    while present < len(tokens) and tokens[present] in node["children"]:
        child = node["children"][tokens[present]]
        n = _agree(child["key"], tokens[present:])
        if n < len(child["key"]):
            child = _split(node, child, n)
        node, present = child, present + n
    if present < len(tokens):
        node["children"][tokens[present]] = {
            "key": tokens[present:],
            "slots": slots[present:],
            "children": {},
        }
    return present


def _insert_without_split(root, tokens, slots):
    node, present = root, 0
    while present < len(tokens) and tokens[present] in node["children"]:
        child = node["children"][tokens[present]]
        n = _agree(child["key"], tokens[present:])
        node, present = child, present + n
        if n < len(child["key"]):
            break
    if present < len(tokens):
        node["children"][tokens[present]] = {
            "key": tokens[present:],
            "slots": slots[present:],
            "children": {},
        }
    return present


def _insert_replaces_slots(root, tokens, slots):
    present = insert(root, tokens, slots)
    node, done = root, 0
    while done < len(tokens):
        node = node["children"][tokens[done]]
        node["slots"] = slots[done : done + len(node["key"])]
        done += len(node["key"])
    return present


def _insert_loses_children(root, tokens, slots):
    node, present = root, 0
    while present < len(tokens) and tokens[present] in node["children"]:
        child = node["children"][tokens[present]]
        n = _agree(child["key"], tokens[present:])
        if n < len(child["key"]):
            key, old = child["key"], child["slots"]
            lower = {"key": key[n:], "slots": old[n:], "children": {}}
            child["key"], child["slots"] = key[:n], old[:n]
            child["children"] = {**child["children"], key[n]: lower}
        node, present = child, present + n
    if present < len(tokens):
        node["children"][tokens[present]] = {
            "key": tokens[present:],
            "slots": slots[present:],
            "children": {},
        }
    return present


def _insert_returns_new(root, tokens, slots):
    return len(tokens) - insert(root, tokens, slots)


def second_hit(length, page_size, same_namespace, cached_before):
    if not same_namespace:
        return 0, "namespace"
    if not cached_before:
        return 0, "too early"
    hit = (length - 1) // page_size * page_size
    return hit, "hit" if hit else "too short"


def _hit_without_floor(length, page_size, same_namespace, cached_before):
    _, reason = second_hit(length, page_size, same_namespace, cached_before)
    return (length - 1 if reason in ("hit", "too short") else 0), reason


def _hit_whole_prompt(length, page_size, same_namespace, cached_before):
    hit, reason = second_hit(length + 1, page_size, same_namespace, cached_before)
    return hit, reason


def _hit_any_namespace(length, page_size, same_namespace, cached_before):
    return second_hit(length, page_size, True, cached_before)


def _hit_rounds_up(length, page_size, same_namespace, cached_before):
    _, reason = second_hit(length, page_size, same_namespace, cached_before)
    return (
        -(-(length - 1) // page_size) * page_size if reason in ("hit", "too short") else 0
    ), reason


SOLUTIONS = {"06-match-prefix": match_prefix, "06-insert-split": insert, "06-why-zero": second_hit}
MISTAKES = {
    "06-match-prefix": [
        Mistake("a match may end inside a node; its first tokens count", _match_whole_nodes),
        Mistake(
            "only the first token of a node's key is compared, not the whole key",
            _match_first_token_only,
        ),
        Mistake(
            "the walk stops at the first node; go on with its children", _match_stops_at_first_node
        ),
        Mistake(
            "after a node that agrees only in part the walk goes on; it must stop there",
            _match_runs_on,
        ),
    ],
    "06-insert-split": [
        Mistake("the node is not split where the paths part", _insert_without_split),
        Mistake(
            "slots of tokens that were cached before are replaced; the tree keeps its own",
            _insert_replaces_slots,
        ),
        Mistake(
            "on a split the old children stay with the upper half; they belong under the lower one",
            _insert_loses_children,
        ),
        Mistake(
            "the result is the number of tokens already there, not of new ones", _insert_returns_new
        ),
    ],
    "06-why-zero": [
        Mistake(
            "only whole pages are stored, so the hit is rounded down to pages", _hit_without_floor
        ),
        Mistake(
            "the last token is always computed, so the lookup asks for length - 1 tokens",
            _hit_whole_prompt,
        ),
        Mistake("equal tokens in another namespace are not shared", _hit_any_namespace),
        Mistake("the hit is rounded up to a page that is not full", _hit_rounds_up),
    ],
}
