"""Multi-token prediction (MTP) modules, which a target's own checkpoint contains.

`mtp_names.py` finds a module in a checkpoint and maps its tensor names; `mtp_loading.py` then loads it as an EAGLE head
(`actors/drafters/heads/eagle`), which it computes like. Start with `mtp_loading.py`.
"""
