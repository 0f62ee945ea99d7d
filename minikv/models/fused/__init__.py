"""A decode step in few kernels: ``decoder.py`` is the step, the other files are its kernels."""
