"""Drafting methods: how a drafter finds candidate tokens.

Every method implements `DraftingMethod` (`cluster/drafting/method.py`): it opens sessions, follows their committed
tokens, and proposes blocks on request (`draft`) or for likely verdicts while a block is verified (`draft_ahead`). A
method only affects speed: the target verifies every token, so a bad method is slow but never wrong.

`registry.py` maps the configured name to a module with a function `create`. The module is imported only when its method
is configured, so methods without a model need no torch.

* `lookup` holds methods without a model. `ngram.py` searches the session's own text, `suffix.py` recent answers too,
and
  `hybrid.py` combines n-gram drafts with a draft model.
* `model` drafts with a small language model over a paged cache. `loading.py` creates it from a checkpoint,
  `layer_skip.py` from some of the target's own layers.
* `heads` holds draft heads that read the target's hidden states: EAGLE, MTP, DFlash, Medusa, MLPSpeculator.
* `pass_profile.py` measures the cost of a drafting pass on this machine, for any method.

Read `registry.py` first, then `lookup/ngram.py`, the smallest method.
"""
