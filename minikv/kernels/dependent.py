"""Programmatic dependent launch (sm90 and newer), as a kernel says it: two lines that do nothing
where it was launched without.

A kernel that :func:`minikv.kernels.launch.launch` starts as `dependent` may run while the kernel
before it still does. Until it has waited it may read only what is older than that kernel.
"""

from __future__ import annotations

from minikv.kernels.triton import tl, triton


@triton.jit
def let_next_start(DEPENDENT: tl.constexpr):
    """The kernel after this one may start, if it was launched as dependent."""
    if DEPENDENT:
        tl.extra.cuda.gdc_launch_dependents()  # type: ignore


@triton.jit
def wait_for_previous(DEPENDENT: tl.constexpr):
    """After this line, everything that the kernel before this one wrote can be read."""
    if DEPENDENT:
        tl.extra.cuda.gdc_wait()  # type: ignore
