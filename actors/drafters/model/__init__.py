"""The draft model: drafts with a small language model, or with an EAGLE head, over a paged cache.

`draft_model.py` is the method. `draft_cache.py` holds each session's cached branches and the hidden states fed to a
head, `forwards.py` feeds pending tokens to the model, and `sampling.py` turns logits into draft tokens, calibrated by
what the target decided. `recurrent_head.py` predicts further tokens between forwards.
"""
