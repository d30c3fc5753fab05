"""Decisions of a router: the ledger of each session, and its target and drafter, including replacements after failures.

Input: new requests, the pools' members, and the messages of targets and drafters. Output: Open and Close messages, and
events for clients (`CommittedTokens`, `Ended`, `Failed`). Only tokens that the ledger has committed reach a client.

Start with `ledger`, the ledger of one request. `session_router` places all sessions of a router: it ranks targets by
load and cached prefixes, and drafters by load and locality. `drafter_health` handles drafters that are silent or became
bad. `membership` is a snapshot of the pools; `ray_membership` is the one file here that imports Ray.
"""
