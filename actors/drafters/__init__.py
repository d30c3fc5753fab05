"""Drafting methods, which propose candidate tokens.

Every method implements `DraftingMethod` (`cluster/drafting/method.py`): it opens sessions, receives their committed
tokens, and proposes blocks, either on request (`draft`) or during verification, for likely verdicts (`draft_ahead`). A
method affects only speed: the target verifies every token, so a bad method is slow but never wrong.

`registry.py` maps the configured name to a module with a function `create`. Only the configured method's module is
imported, so methods without a model do not need torch.

* `lookup` contains methods without a model. `ngram.py` searches the session's own text, `suffix.py` also recent
  answers, and `hybrid.py` combines n-gram drafts with a draft model.
* `model` drafts with a small language model over a paged cache. `loading.py` creates the model from a checkpoint, and
  `layer_skip.py` from some of the target's own layers.
* `heads` contains draft heads that read the target's hidden states: EAGLE, MTP, DFlash, Medusa, MLPSpeculator.
* `translation` translates drafts of a model with another tokenizer.
* `pass_profile.py` measures the cost of drafting passes of any method on this machine.

Start with `registry.py` and `lookup/ngram.py`, the smallest method.
"""
