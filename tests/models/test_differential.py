"""Checkpoints drawn at random give the tokens, chats, stop tokens and logits of transformers, or a
refusal that names the key.

300 are drawn here, every fourth a GGUF file; ``MINIKV_LONG_FILES=1`` draws 5,000.
"""

from __future__ import annotations

import os
import random
import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
from checkpoints import Checkpoint, folder
from gguf_checkpoints import File, file
from model_standins import full_logits
from tokenizer_kinds import special_tokens

from minikv.errors import ArgumentError
from minikv.models import load

transformers = pytest.importorskip("transformers")

SEEDS = range(5000 if os.environ.get("MINIKV_LONG_FILES") else 300)
GROUPS = 10
TEXTS = [
    "hello world, the cache holds pages",
    "  two  spaces\n\n and 12345 it's I'll",
    "漢字 👍🏽 ❤️ für Größe e\u0301",
    "",
    "x" * 40,
]
CHATS: list[list[dict[str, Any]]] = [
    [{"role": "user", "content": " Hello, world! "}],
    [{"role": "system", "content": "Be <brief>."}, {"role": "user", "content": "漢字 & 'x'"}],
    [
        {"role": "user", "content": "One"},
        {"role": "assistant", "content": "Two"},
        {"role": "user", "content": "Three\n"},
        {"role": "assistant", "content": "Four"},
    ],
]


def differences(path: Path, made: Checkpoint, seed: int) -> str | None:
    """What differs between minikv and transformers on a folder; "refused" if minikv names a key."""
    try:
        ours = load(path, device="cpu", dtype="float32", progress=False)
    except ArgumentError as e:
        named = any(key in str(e) for key in made.refused)
        return "refused" if named else f"refused without cause: {e}"
    if made.refused & {"partial_rotary_factor", "rotary_pct", "rotary_dim", "rope_type"}:
        return f"{made.refused} did not matter"
    theirs = transformers.AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32)
    words = transformers.PreTrainedTokenizerFast.from_pretrained(path)
    stops = theirs.generation_config.eos_token_id
    if stops is None:  # what an empty generation_config.json hides
        stops = made.config.get("eos_token_id")
    want = {stops} if isinstance(stops, int) else set(stops or ())
    want |= {words.eos_token_id} - {None}
    if ours.tokenizer.eos_ids != want or ours.config.eos_ids != want:
        return f"stop tokens {set(ours.tokenizer.eos_ids)}, not {want}"
    return _texts(ours.tokenizer, words, made.kind, seed) or _logits(ours.decoder, theirs, seed)


def differences_of_file(made: File, seed: int) -> str | None:
    """The same for a GGUF file: what transformers reads is the folder of the same model."""
    try:
        ours = load(made.path, device="cpu", dtype="float32", progress=False)
    except ArgumentError as e:
        named = made.refused and made.refused in str(e)
        return "refused" if named else f"refused without cause: {e}"
    if made.refused:
        return f"{made.refused} did not matter"
    if ours.config.eos_ids != made.stops or ours.tokenizer.eos_ids != made.stops:
        return f"stop tokens {set(ours.config.eos_ids)}, not {made.stops}"
    theirs = transformers.AutoModelForCausalLM.from_pretrained(made.twin, dtype=torch.float32)
    words = transformers.PreTrainedTokenizerFast.from_pretrained(made.twin)
    # A start token that the text begins with is not doubled in GGUF files: "a" keeps them apart.
    problem = _texts(ours.tokenizer, words, made.kind, seed, before="a")
    return problem or _logits(ours.decoder, theirs, seed)


def _texts(ours: Any, theirs: Any, kind: str, seed: int, before: str = "") -> str | None:
    rng = random.Random(seed)
    mixed = before + "".join(rng.choices([*TEXTS, *special_tokens(kind), "<think>", " "], k=6))
    for text in (rng.choice(TEXTS), mixed):
        ids = theirs(text).input_ids
        if ours.encode(text) != ids:
            return f"tokens of {text!r}: {ours.encode(text)}, not {ids}"
        plain = theirs.decode(ids, skip_special_tokens=True)
        if ours.decode(ids) != plain:
            return f"text {ours.decode(ids)!r}, not {plain!r}"
    return _chats(ours, theirs, rng.choice(CHATS))


def _logits(ours: Any, theirs: Any, seed: int) -> str | None:
    ids = torch.randint(400, (40,), generator=torch.Generator().manual_seed(seed))
    with torch.inference_mode():
        want = theirs(ids[None], attention_mask=torch.ones(1, 40)).logits[0]
    worst = float((full_logits(ours, ids.tolist()) - want).abs().max())
    return None if worst <= 1e-4 else f"logits are off by {worst}"


def _chats(ours: Any, theirs: Any, chat: list[dict[str, Any]]) -> str | None:
    try:
        rendered = theirs.apply_chat_template(chat, tokenize=False, add_generation_prompt=True)
    except Exception as e:
        with pytest.raises(ArgumentError):
            ours.render(chat)
        known = ("alternate", "chat_template", "undefined")
        return None if any(reason in str(e) for reason in known) else f"theirs: {e}"
    if ours.render(chat) != rendered:
        return f"chat {ours.render(chat)!r}, not {rendered!r}"
    options = {"add_generation_prompt": True, "return_dict": False}
    if ours.chat(chat) != theirs.apply_chat_template(chat, **options):
        return f"tokens of chat {rendered!r}"
    return None


@pytest.mark.parametrize("group", range(GROUPS))
def test_checkpoints_drawn_at_random_equal_transformers(group: int, tmp_path: Path) -> None:
    transformers.utils.logging.set_verbosity_error()
    transformers.utils.logging.disable_progress_bar()
    problems, refused = [], 0
    seeds = SEEDS[group::GROUPS]
    for seed in seeds:
        path = tmp_path / str(seed)
        path.mkdir()
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            if seed % 4 == 3:
                made: Any = file(path, seed)
                found = differences_of_file(made, seed)
            else:
                made = folder(path, seed)
                found = differences(path, made, seed)
        refused += found == "refused"
        if found not in (None, "refused"):
            problems.append(f"{seed}: {found}\n    {made}")
    assert not problems, f"{len(problems)} of {len(seeds)}:\n" + "\n".join(problems)
    assert refused < len(seeds) / 4
