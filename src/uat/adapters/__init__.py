"""Adapters: environments and logs of other people as domains."""
