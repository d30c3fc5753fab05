"""Drafting methods without a model: they propose what followed the same tokens before.

`ngram.py` searches the session's own text, with `occurrences.py` to find matches and `calibration.py` to
estimate how likely each continuation is. `suffix.py` also searches recent answers of this drafter (`suffix_index.py`,
`recent_answers.py`). `hybrid.py` combines prompt lookup with a draft model. Start with `ngram.py`.
"""
