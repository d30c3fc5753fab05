"""What is wrong with a file that holds a frozen model, one line a key: what was found, and what was expected."""

from difflib import get_close_matches
from typing import Any, get_args, get_origin

from pydantic import BaseModel, ValidationError
from pydantic_core import ErrorDetails


def error_lines(error: ValidationError, model: type[BaseModel], whole: str) -> list[str]:
    """Of what should have been of this kind; `whole` names it where no key is to blame."""
    return [f"{'.'.join(map(str, found['loc'])) or whole}: {_fault(found, model)}" for found in error.errors()]


def _fault(found: ErrorDetails, model: type[BaseModel]) -> str:
    if found["type"] != "extra_forbidden":
        return found["msg"]
    *sections, key = map(str, found["loc"])
    keys = _keys(sections, model)
    close = get_close_matches(key, keys, n=1)
    guess = f"did you mean {close[0]}? " if close else ""
    return f"there is no such key; {guess}expected one of {', '.join(keys)}"


def _keys(sections: list[str], model: type[BaseModel]) -> list[str]:
    """The keys of a section, named by those that it is in."""
    names = iter(sections)
    for name in names:
        annotation = model.model_fields[name].annotation
        model = _section(annotation)
        if get_origin(annotation) is dict:
            next(names)  # a name of somebody's choice
    return list(model.model_fields)


def _section(annotation: Any) -> type[BaseModel]:
    """Of a field that holds a section, a section or nothing, or sections by name."""
    kinds = [kind for kind in (annotation, *get_args(annotation)) if isinstance(kind, type)]
    return next(kind for kind in kinds if issubclass(kind, BaseModel))
