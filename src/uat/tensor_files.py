"""Tensors on disk: safetensors files with a checksum of their contents. Nothing is ever unpickled."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save as to_bytes
from torch import Tensor

from uat.files import FileError, parse_row, write_atomically

FORMAT = 1
CHECKSUM = "checksum"
Meta = dict[str, Any]
"""Metadata stored with the tensors: JSON values."""


class RunError(FileError):
    """A run folder or checkpoint that cannot be used; the message names the file and the problem."""


def write_tensors(path: Path, tensors: Mapping[str, Tensor], meta: Mapping[str, Any]) -> None:
    """Write tensors and their metadata, with a checksum of both."""
    on_cpu = copied(tensors, torch.device("cpu"))
    header = json.loads(json.dumps({"format": FORMAT, **meta}))
    text = json.dumps({**header, CHECKSUM: checksum(on_cpu, header)})
    write_atomically(path, to_bytes(on_cpu, metadata={"uat": text}))


def checksum(tensors: Mapping[str, Tensor], meta: Meta) -> str:
    """Checksum of the exact bits of tensors and of their metadata."""
    digest = hashlib.blake2b(json.dumps(meta, sort_keys=True).encode(), digest_size=16)
    for name in sorted(tensors):
        tensor = tensors[name]
        digest.update(f"{name} {tensor.dtype} {tuple(tensor.shape)}".encode())
        digest.update(tensor.contiguous().reshape(-1).view(torch.uint8).numpy().data)
    return digest.hexdigest()


def first_not_finite(tensors: Mapping[str, Tensor]) -> str | None:
    """Describe the first tensor that holds NaN or infinity; None if all are finite."""
    for name in sorted(tensors):
        tensor = tensors[name]
        if tensor.is_floating_point() and not (finite := tensor.isfinite()).all():
            return f"the weight {name} holds {tensor[~finite][0].item()}"
    return None


def copied(tensors: Mapping[str, Tensor], device: torch.device | None = None) -> dict[str, Tensor]:
    """Copy tensors, to another device if one is given. Tensors of one type are copied together, with one launch."""
    alike: dict[tuple[torch.dtype, torch.device], list[str]] = {}
    for name, tensor in tensors.items():
        alike.setdefault((tensor.dtype, tensor.device), []).append(name)
    copies: dict[str, Tensor] = {}
    for names in alike.values():
        joined = torch.cat([tensors[name].detach().reshape(-1) for name in names])
        parts = joined.to(device or joined.device).split([tensors[name].numel() for name in names])
        copies |= {name: part.view(tensors[name].shape) for name, part in zip(names, parts, strict=True)}
    return {name: copies[name] for name in tensors}


def read_tensors(path: Path) -> tuple[dict[str, Tensor], Meta]:
    """Read the tensors and the metadata of a file. Files written before version 0.2 have no checksum."""
    if not path.is_file():
        raise RunError(f"{path} does not exist; was the run stopped before its first checkpoint?")
    try:
        with safe_open(path, framework="pt") as file:
            text = (file.metadata() or {}).get("uat")
            tensors = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118 (not a dictionary)
    except (SafetensorError, OSError, ValueError, TypeError, RuntimeError, AttributeError, KeyError) as error:
        raise RunError(f"{path} is truncated or not a safetensors file ({error})") from None
    if text is None:
        raise RunError(f"{path} was not written by uat: its metadata has no 'uat' entry")
    try:
        meta = parse_row(text, "it")
    except ValueError:
        raise RunError(f"{path} was not written by uat, or is damaged: its safetensors metadata is garbled") from None
    if meta.get("format") != FORMAT:
        raise RunError(f"{path} has format {meta.get('format')!r:.40}; this version reads format {FORMAT}")
    expected = meta.pop(CHECKSUM, None)
    if expected is not None and expected != checksum(tensors, meta):
        raise RunError(f"{path} is damaged: its contents do not match the checksum that was written with them")
    return tensors, meta
