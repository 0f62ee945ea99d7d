"""What a runner counts."""

from __future__ import annotations


class Counters(dict[str, int]):
    """Counters of a runner; ``stats.replays`` is ``stats["replays"]``.

    ``replays`` counts batches that a graph served, ``eager`` those that one could have served and
    did not, ``ragged`` those whose requests have other numbers of tokens than a graph's rows;
    ``captures`` are graphs made, ``padded_rows`` rows that were computed without a request, and
    ``graph_bytes`` is the device memory that graphs hold now.
    """

    def __init__(self) -> None:
        super().__init__(replays=0, eager=0, captures=0, padded_rows=0, graph_bytes=0)
        self.ragged = 0

    def __getattr__(self, name: str) -> int:
        if name not in self:
            raise AttributeError(name)
        return self[name]
