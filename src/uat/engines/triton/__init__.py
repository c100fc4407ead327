"""Triton kernels, each with a slow twin in torch. They are imported only when first used."""
