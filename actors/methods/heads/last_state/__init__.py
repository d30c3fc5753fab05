"""Heads that read one of the target's states, the last one, and predict several tokens from it."""
