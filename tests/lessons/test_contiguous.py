"""The contiguous memory of notebook 03, against cells that are painted one by one."""

from __future__ import annotations

import pytest

from minikv.lessons.contiguous import Chat, Contiguous, chat_trace, rules, serve, shares


def painted(memory: Contiguous) -> list[str | None]:
    """Owner of every slot; two owners of one slot would be an error of the memory."""
    cells: list[str | None] = [None] * memory.size
    for piece in memory.segments():
        for slot in range(piece["start"], piece["start"] + piece["reserved"]):
            assert cells[slot] is None
            cells[slot] = piece["who"]
    return cells


@pytest.mark.parametrize("rule", ["longest allowed", "power of two", "true length"])
@pytest.mark.parametrize("seed", [0, 1])
def test_a_run_is_first_come_first_fit(rule: str, seed: int) -> None:
    chats, size = chat_trace(30, 64, seed=seed, prompt=8, answer=10), 200
    reserve, memory = rules(64)[rule], Contiguous(size)
    waiting = list(chats)
    for moment in serve(chats, size, reserve):
        while waiting:
            cells, need = painted(memory), reserve(waiting[0])
            fits = [i for i in range(size - need + 1) if not any(cells[i : i + need])]
            assert memory.admit(waiting[0], need) == bool(fits)
            if not fits:
                break
            owner = waiting.pop(0).name
            assert painted(memory).index(owner) == fits[0]
        cells = painted(memory)
        assert moment.segments == memory.segments()
        levels = moment.levels
        assert levels["used"] + levels["reserved"] + levels["internal"] == sum(
            cell is not None for cell in cells
        )
        if levels["external"]:
            assert waiting
            assert levels["external"] == cells.count(None) >= reserve(waiting[0])
        memory.step()
    assert not waiting
    assert not memory.pieces


def test_levels_of_a_refusal_though_enough_is_free() -> None:
    memory = Contiguous(48)
    for name, length in (("A", 14), ("B", 16), ("C", 15)):
        assert memory.admit(Chat(name, 13, length), 16)
    assert memory.step() == ["A"]
    assert memory.step() == ["C"]
    assert memory.holes() == [(0, 16), (32, 16)]
    assert not memory.admit(Chat("D", 17, 20), 20)
    assert memory.levels(need=20) == {"used": 15, "reserved": 1, "internal": 0, "external": 32}
    assert memory.levels(need=40)["external"] == 0
    assert memory.levels()["external"] == 0


def test_a_chat_larger_than_memory_is_dropped() -> None:
    assert serve([Chat("A", 5, 9)], 8, lambda chat: chat.length) == []


def test_rules_cover_the_length_and_shares_add_up() -> None:
    chats = chat_trace(50, 128, prompt=20, answer=20)
    for rule in rules(128).values():
        assert all(chat.length <= rule(chat) <= 128 for chat in chats)
        share = shares(serve(chats, 512, rule), 512)
        assert share.pop("running") > 0
        assert sum(share.values()) == pytest.approx(1)
