"""`slipstream drafts`: describes draft checkpoints, checks that they fit a target, and measures their acceptance.

`command.py` defines two subcommands. `inspect` reads only metadata (`headers.py`, `inspection.py`). `measure` replays
decoded texts (`evaluation.py`) and compares drafts (`comparison.py`).
"""
