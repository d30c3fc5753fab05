"""Learning from traffic: trains better versions of the draft on finished sessions.

Routers write finished sessions to an `ExampleStore`. A trainer process reads it, trains a copy of the current draft
(`training`), scores it against the current version on held-out examples (`evaluation`), and adds it to a
`VersionFolder`. Drafters watch that folder and exchange their weights between two passes (`reload`).

The processes share only a folder, on local disk or a mounted volume:

    examples.sqlite        finished sessions, as token ids
    versions/0001/         a draft checkpoint and its manifest.json
    versions/current.json  the version that drafters use; version 0 is the configured draft
    training/              the state of an interrupted training, and the mark of a running one

No request waits for any of this. A full disk, a killed trainer or a bad version costs learning, never serving. The
rules (consent, near-duplicates, promotion) are in `cluster.learning`.
"""
