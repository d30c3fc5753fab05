"""Decisions of a router: the ledger of each session, and its target and drafter, including replacements after failures.

Input: new requests, the pools' members, and the messages of targets and drafters. Output: Open and Close messages, and
events for clients (`CommittedTokens`, `Ended`, `Failed`). Only tokens that the ledger has committed reach a client.

Start with `ledger.py`, the ledger of one request. `assignment.py` places all sessions of a router; `target_choice.py`,
`balancing.py`, `prefix_affinity.py` and `locality.py` rank the candidates; `drafter_watch.py` and `drafter_recovery.py`
handle drafters that are silent or became bad. `ray_membership.py` is the one file here that imports Ray.
"""
