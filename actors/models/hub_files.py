"""Some tensors of a checkpoint on the Hugging Face hub: only the files that hold them are fetched."""

import re
from collections.abc import Callable, Collection, Sequence
from pathlib import Path

from actors.models.checkpoint import fetched, local_folder
from actors.models.weights import INDEX, indexed_files

LAYER = re.compile(r"(?:^|\.)layers\.(\d+)\.")

Wanted = Callable[[Collection[str]], Collection[str]]
"""Chooses among the names of a checkpoint's tensors."""


def folder_with(name: str, wanted: Wanted) -> Path:
    """The folder of a checkpoint that has the wanted tensors, and need not have others; a local one is as it is.

    A checkpoint in one file is fetched whole. Raises ModelError as `local_folder` does.
    """
    folder = local_folder(name, with_weights=False)
    if Path(name).expanduser().is_dir():
        return folder
    if not (folder / INDEX).is_file():
        return local_folder(name)
    files = indexed_files(folder)
    return fetched(name, sorted({files[tensor] for tensor in wanted(files.keys())}))


def of_layers(layers: Collection[int]) -> Wanted:
    """All tensors but those of other layers."""

    def wanted(names: Collection[str]) -> list[str]:
        numbers = {name: LAYER.search(name) for name in names}
        return [name for name, number in numbers.items() if number is None or int(number[1]) in layers]

    return wanted


def first_of_each(groups: Sequence[Sequence[str]]) -> Wanted:
    """Of each group the first that there is."""

    def wanted(names: Collection[str]) -> list[str]:
        found = [next((name for name in group if name in names), None) for group in groups]
        return [name for name in found if name is not None]

    return wanted
