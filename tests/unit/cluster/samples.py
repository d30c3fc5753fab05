"""Default sessions and blocks for tests; keywords override fields."""

from dataclasses import replace
from typing import Any

from protos.draft_tree import DraftTree
from protos.messages import Acceptance, Block, Open, Sampling
from protos.prefix import Prefix

KEY = 99
GREEDY = Sampling(temperature=0.0)
PLAIN_OPEN = Open(
    session="s",
    attempt=1,
    tokens=(1, 2, 3),
    prompt_len=3,
    max_len=40,
    stop_ids=(),
    sampling=GREEDY,
    seed=7,
    choice=0,
    hash_key=KEY,
    acceptance=Acceptance.COUPLED,
    draft_tokens=4,
)


def an_open(session: str = "s", **changes: Any) -> Open:
    """Returns an Open; `tokens` are all prompt unless `prompt_len` is given."""
    if "tokens" in changes:
        changes = {"prompt_len": len(changes["tokens"])} | changes
    return replace(PLAIN_OPEN, session=session, **changes)


def a_block(before: tuple[int, ...], tokens: tuple[int, ...] | DraftTree, session: str = "s") -> Block:
    """Returns a chain block that continues exactly `before`."""
    tree = tokens if isinstance(tokens, DraftTree) else DraftTree.chain(tokens)
    return Block(session, len(before), Prefix(KEY, before).hash, tree)
