"""DFlash heads: small models that draft a whole block in one forward and attend to the target's hidden states.

Start with `DFlashDecoder`, the forward. `config.py` resolves a head's files, `weights.py` reads its tensors, and
`drafting.py` computes blocks and creates the method.
"""
