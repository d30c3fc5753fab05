"""Facts about a draft checkpoint as one value that can be shown, serialized, and compared with a target."""

from collections.abc import Mapping
from dataclasses import dataclass, field

from protos.states import StateDtype, StatesFormat
from tools.drafts.inspection.header_files import StoredSize
from tools.drafts.inspection.layout import DraftLayout


@dataclass(frozen=True, slots=True)
class StatesRead:
    """Hidden states of the target that a head reads for each token."""

    layers: tuple[int, ...]  # numbered as in `StatesNeeded`; empty: they depend on the target's depth
    is_final: bool  # True: the last state, after the final norm; False: residual streams before any norm
    hidden: int  # of the target
    width: int  # elements of an unprojected row
    projected: int | None  # elements after the head's own projection, if it has one

    @property
    def row_bytes(self) -> dict[str, dict[str, int]]:
        """Bytes per token on the wire, by where it is projected, then by type."""
        widths = {"drafter": self.width} | ({} if self.projected is None else {"target": self.projected})
        return {
            where: {dtype.name.lower(): StatesFormat(width, dtype).row_bytes for dtype in StateDtype}
            for where, width in widths.items()
        }


@dataclass(frozen=True, slots=True)
class DraftFacts:
    """Facts about one checkpoint; those that its layout leaves open are None or empty."""

    layout: DraftLayout
    size: StoredSize
    shape: Mapping[str, int] = field(default_factory=dict)  # sizes by name
    vocabulary: int | None = None  # vocabulary size of the target that it was made for
    proposes: int | None = None  # size of the draft vocabulary
    states: StatesRead | None = None
    embedding: str = ""  # where it comes from
    lm_head: str = ""
    positions: int | None = None  # positions that it was made for
    rope: str = ""
    longest_block: int | None = None  # most tokens that it predicts after a prefix; None: unlimited
    conventions: tuple[str, ...] = ()  # one line each, as described by the head's loader
    ends_at_positions: bool = False  # True if it drafts nothing beyond its positions
    made_for: str = ""  # name of the target, if the checkpoint states it


@dataclass(frozen=True, slots=True)
class Misfit:
    """Reason why a checkpoint cannot draft, or cannot draft for a target."""

    what: str
    expected: str = ""
    found: str = ""

    def __str__(self) -> str:
        return f"{self.what}: expected {self.expected}, found {self.found}" if self.expected else self.what
