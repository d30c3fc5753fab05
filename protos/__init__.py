"""Wire format: messages between router, drafters and targets, and their protobuf form.

`speculation.proto` defines three services. A router drives drafters and targets (`Drive`: Open, Close; verdicts back),
and a drafter verifies its blocks at a target (`Verify`) and receives hidden states from it (`States`). Every stream is
long-lived, and every message is a frame: all sessions of one step for one peer.

`messages.py` defines the same messages as frozen values. `to_pb.py` and `from_pb.py` translate; values out of range are
refused there, and no protobuf type travels past them. `codec.py` packs frames and bounds their size.

Blocks are addressed by content: `(session, base_len, prefix_hash)`. `prefix.py` computes the rolling 64-bit keyed hash
over every token before the block, so a target knows whether a block was drafted for exactly the text it holds.
`draft_tree.py` holds draft tokens as a tree (a chain is the simplest one) with their probabilities.

A peer of another protocol version is refused when it connects, so a change needs no code for old peers.
"""
