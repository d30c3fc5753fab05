"""Endpoints that generate nothing: tokens of texts and texts of tokens, what is served, and how it is asked."""
