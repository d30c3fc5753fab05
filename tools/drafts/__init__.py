"""`slipstream drafts`: what a draft checkpoint is, whether it fits a target, and how much it speeds it up.

`command.py` has the two subcommands. `inspect` reads only metadata (folder `inspection`) and prints it through
`sheets.py`; `measure` replays decoded texts (folder `eval`) and prints them through `comparison.py`.
"""
