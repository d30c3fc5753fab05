"""DFlash heads: a small model drafts a whole block at once, attending to the target's hidden states as its context.

`config.py` resolves a head's files, `weights.py` reads its tensors and `loading.py` makes the
drafting method. Start with `decoder.py`, the forward; `context.py` holds each session's keys and values.
"""
