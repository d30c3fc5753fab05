"""Multi-token prediction (MTP) modules, which a target's own checkpoint contains.

`names.py` finds a module in a checkpoint and maps its tensor names; `loading.py` then loads it as an EAGLE head
(`actors/drafters/heads/eagle`), which it computes like. Start with `loading.py`.
"""
