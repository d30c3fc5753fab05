"""EAGLE heads of all generations, in every layout in which they are published.

`config.py` renames a head's tensors to one set of names and resolves the `EagleConfig`, refusing heads that do not fit;
start there. `weights.py` places the tensors, `loading.py` has the forward and its runner over a paged cache, and
`method.py` creates the drafting method. `mtp.py` runs multi-token prediction modules with the same decoder.
"""
