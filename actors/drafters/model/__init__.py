"""Drafting with a small language model or a draft head over a paged cache.

`draft_model.py` is the method. `draft_cache.py` holds each session's cached branches and the hidden states fed to a
head. `forwards.py` feeds pending tokens to the model. `sampling.py` turns logits into draft tokens, calibrated on the
target's decisions. `recurrent_head.py` predicts further tokens between forwards.
"""
