"""Triton kernels, each beside its slow twin. Nothing here is imported before a path that uses it is taken."""
