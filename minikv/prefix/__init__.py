"""Floor 4: which tokens of a prompt already have K and V in the pool (notebooks 06 and 07)."""

from minikv.prefix.node import CacheStats, Match, Node
from minikv.prefix.recorder import Event, Frame, Recorder
from minikv.prefix.tree import RadixCache

__all__ = ["CacheStats", "Event", "Frame", "Match", "Node", "RadixCache", "Recorder"]
