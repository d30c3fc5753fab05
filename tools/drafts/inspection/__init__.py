"""Inspection of a draft checkpoint on disk: what it is, what it needs, and whether it fits a target.

Only metadata is read: headers, configurations and tables of ids. `draft_inspection.py` is the entry point.
`header_files.py` reads a folder, `draft_layout.py` recognizes its layout, `head_facts.py` collects the facts
(`draft_facts.py`), and `draft_fit.py` with `expected_tensors.py` finds misfits.
"""
