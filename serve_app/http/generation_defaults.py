"""What a checkpoint's `generation_config.json` has for requests that leave a sampling parameter out."""

from typing import Annotated, TypeVar

from pydantic import BaseModel, ConfigDict, Field, ValidationError
from transformers import GenerationConfig

from cluster.errors import ConfigError
from protos.from_pb import REPETITION_PENALTIES

RequestT = TypeVar("RequestT", bound=BaseModel)


class GenerationDefaults(BaseModel):
    """The parameters that are taken over; None: the checkpoint has none."""

    model_config = ConfigDict(frozen=True)

    temperature: Annotated[float, Field(ge=0, le=2)] | None = None
    top_k: Annotated[int, Field(ge=-1)] | None = None
    top_p: Annotated[float, Field(gt=0, le=1)] | None = None
    min_p: Annotated[float, Field(ge=0, le=1)] | None = None
    repetition_penalty: Annotated[float, Field(ge=REPETITION_PENALTIES[0], le=REPETITION_PENALTIES[1])] | None = None

    def applied(self, request: RequestT) -> RequestT:
        """The request with these in the place of what it leaves out."""
        defaults = self.model_dump(exclude_none=True)
        missing = {name: value for name, value in defaults.items() if name not in request.model_fields_set}
        return request.model_copy(update=missing) if missing else request


NO_DEFAULTS = GenerationDefaults()


def load_defaults(model: str) -> GenerationDefaults:
    """Of a Hugging Face model id or folder; a checkpoint without the file has none."""
    try:
        known = GenerationConfig.from_pretrained(model).to_diff_dict()
    except OSError:
        return NO_DEFAULTS
    try:
        return GenerationDefaults.model_validate({name: known.get(name) for name in GenerationDefaults.model_fields})
    except ValidationError as error:
        raise ConfigError(
            f"the generation_config.json of {model} has parameters that no request may have: {error}; correct it, or"
            " set server.generation_defaults to none"
        ) from error
