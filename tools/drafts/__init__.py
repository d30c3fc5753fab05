"""`slipstream drafts`: shows what a draft checkpoint is, whether it fits a target, and how well it drafts.

`command.py` has the two subcommands. `inspect` reads only metadata (`headers.py`, `inspection.py`); `measure` replays
decoded texts (`evaluation.py`) and compares the drafts (`comparison.py`).
"""
