"""Draft heads: small networks that read the target's hidden states, loaded from published checkpoints.

Start with `head_drafter.py`. `files.py` reads a head's folder, and each family resolves it into a config and weights.
EAGLE and MTP heads (`eagle`) have a paged KV cache and run in `actors/drafters/model/draft_model.py`. DFlash
(`dflash`), Medusa and MLPSpeculator heads (`last_state`) have none and run in `head_drafter.py`.
"""
