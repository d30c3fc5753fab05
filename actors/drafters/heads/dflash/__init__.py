"""DFlash heads: a small model drafts a whole block at once, attending to the target's hidden states as its context.

`dflash_config.py` resolves a head's files, `dflash_weights.py` reads its tensors and `dflash_loading.py` makes the
drafting method. Start with `dflash_decoder.py`, the forward; `dflash_context.py` holds each session's keys and values.
"""
