"""Pure logic: config, the session ledger, and the schedulers that decide every step.

Nothing here waits, sends or reads a clock. A scheduler is a state machine, `receive(peer, message, now) -> sends`, and
a shell in `actors` or `serve_app` carries its messages. The same objects run live, in the simulator
(`tools.simulation`) and in tests under adversarial schedules. No torch, gRPC or HTTP is imported, and Ray in one file
(`routing/ray_membership.py`).

Five rules make the system consistent; each is kept in one place:

1. The target decides, the router remembers. A verdict may be thrown away until the router writes it to the session's
   ledger (`routing`); only then does it reach the client. The ledger rebuilds any cache anywhere.
2. Blocks are addressed by content. A target verifies a block only if its length and prefix hash match its own text
   (`verification`). A wrong or late block costs speed, never a token.
3. Verdicts are addressed by owner. Every Open carries a rising attempt number, so a replaced target that wakes up again
   cannot commit anything.
4. A cache is a prefix. Rolling back is assigning a length (`page_allocator.py`); Open, reopen and resync are the same.
5. The target never waits for a drafter longer than it pays. A session without a block is decoded without one.

A failure is then a session that is opened again from its ledger. To follow one request, read the router's `Session`
(`routing/ledger.py`), the draft scheduler (`drafting/scheduler.py`), the verification scheduler
(`verification/scheduler.py`), and back.
"""
