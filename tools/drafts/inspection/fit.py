"""Checks whether a draft checkpoint is complete and fits a target; each misfit has the expected and the found value."""

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from actors.drafters.heads.draft_columns import draft_columns
from actors.drafters.heads.eagle.names import NEITHER
from actors.drafters.heads.eagle.names import NOT_COMPUTED_WITH as OF_TRAINING
from actors.drafters.heads.files import EMBEDDING, HEAD, HeadFiles
from actors.drafters.heads.target_shape import TargetShape, target_shape
from actors.models.checkpoint import check_draft, vocabulary
from actors.models.config_reader import read_config
from actors.models.weights import stored_tensors
from cluster.config import DraftPool
from cluster.errors import ModelError
from tools.drafts.inspection.expected_tensors import MASK_STATE, ExpectedTensors, expected_tensors
from tools.drafts.inspection.facts import DraftFacts, Misfit
from tools.drafts.inspection.head_facts import presumed_target, resolved

DEPTH_KEY = "num_target_layers"  # key in a DFlash configuration


@dataclass(frozen=True, slots=True)
class TargetFacts:
    """Facts about a target that drafts must fit."""

    folder: Path
    shape: TargetShape
    positions: int | None


def target_facts(folder: Path) -> TargetFacts:
    """Reads the checkpoint in a folder. Raises ModelError if there is none that transformers knows."""
    config = read_config(folder).get_text_config()
    return TargetFacts(folder, target_shape(folder), getattr(config, "max_position_embeddings", None))


def wrong_tensors(files: HeadFiles, draft: DraftPool) -> list[Misfit]:
    """Finds tensors that are missing, unused, or of another shape.

    The head must have canonical names and must resolve.
    """
    config = resolved(files, draft, presumed_target(files, draft))
    expected = expected_tensors(files, config)
    return [*_missing(files, expected), *_of_another_shape(files, expected), *_surplus(files, expected)]


def wrong_ids(files: HeadFiles, facts: DraftFacts) -> list[Misfit]:
    """Finds a table of draft ids that maps outside the vocabulary, or twice to one token."""
    offsets = files.tensors.get("d2t")
    table = files.tensors.get("token_map")
    if (offsets is None and table is None) or not facts.vocabulary:
        return []
    ids = table if offsets is None else offsets.long() + offsets.new_ones(len(offsets)).long().cumsum(0) - 1
    assert ids is not None
    try:
        draft_columns(files.folder, ids.long(), facts.vocabulary, range(facts.vocabulary))
    except ModelError as error:
        return [Misfit(str(error))]
    return []


def head_misfits(files: HeadFiles, facts: DraftFacts, target: TargetFacts, draft: DraftPool) -> list[Misfit]:
    """Finds misfits between a head in canonical names and a target; if its sizes fit, its loader decides."""
    found = [*_sizes(facts, target), *_depth(files, facts, target), *_borrowed(facts, target)]
    if found:
        return found
    try:
        resolved(files, draft, target.shape)
    except ModelError as error:
        return [Misfit(str(error))]
    return []


def causal_misfits(folder: Path, facts: DraftFacts, target: TargetFacts) -> list[Misfit]:
    """Finds misfits of a causal language model, whose tokens must mean the same as the target's."""
    try:
        check_draft(vocabulary(target.folder), folder)
    except (ModelError, OSError, ValueError) as error:
        return [Misfit(str(error))]
    return []


def _sizes(facts: DraftFacts, target: TargetFacts) -> Iterator[Misfit]:
    shape = target.shape
    if facts.states is not None and facts.states.hidden != shape.hidden:
        yield Misfit("hidden size of the target", str(facts.states.hidden), str(shape.hidden))
    is_exact = facts.layout.method in ("eagle", "dflash")
    if facts.vocabulary is not None and is_exact and facts.vocabulary != shape.vocabulary:
        yield Misfit("vocabulary of the target", str(facts.vocabulary), str(shape.vocabulary))
    if facts.proposes is not None and not is_exact and facts.proposes > shape.vocabulary:
        yield Misfit("vocabulary of the target", f"at least {facts.proposes}", str(shape.vocabulary))


def _depth(files: HeadFiles, facts: DraftFacts, target: TargetFacts) -> Iterator[Misfit]:
    """Checks the number of layers, which determines which states exist."""
    depth = target.shape.layers
    said = {**files.config, **(files.config.get("dflash_config") or {})}.get(DEPTH_KEY)
    if said is not None and said != depth:
        yield Misfit("layers of the target", str(said), str(depth))
    read = () if facts.states is None else facts.states.layers
    last = depth if facts.layout.method == "dflash" else depth - 1  # streams exclude the final state, which is normed
    if read and max(read) > last:
        yield Misfit("states of the target", f"{list(read)}", f"0 to {last}")


def _borrowed(facts: DraftFacts, target: TargetFacts) -> Iterator[Misfit]:
    """Checks that the tensors that the head borrows exist in the target and have the head's shape."""
    stored = stored_tensors(target.folder, partial=True)
    for whose, names, what in ((facts.embedding, EMBEDDING, "embedding"), (facts.lm_head, HEAD, "LM head")):
        if whose != "the target":
            continue
        name = next((name for name in names if name in stored), None)
        expected = (facts.vocabulary or target.shape.vocabulary, facts.shape["hidden"])
        if name is None:
            yield Misfit(f"{what} that is borrowed of the target", f"one of {', '.join(names)}", "none of them")
        elif stored[name].shape != expected:
            yield Misfit(f"{what} that is borrowed of the target", f"{expected}", f"{stored[name].shape} ({name})")


def _missing(files: HeadFiles, expected: ExpectedTensors) -> Iterator[Misfit]:
    for name, shape in expected.needed.items():
        if name not in files.tensors:
            yield Misfit(f"tensor {name}", f"shape {shape}", "none")


def _of_another_shape(files: HeadFiles, expected: ExpectedTensors) -> Iterator[Misfit]:
    for name, shape in {**expected.allowed, **expected.needed}.items():
        if name not in files.tensors:
            continue
        found = tuple(files.tensors[name].shape)
        if (found if name != MASK_STATE else (files.tensors[name].numel(),)) != shape:
            yield Misfit(f"tensor {name}", f"shape {shape}", f"shape {found}")


def _surplus(files: HeadFiles, expected: ExpectedTensors) -> Iterator[Misfit]:
    """Finds tensors that the forward would not use: they belong to another kind of head."""
    known = {**expected.allowed, **expected.needed}
    for name in files.tensors if expected.is_closed else ():
        if name not in known and not name.startswith(OF_TRAINING) and not name.endswith(NEITHER):
            yield Misfit(f"tensor {name}", "none: no head of this layout computes with it", "one")
