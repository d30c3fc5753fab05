"""Drafting methods without a model: they propose what followed the same tokens before.

`ngram.py` searches the session's own text. `suffix.py` also searches recent answers of this drafter. `hybrid.py`
combines n-gram drafts with a draft model. Start with `ngram.py`.
"""
