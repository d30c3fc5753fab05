"""Drafting methods without a model: they propose the tokens that followed earlier occurrences of the suffix.

`ngram.py` searches the session's own text. `suffix.py` also searches this drafter's recent answers. `hybrid.py`
combines n-gram drafts with a draft model. Start with `ngram.py`.
"""
