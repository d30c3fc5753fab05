"""Drafting methods without a model, which propose the tokens after earlier occurrences of the text's suffix.

`ngram.py` searches the session's own text. `suffix.py` also searches this drafter's recent answers. `hybrid.py`
combines n-gram drafts with a draft model. Start with `ngram.py`.
"""
