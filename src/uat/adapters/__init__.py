"""Adapters: environments and logs of other people as domains, imported when a domain of theirs is named."""
