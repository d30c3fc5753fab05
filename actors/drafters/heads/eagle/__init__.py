"""EAGLE heads of all generations, in every layout in which they are published.

`names.py` maps tensor names of all layouts to one set, `resolution.py` derives the `EagleConfig`
(`config.py`, where to start) and refuses what does not fit, and `weights.py` places the tensors.
`decoder.py` is the forward and `runner.py` runs it over a paged cache. `layer_ids.py` interprets
which hidden states of the target a head reads. MTP modules are run by the same decoder.
"""
