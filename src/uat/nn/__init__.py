"""Building blocks of the methods: architecture only, nothing about learning."""
