"""Drafting methods without a model: they propose the tokens that followed earlier occurrences of the text's end.

`ngram.py` searches the session's own text. `suffix.py` also searches recent answers of this drafter. `hybrid.py`
combines n-gram drafts with a draft model. Start with `ngram.py`.
"""
