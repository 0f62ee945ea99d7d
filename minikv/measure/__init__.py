"""Beside the floors: how fast the pieces are on this machine, next to peers and to what the machine
can do at best."""

from __future__ import annotations

from minikv.measure.limits import copy_bandwidth, matmul_rate, read_bandwidth
from minikv.measure.table import table
from minikv.measure.timing import Timing, measure, measure_graph, measure_host

__all__ = [
    "Timing",
    "copy_bandwidth",
    "matmul_rate",
    "measure",
    "measure_graph",
    "measure_host",
    "read_bandwidth",
    "table",
]
