"""Graph runners: a decode step recorded or compiled once per batch size, and run again without its
host work."""

from minikv.graphs.buckets import capture_batch_sizes
from minikv.graphs.buffers import Buffer, Padding, Stage, rule, staged
from minikv.graphs.compiled import CompiledRunner
from minikv.graphs.counters import Counters
from minikv.graphs.cuda import CudaGraphRunner
from minikv.graphs.runner import GraphRunner, Hidden

__all__ = [
    "Buffer",
    "CompiledRunner",
    "Counters",
    "CudaGraphRunner",
    "GraphRunner",
    "Hidden",
    "Padding",
    "Stage",
    "capture_batch_sizes",
    "rule",
    "staged",
]
