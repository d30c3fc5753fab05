"""Drafting methods without a model: they propose what followed the same tokens before.

`prompt_lookup.py` searches the session's own text, with `occurrences.py` to find matches and `lookup_calibration.py` to
estimate how likely each continuation is. `suffix.py` also searches recent answers of this drafter (`suffix_index.py`,
`recent_answers.py`). `lookup_first.py` combines prompt lookup with a draft model. Start with `prompt_lookup.py`.
"""
