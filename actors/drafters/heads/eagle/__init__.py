"""EAGLE heads of all generations and published layouts.

`config.py` renames a head's tensors to canonical names and resolves the `EagleConfig`, refusing heads that do not fit;
start there. `weights.py` reads the tensors, `loading.py` has the forward and its runner over a paged cache, and
`method.py` creates the drafting method. `mtp.py` runs multi-token prediction modules with the same decoder.
"""
