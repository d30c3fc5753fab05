"""DFlash heads: a small model drafts a whole block at once, attending to the target's hidden states as its context.

`config.py` resolves a head's files, `weights.py` reads its tensors and `drafting.py` computes blocks and creates the
method. Start with `DFlashDecoder`, the forward.
"""
