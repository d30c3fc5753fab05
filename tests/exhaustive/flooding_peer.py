"""A drafter that sends blocks for sessions that nobody has opened, as fast as its stream takes them, for tests."""

import asyncio
import os
import sys
from itertools import count

import grpc

from actors.net.credentials import CHANNEL_OPTIONS
from protos import speculation_pb2 as pb
from protos.codec import encode
from protos.draft_tree import DraftTree
from protos.messages import Block, Hello
from protos.speculation_pb2_grpc import TargetServiceStub
from tests.integration.harness import IDENTITY


async def flood(address: str, blocks_a_frame: int) -> None:
    """Sends until killed; each frame names new sessions, so that no buffer fills up."""
    hello = Hello("flood", IDENTITY.vocabulary, IDENTITY.target_model)
    async with grpc.aio.insecure_channel(address, options=CHANNEL_OPTIONS) as channel:
        stream = TargetServiceStub(channel).Verify()
        await stream.write(encode(pb.DrafterToTarget, [hello]))
        await stream.read()
        print("floods", flush=True)
        frames = [
            encode(
                pb.DrafterToTarget,
                [Block(f"{frame}-{at}", 3, 1, DraftTree.chain((1,))) for at in range(blocks_a_frame)],
            )
            for frame in range(64)
        ]
        for at in count():
            await stream.write(frames[at % len(frames)])


if __name__ == "__main__":
    os.sched_setaffinity(0, range(os.cpu_count() or 1))
    os.nice(19)  # it is to be on another machine: here it takes what the target's core leaves
    asyncio.run(flood(sys.argv[1], int(sys.argv[2])))
