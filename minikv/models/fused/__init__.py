"""A decode step in few kernels: ``decoder.py`` is the step, the other files are its kernels."""

from minikv.models.fused.decoder import FusedDecoder, fused_for

__all__ = ["FusedDecoder", "fused_for"]
