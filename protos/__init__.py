"""Defines the wire format: the messages between routers, drafters and targets, and their protobuf encoding.

`speculation.proto` defines two services, `DraftService` and `TargetService`, with three kinds of streams. Over `Drive`,
a router opens and closes sessions on drafters and targets, and receives verdicts. Over `Verify`, a drafter sends blocks
to a target and receives verdicts. Over `States`, it receives hidden states from the target. Streams are long-lived.
Each stream message is a frame, which batches the messages of all sessions for one peer. The messages of every step are
columns of a frame, with one row per session.

`messages.py` defines the same messages as frozen values. `to_pb.py` and `from_pb.py` convert between the two forms;
`from_pb.py` rejects out-of-range values. Schedulers never see protobuf types. `codec.py` packs messages into frames and
estimates their encoded size.

Blocks are addressed by content: `(session, base_len, prefix_hash)`. `prefix.py` computes `prefix_hash`, a keyed 64-bit
rolling hash of all tokens before the block. A target uses it to check that a block was drafted for exactly the target's
own text. `draft_tree.py` stores draft tokens and their probabilities as a tree; a chain is the simplest tree.

Peers with a different protocol version are refused when they connect, so protocol changes need no compatibility code.
"""
