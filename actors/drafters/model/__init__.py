"""Parts of methods that draft with a model; `actors/drafters/model/draft_model.py` puts them together.

`draft_cache.py` holds each session's cached branches, `forwards.py` feeds them to the model, and `sampling.py` turns
logits into draft tokens. `calibration.py` fits acceptance probabilities to what the target decided. `state_feed.py` and
`session_states.py` provide the target's hidden states to EAGLE-like heads. `recurrent_head.py`, `head_drafting.py` and
`pard.py` predict several tokens per forward.
"""
