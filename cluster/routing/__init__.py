"""What a router decides with: the ledger of each session, and which target and drafter it gets."""
