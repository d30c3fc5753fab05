"""Measurement of drafts in one process: a real target and real methods, without network or Ray.

`measured_target.py` decodes texts once, `replay.py` replays each with a drafting method at every position, and
`measures.py` computes agreement and tokens per verification. Start with `replay.py`.
"""
