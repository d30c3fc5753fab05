"""Audits of a router: which ended requests are decided again without speculation, where, and what a difference means.

Input: ended sessions with their committed tokens, and verdicts of idle targets. Output: Open messages for audits,
counts of equal, nearly tied and different results, and an alarm for each difference.

Start with `replay.py`, one audit; `audits.py` selects requests and targets and runs one audit at a time.
"""
