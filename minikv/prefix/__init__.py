"""Floor 2: which tokens of a prompt already have K and V in the pool (notebooks 06 and 07)."""

from minikv.prefix.events import Event, Frame, Recorder
from minikv.prefix.node import CacheStats, Match, Node
from minikv.prefix.radix import RadixCache

__all__ = ["CacheStats", "Event", "Frame", "Match", "Node", "RadixCache", "Recorder"]
