"""Adapters: worlds of other libraries as domains of this one. They are imported when a domain of theirs is named."""
