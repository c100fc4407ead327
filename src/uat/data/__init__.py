"""Where domains get their data: sources, checks, caches, tidy arrays. Nothing is read or fetched on import."""
