"""Measurement of drafts in one process: a real target and real methods, without network or Ray.

`measured_target.py` decodes texts once, `draft_replay.py` replays each with a drafting method at every position, and
`draft_measures.py` computes agreement and tokens per verification. Start with `draft_replay.py`.
"""
