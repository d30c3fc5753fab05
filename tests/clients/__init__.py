"""Clients of others, each in an environment of its own, against a server whose model does as it is told."""
