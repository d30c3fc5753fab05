"""What a draft checkpoint is and needs, as one value that can be shown, written as data, and held against a target."""

from collections.abc import Mapping
from dataclasses import dataclass, field

from protos.states import StateDtype, StatesFormat
from tools.drafts.inspection.draft_layout import DraftLayout
from tools.drafts.inspection.header_files import StoredSize


@dataclass(frozen=True, slots=True)
class StatesRead:
    """Which hidden states of the target a head reads at each token."""

    layers: tuple[int, ...]  # as `StatesNeeded` numbers them; empty: they follow from the target's depth
    is_final: bool  # the last state, after the target's final norm; else residual streams, before any norm
    hidden: int  # of the target
    width: int  # elements of a row as the target has them
    projected: int | None  # elements after the projection that the head begins with, if it has one of its own

    @property
    def row_bytes(self) -> dict[str, dict[str, int]]:
        """On the wire, a token: by where it is projected, then by type."""
        widths = {"drafter": self.width} | ({} if self.projected is None else {"target": self.projected})
        return {
            where: {dtype.name.lower(): StatesFormat(width, dtype).row_bytes for dtype in StateDtype}
            for where, width in widths.items()
        }


@dataclass(frozen=True, slots=True)
class DraftFacts:
    """Of one checkpoint; what its layout leaves open is None or empty."""

    layout: DraftLayout
    size: StoredSize
    shape: Mapping[str, int] = field(default_factory=dict)  # sizes by name
    vocabulary: int | None = None  # of the target that it was made for
    proposes: int | None = None  # tokens of these: the draft vocabulary
    states: StatesRead | None = None
    embedding: str = ""  # whose it is
    lm_head: str = ""
    positions: int | None = None  # that it was made for
    rope: str = ""
    longest_block: int | None = None  # tokens that it predicts after a prefix, if there is a limit
    conventions: tuple[str, ...] = ()  # one line each, as the head's loader understood it
    ends_at_positions: bool = False  # whether it drafts nothing beyond its positions
    made_for: str = ""  # name of the target, if it says so


@dataclass(frozen=True, slots=True)
class Misfit:
    """Why a checkpoint cannot draft, or cannot draft for a target."""

    what: str
    expected: str = ""
    found: str = ""

    def __str__(self) -> str:
        return f"{self.what}: expected {self.expected}, found {self.found}" if self.expected else self.what
