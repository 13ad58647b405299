"""Merging an adapter into its base: a folder of safetensors with the changed weights."""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, Literal

import ml_dtypes
import numpy as np
from numpy.typing import NDArray

from cairn.models.adapters.adapter import AdapterWeights, LowRankWeight
from cairn.models.adapters.read_adapter import read_adapter
from cairn.models.families.families import AHEAD, FAMILIES
from cairn.models.families.tensor_names import own_tensors
from cairn.models.files import INDEX, NESTED, is_gguf, read_json
from cairn.models.safetensors.weights import DTYPES, open_tensors, own_name, stored_scheme, weight_files
from cairn.models.spec.config import load_spec
from cairn.types.errors import ModelError
from cairn.types.model_spec import ModelSpec

Number = Literal["BF16", "F16"]
NUMBERS: dict[str, np.dtype[Any]] = {"BF16": np.dtype(ml_dtypes.bfloat16), "F16": np.dtype(np.float16)}
_LARGEST = {"BF16": 3.38e38, "F16": 65504.0}
_ROWS = 1 << 10
"""Rows of a matrix that are merged at once."""
_MOST_COPIED = 256 << 20
"""Bytes of the largest file beside the weights that is copied."""
_NOT_COPIED = (".safetensors", ".bin", ".pt", ".pth", ".ckpt", ".gguf", ".onnx", ".h5", ".msgpack")

Change = tuple[NDArray[np.intp], LowRankWeight]
"""Rows of a stored matrix, and what is added to them in that order."""
Progress = Callable[[int, int], None]
"""Called with the number of bytes written and the total."""


def merge(base: Path, place: Path, out: Path, number: Number | None = None, progress: Progress | None = None) -> int:
    """Write `base` with the adapter at `place` to the new folder `out`, whole or not at all; return its weights' bytes.

    `number`: what all weights are written in; None: the base's own 16-bit numbers, or BF16. Raise `ModelError` for a
    base without plain weights, an adapter that does not fit, or a sum that the numbers cannot hold.
    """
    if is_gguf(base) or not base.is_dir():
        raise ModelError(
            f"{base}: an adapter is merged into a folder of safetensors; give the one that the file is from"
        )
    spec = load_spec(base, identify=False)
    if spec.encoder is not None or stored_scheme(base, spec) is not None:
        raise ModelError(f"{base}: its weights are quantised or an encoder's; an adapter is merged into plain numbers")
    if out.exists():
        raise ModelError(f"{out} exists already; name a new folder")
    adapter = read_adapter(place, spec)
    files = weight_files(base)
    chosen: Number = number or _usual(files)
    fresh = out.with_name(f".{out.name}.{os.getpid()}")
    try:
        fresh.mkdir(parents=True)
        size = _write_all(spec, adapter, files, fresh, chosen, progress or (lambda done, total: None))
        _copy_others(base, fresh, chosen)
        fresh.replace(out)
    except OSError as error:
        raise ModelError(f"{out} cannot be written: {error.strerror or error}") from error
    finally:
        shutil.rmtree(fresh, ignore_errors=True)
    return size


def _usual(files: list[Path]) -> Number:
    """Return the 16-bit numbers that most of the files' weights have; BF16 if there are none."""
    bytes_of = {
        name: sum(one.nbytes for path in files for one in open_tensors(path).values() if one.dtype == dtype)
        for name, dtype in NUMBERS.items()
    }
    return "F16" if bytes_of["F16"] > bytes_of["BF16"] else "BF16"


def _write_all(
    spec: ModelSpec, adapter: AdapterWeights, files: list[Path], out: Path, number: Number, progress: Progress
) -> int:
    """Write every file of weights under its own name. Raise `ModelError` if a matrix of the adapter is not there."""
    every = {path: open_tensors(path) for path in files}
    total = sum(2 * one.size for tensors in every.values() for one in tensors.values())
    left, done = set(adapter.parts), 0
    for path, tensors in every.items():
        changes: dict[str, list[Change]] = {}
        for name, array in tensors.items():
            if array.dtype not in DTYPES.values():
                raise ModelError(f"{path}: the tensor {name[:120]!r} has no plain numbers")
            changes[name] = list(_changes(spec, adapter, name, array, left))
        done += _write(out / path.name, tensors, changes, number)
        progress(done, total)
    if left:
        raise ModelError(f"{adapter.place}: {min(left)} is not in the weights of {spec.name} as a matrix of its own")
    return total


