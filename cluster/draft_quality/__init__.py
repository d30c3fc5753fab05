"""Checks that drafts are as good as expected, when a drafter starts and while it serves. Pure.

Input: the acceptance of verified blocks, by drafter and session, and the draft's own confidence. Output: a warning at
startup (`load_check.py`), a `Collapse` for the router when a session's blocks became bad (`collapse.py`), and counts by
context length and position (`acceptance_stats.py`).

Start with `cusum.py`, the statistical test, and `collapse.py`, the steps that follow it.
"""
