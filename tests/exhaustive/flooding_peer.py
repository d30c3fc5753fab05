"""A drafter that sends what nobody asked for, as fast as its stream takes it, for tests."""

import asyncio
import os
import sys
from itertools import count

import grpc

from actors.transport.channel_options import CHANNEL_OPTIONS
from protos import speculation_pb2 as pb
from protos.codec import encode
from protos.draft_tree import DraftTree
from protos.messages import Attach, Block, Detach, Hello, Message, NoDraft
from protos.speculation_pb2_grpc import TargetServiceStub
from tests.integration.harness import IDENTITY


def blocks(session: str) -> list[Message]:
    return [Block(session, 3, 1, DraftTree.chain((1,)))]


def words(session: str) -> list[Message]:
    return [Attach(session, 3, 1), NoDraft(session, 3, 1), Detach(session)]


SAID = {"blocks": blocks, "words": words}


async def flood(address: str, kind: str, messages_a_frame: int) -> None:
    """Until it is killed; of sessions that nobody has opened, each frame of its own, so that none is full."""
    hello = Hello("flood", IDENTITY.vocabulary, IDENTITY.target_model)
    async with grpc.aio.insecure_channel(address, options=CHANNEL_OPTIONS) as channel:
        stream = TargetServiceStub(channel).Verify()
        await stream.write(encode(pb.DrafterToTarget, [hello]))
        await stream.read()
        print("floods", flush=True)
        frames = []
        for frame in range(64):
            said = [message for at in range(messages_a_frame) for message in SAID[kind](f"{frame}-{at}")]
            frames.append(encode(pb.DrafterToTarget, said[:messages_a_frame]))
        for at in count():
            await stream.write(frames[at % len(frames)])


if __name__ == "__main__":
    os.sched_setaffinity(0, range(os.cpu_count() or 1))
    os.nice(19)  # it is to be on another machine: here it takes what the target's core leaves
    asyncio.run(flood(sys.argv[1], sys.argv[2], int(sys.argv[3])))
