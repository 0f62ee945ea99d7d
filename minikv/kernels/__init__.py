"""Floor 1: the one import of Triton, the launching of compiled kernels, and the way of host numbers
to them."""
