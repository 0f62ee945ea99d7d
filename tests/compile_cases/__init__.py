"""Kernels that ``tests/compile_check.py`` compiles, one module per room."""
