"""Methods that read the target's states, made by the registry from the fixtures, and asked here."""

from pathlib import Path
from typing import Any, Protocol

from torch import Tensor

from actors.drafters.heads.projection import DecodedStates
from actors.drafters.registry import DraftSetup, create_method, states_format
from cluster.config import DraftPool
from cluster.drafting.method import DraftingMethod
from cluster.drafting.requests import Proposal
from protos.messages import DraftRequest, Shape, StatesNeeded
from protos.prefix import Prefix
from tests.unit.actors.drafters.heads.eagle_fixtures import TARGET, Case
from tests.unit.cluster.samples import KEY, an_open

VOCABULARY = 96
ALL_TOKENS = range(VOCABULARY)
TOP_K = 8


class StateReading(DraftingMethod, Protocol):
    """Interface that methods reading states have beyond the others."""

    @property
    def needs(self) -> StatesNeeded: ...

    def states(self, session: str, first: int, rows: Tensor) -> None: ...


def a_draft(name: str, folder: Path, project: str = "drafter", **changes: Any) -> DraftPool:
    """The configuration of the head in a folder, with changes of its method's options."""
    options: Any = {name: {"draft_probs_top_k": TOP_K} | changes, "states": {"project": project}}
    return DraftPool(method=name, model=str(folder), **options)  # type: ignore[arg-type]


def a_deployed_method(name: str, folder: Path, project: str = "drafter", **changes: Any) -> DecodedStates:
    """Returns the method of a head in a folder, for the fixtures' target; it takes encoded rows in bfloat16."""
    draft = a_draft(name, folder, project, **changes)
    tokens = {token: str(token) for token in ALL_TOKENS}
    setup = DraftSetup("float32", 64, 16, tokens, str(TARGET), states_format(draft, TARGET))
    method = create_method(draft, setup)
    assert isinstance(method, DecodedStates)
    return method


def a_method(name: str, folder: Path, project: str = "drafter", **changes: Any) -> StateReading:
    """The same, which takes rows as tensors."""
    method: Any = a_deployed_method(name, folder, project, **changes)._method
    return method


def decided(known: Case, next_token: str = "next_token") -> tuple[int, ...]:
    """The prompt and the token after it."""
    return (*known["input_ids"].tolist(), int(known[next_token]))


def a_request(
    tokens: tuple[int, ...], most: int = 16, shape: Shape = Shape.CHAIN, least: float = 0.0, session: str = "s"
) -> DraftRequest:
    return DraftRequest(session, 1, len(tokens), Prefix(KEY, tokens).hash, most, least_chance=least, shape=shape)


def drafted(
    method: StateReading, tokens: tuple[int, ...], first: int, rows: Tensor, request: DraftRequest, **changes: Any
) -> Proposal:
    """Drafts for a session that is opened, given rows of states from position `first`, and closed."""
    method.open(an_open(tokens=tokens, **changes))
    method.states("s", first, rows)
    (proposal,) = method.draft([request])
    method.close(["s"])
    return proposal
