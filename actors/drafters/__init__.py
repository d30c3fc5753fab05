"""Drafting methods: how a drafter finds candidate tokens.

Every method implements `DraftingMethod` (`cluster/drafting/method.py`). `registry.py` maps the configured name to a
module with a function `create`; read it first, then `lookup/ngram.py`, the smallest method.

* `draft_model.py` drafts with a small language model; its parts (cache, forwards, sampling) are in `model`.
* `lookup` has methods without a model: n-gram matches in the text and in recent answers.
* `heads` has draft heads that read the target's hidden states: EAGLE, MTP, DFlash, Medusa, MLPSpeculator.
"""
