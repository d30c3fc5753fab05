"""Inspection of a draft checkpoint on disk: what it is, what it needs, and whether it fits a target.

Only metadata is read: headers, configurations and tables of ids. `inspect.py` is the entry point.
`header_files.py` reads a folder, `layout.py` recognizes its layout, `head_facts.py` collects the facts
(`facts.py`), and `fit.py` with `expected_tensors.py` finds misfits.
"""
