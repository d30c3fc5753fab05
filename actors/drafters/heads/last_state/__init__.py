"""Heads that read only the target's final state of the last position, and predict several tokens from it.

`medusa.py` and `mlp_speculator.py` are the two heads, each with its own `create`. Start with `drafting.py`,
which drafts with either; `last_rows.py` keeps the states and `loading.py` loads a head.
"""
