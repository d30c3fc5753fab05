"""EAGLE heads of all generations and published layouts.

Start with `config.py`, which renames tensors to canonical names, resolves the `EagleConfig` and refuses heads that do
not match the target. `weights.py` reads the tensors. `loading.py` contains the forward and its runner over a paged
cache. `method.py` creates the drafting method. `mtp.py` runs multi-token prediction modules with the same decoder.
"""