def _changes(
    spec: ModelSpec, adapter: AdapterWeights, stored: str, array: NDArray[Any], left: set[str]
) -> Iterator[Change]:
    """Yield what the adapter adds to the rows of a stored tensor, which may hold several of ours."""
    if array.ndim != 2:
        return
    ahead = bool(FAMILIES[spec.architecture].ahead) * AHEAD
    numbers = np.arange(len(array), dtype=np.intp)[:, None]
    for name, rows in own_tensors(spec, ahead, own_name(stored, spec), numbers):
        part = adapter.parts.get(name.removesuffix(".weight"))
        if part is not None and name.endswith(".weight"):
            left.discard(name.removesuffix(".weight"))
            yield rows.reshape(-1), part


def _write(path: Path, tensors: dict[str, NDArray[Any]], changes: dict[str, list[Change]], number: Number) -> int:
    """Write one safetensors file; return the bytes of its data."""
    at = 0
    header: dict[str, Any] = {"__metadata__": {"format": "pt"}}
    for name, array in tensors.items():
        size = 2 * array.size
        header[name] = {"dtype": number, "shape": list(array.shape), "data_offsets": [at, at + size]}
        at += size
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % 8)
    with path.open("wb") as file:
        file.write(len(text).to_bytes(8, "little") + text)
        for name, array in tensors.items():
            for rows in _merged(path, name, array, changes[name], number):
                file.write(rows.tobytes())
        file.flush()
        os.fsync(file.fileno())
    return at


def _merged(
    path: Path, name: str, array: NDArray[Any], changes: list[Change], number: Number
) -> Iterator[NDArray[Any]]:
    """Yield the changed rows of a tensor in the numbers to write, some at a time."""
    for first in range(0, len(array), _ROWS) if array.ndim > 1 else (0,):
        piece = (array[first : first + _ROWS] if array.ndim > 1 else array).astype(np.float32)
        for rows, part in changes:
            here = np.flatnonzero((rows >= first) & (rows < first + len(piece)))
            piece[rows[here] - first] += part.up[here] @ part.down
        if np.abs(piece).max(initial=0) > _LARGEST[number]:
            raise ModelError(f"{path.name}: {name[:120]} has numbers beyond the largest of {number}; choose BF16")
        yield piece.astype(NUMBERS[number])


def _copy_others(base: Path, out: Path, number: Number) -> None:
    """Copy what lies beside the weights and in subfolders, with the numbers' name in config.json."""
    for path in base.iterdir():
        plain = path.is_file() and not path.name.startswith(("adapter_", ".")) and path.suffix not in _NOT_COPIED
        if plain and path.name not in ("config.json", INDEX) and path.stat().st_size <= _MOST_COPIED:
            shutil.copyfile(path, out / path.name)
    for path in base.glob("*/*"):
        name = path.relative_to(base).as_posix()
        if NESTED.fullmatch(name) and path.is_file():
            (out / name).parent.mkdir(exist_ok=True)
            shutil.copyfile(path, out / name)
    named = {"BF16": "bfloat16", "F16": "float16"}[number]
    config = read_json(base / "config.json")
    config |= {key: named for key in ("torch_dtype", "dtype") if key in config}
    (out / "config.json").write_text(json.dumps(config, indent=2))
    if (base / INDEX).is_file():
        index = read_json(base / INDEX)
        size = sum(2 * one.size for path in out.glob("*.safetensors") for one in open_tensors(path).values())
        (out / INDEX).write_text(json.dumps(index | {"metadata": {"total_size": size}}, indent=2))
