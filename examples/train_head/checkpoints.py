"""Checkpoint files: the head in its published layout, and the state needed to resume."""

import json
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file

from cluster.errors import ModelError
from examples.train_head.heads.draft_module import PublishedHead

STATE = "training.pt"


def write_head(folder: Path, head: PublishedHead, dtype: torch.dtype) -> None:
    """Writes a head; replaces its weights atomically."""
    folder.mkdir(parents=True, exist_ok=True)
    tensors = {
        name: (tensor.to("cpu", dtype) if tensor.is_floating_point() else tensor.cpu()).contiguous()
        for name, tensor in head.tensors.items()
    }
    unfinished = folder / "model.unfinished"
    save_file(tensors, unfinished)
    (folder / "config.json").write_text(json.dumps(head.config | {"torch_dtype": str(dtype).split(".")[1]}, indent=1))
    unfinished.replace(folder / "model.safetensors")


def write_state(folder: Path, state: dict[str, Any]) -> None:
    """Writes the training state atomically."""
    unfinished = folder / f"{STATE}.unfinished"
    torch.save(state, unfinished)
    unfinished.replace(folder / STATE)


def read_state(folder: Path, made_by: dict[str, Any]) -> dict[str, Any] | None:
    """Reads the training state; None if absent. Raises ModelError if it belongs to other options."""
    path = folder / STATE
    if not path.is_file():
        return None
    state: dict[str, Any] = torch.load(path, map_location="cpu", weights_only=True)
    if state["made_by"] != made_by:
        raise ModelError(f"{path} has options {state['made_by']}, not {made_by}; use another folder")
    return state
