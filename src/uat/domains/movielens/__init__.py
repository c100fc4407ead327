"""Recommendation with delayed feedback: which group of genres a user wants is felt through rewards alone."""
