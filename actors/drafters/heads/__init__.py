"""Draft heads: small networks that read the target's hidden states, loaded from published checkpoints.

`files.py` reads a head's folder; each subfolder then resolves one family into a config and weights. EAGLE and MTP
heads (`eagle`, `mtp`) have a KV cache and run under `actors/drafters/model/draft_model.py`. Heads without one, DFlash
(`dflash`), Medusa and MLPSpeculator (`last_state`), run under `head_drafter.py`; start reading there.
"""
