"""Error messages for a file that holds a frozen model, one line per key: what was found, and what was expected."""

from difflib import get_close_matches
from typing import Any, get_args, get_origin

from pydantic import BaseModel, ValidationError
from pydantic_core import ErrorDetails


def error_lines(error: ValidationError, model: type[BaseModel], whole: str) -> list[str]:
    """Returns one line per error; `whole` stands for the file if no key is at fault."""
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
    """Returns the keys of a section, given the path of section names to it."""
    names = iter(sections)
    for name in names:
        annotation = model.model_fields[name].annotation
        model = _section(annotation)
        if get_origin(annotation) is dict:
            next(names)  # a key that the user chose
    return list(model.model_fields)


def _section(annotation: Any) -> type[BaseModel]:
    """Returns the section type of a field annotated with a section, an optional section, or a dict of sections."""
    kinds = [kind for kind in (annotation, *get_args(annotation)) if isinstance(kind, type)]
    return next(kind for kind in kinds if issubclass(kind, BaseModel))
