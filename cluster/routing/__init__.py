"""Router logic: session ledgers, and assignment of targets and drafters, including replacement after failures.

Inputs are new requests, pool members, and messages from targets and drafters. Outputs are Open and Close messages, and
client events (`CommittedTokens`, `Ended`, `Failed`). Clients receive only tokens committed to the ledger.

Start with `ledger`, the state machine of one request. `session_router` assigns the sessions of a router: it ranks
targets by load and cached prefixes, and drafters by load and locality. `drafter_health` handles silent and bad
drafters. `membership` defines a snapshot of the pools. `ray_membership` reads it from Ray Serve, and is the only module
here that imports Ray.
"""
