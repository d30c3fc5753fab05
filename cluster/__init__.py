"""Pure logic: configuration, the session ledger, and the schedulers.

Nothing here waits, sends or reads a clock. A scheduler is a state machine with the method `receive(peer, message, now)
-> sends`; a shell in `actors` or `serve_app` delivers its messages. The same classes run in production, in the
simulator (`tools.simulation`) and in tests with adversarial schedules. The package does not import torch, gRPC or HTTP
libraries; only `routing/ray_membership.py` imports Ray.

Five rules keep the system consistent:

1. The target decides tokens and the router commits them. A verdict takes effect, and reaches the client, only after the
   router has written it to the session's ledger (`routing`). Any replica can rebuild the session from the ledger.
2. Blocks are addressed by content. A target verifies a block only if the block's length and prefix hash match the
   session's text (`verification`). A wrong or late block reduces speed but never changes the output.
3. Verdicts carry an attempt number, which increases with every Open sent to a target. A target that was replaced
   therefore cannot commit tokens.
4. A session's cache always holds a prefix of its text, so a rollback only sets its length (`page_allocator.py`). Open,
   reopen and resync use the same mechanism.
5. A target waits for a block only while the expected gain exceeds the cost. A session without a block decodes without
   speculation.

Recovery from any failure means opening the session again from its ledger. To follow a request, read the router's
`Session` (`routing/ledger.py`), then the draft scheduler (`drafting/scheduler.py`), then the verification scheduler
(`verification/scheduler.py`).
"""
