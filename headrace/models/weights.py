# SPDX-License-Identifier: Apache-2.0
"""A checkpoint as a stream of named tensors, and its way into a model's storage: each part once, or an error."""

import json
import math
import zlib
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, Protocol

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor, nn

from headrace.errors import ModelLoadError
from headrace.layers.build import LoadableLayer
from headrace.models.base import CausalLM
from headrace.models.gguf import GgufStream
from headrace.models.kv_scales import KvScales
from headrace.quantization.base import RawTensor
from headrace.utils.hub import ModelSource, weight_files

Progress = Callable[[str, int, int], None]
LABEL = "loading weights"
MAX_HEADER = 100 << 20
RUN_BYTES = 256 << 20
LISTED = 8


class WeightStream(Protocol):
    """Tensors by checkpoint name, one at a time."""

    path: Path
    """The checkpoint: a folder, or its one file."""
    total_bytes: int

    def __iter__(self) -> Iterator[tuple[str, Tensor | RawTensor]]: ...

    def where(self, name: str) -> Path:
        """The file that holds a tensor."""
        ...


class SafetensorsStream:
    """The tensors of some .safetensors files, mapped, in file order.

    A file is mapped anew for each run of tensors: its pages leave memory with the run, whatever the file's size.
    """

    def __init__(self, files: list[Path]) -> None:
        self.path = files[0].parent
        self._runs: list[tuple[Path, list[str]]] = []
        self._where: dict[str, Path] = {}
        self.total_bytes = 0
        for file in files:
            header = read_header(file)
            ends = {name: entry["data_offsets"][1] for name, entry in header.items()}
            self._runs += [(file, run) for run in _runs(ends)]
            self.total_bytes += max(ends.values(), default=0)
            for name in header:
                if name in self._where:
                    raise ModelLoadError(f"tensor {name} is in both {self._where[name]} and {file}.")
                self._where[name] = file

    def where(self, name: str) -> Path:
        """The file that holds a tensor."""
        return self._where[name]

    def __iter__(self) -> Iterator[tuple[str, Tensor]]:
        for file, names in self._runs:
            with _opened(file) as run:
                for name in names:
                    yield name, _read_tensor(run, file, name)


def _runs(ends: dict[str, int]) -> list[list[str]]:
    """Names in file order, cut where a run would pass RUN_BYTES. ends: where each tensor ends."""
    runs: list[list[str]] = []
    start = end = 0
    for name in sorted(ends, key=ends.__getitem__):
        if not runs or ends[name] - start > RUN_BYTES:
            runs.append([])
            start = end
        runs[-1].append(name)
        end = ends[name]
    return runs


def _opened(file: Path) -> Any:
    try:
        return safe_open(file, framework="pt")
    except (SafetensorError, OSError) as error:
        raise ModelLoadError(f"{file} cannot be read ({error}).") from error


def _read_tensor(run: Any, file: Path, name: str) -> Tensor:
    try:
        tensor: Tensor = run.get_tensor(name)
    except (SafetensorError, OSError, RuntimeError) as error:
        raise ModelLoadError(f"{file}: tensor {name} cannot be read ({error}).") from error
    return tensor


def read_header(file: Path) -> dict[str, dict[str, Any]]:
    """Tensor name -> {"dtype", "shape", "data_offsets"} of a .safetensors file.

    Raises ModelLoadError, naming the tensor, where the file ends before its data does.
    """
    try:
        with file.open("rb") as opened:
            length = int.from_bytes(opened.read(8), "little")
            size = file.stat().st_size
            if not 0 < length <= MAX_HEADER:
                raise ModelLoadError(f"{file} is not a safetensors file (its header would be {length:,} bytes).")
            if 8 + length > size:
                raise ModelLoadError(f"{file} is truncated: it has {size:,} bytes and a header of {length:,}.")
            header: dict[str, dict[str, Any]] = json.loads(opened.read(length))
        header.pop("__metadata__", None)
        ends = {name: 8 + length + entry["data_offsets"][1] for name, entry in header.items()}
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        raise ModelLoadError(f"{file} cannot be read as a safetensors file ({error}).") from error
    cut = sorted((end, name) for name, end in ends.items() if end > size)
    if cut:
        end, name = cut[0]
        raise ModelLoadError(
            f"{file} is truncated: it has {size:,} bytes, and tensor {name} ends at {end:,} "
            f"({len(cut)} of {len(header)} tensors are cut off); download it again."
        )
    return header


class DummyStream:
    """Stands for random weights; `load_model_weights` makes them from the model's own shapes."""

    path = Path("random weights")
    total_bytes = 0

    def where(self, name: str) -> Path:
        """No file holds them."""
        return self.path

    def __iter__(self) -> Iterator[tuple[str, Tensor | RawTensor]]:
        return iter(())


def open_checkpoint(source: ModelSource, load_format: str) -> WeightStream:
    """The weights of a model. load_format: "auto", or "dummy" for random ones. Raises ModelLoadError."""
    if load_format == "dummy":
        return DummyStream()
    if source.kind == "gguf":
        return GgufStream(source.path)
    return SafetensorsStream(weight_files(source.path))


class _Plan:
    """Which parts of which tensors a model still waits for."""

    def __init__(self, model: CausalLM) -> None:
        self.map = model.weight_map
        self.layers: dict[str, LoadableLayer] = {}
        self.parameters: dict[str, nn.Parameter] = {}
        self.shapes: dict[str, list[tuple[int, ...]]] = {}
        for prefix, module in model.named_modules():
            if isinstance(module, LoadableLayer):
                self.layers[prefix] = module
                for name, shapes in module.part_shapes().items():
                    self.shapes[f"{prefix}.{name}"] = shapes
            else:
                own = {f"{prefix}.{n}": p for n, p in module.named_parameters(recurse=False)}
                self.parameters |= own
                self.shapes |= {name: [tuple(p.shape)] for name, p in own.items()}
        self.waiting: dict[str, set[int]] = {name: set(range(len(shapes))) for name, shapes in self.shapes.items()}

    def checkpoint_name(self, name: str, part: int) -> str:
        """What a checkpoint calls part `part` of the module tensor `name`."""
        for theirs, ours, index in self.map.stacked:
            components = name.split(".")
            if index == part and ours in components and len(self.shapes[name]) > 1:
                components[components.index(ours)] = theirs
                return ".".join(components)
        return name

    def missing(self) -> list[str]:
        """Checkpoint names of the parts that have not come."""
        return [self.checkpoint_name(name, part) for name, parts in self.waiting.items() for part in sorted(parts)]

    def load(self, name: str, part: int | None, tensor: Tensor | RawTensor) -> None:
        """Store one tensor (part None: all parts at once) and finish its layer if it was the last."""
        prefix, _, local = name.rpartition(".")
        if name in self.parameters:
            self.parameters[name].data.copy_(_dense(tensor))
        elif part is None:
            self.layers[prefix].load_whole(local, tensor if local == "weight" else _dense(tensor))
        else:
            self.layers[prefix].load_part(local, part, tensor if local == "weight" else _dense(tensor))
        self.waiting[name] -= set(range(len(self.shapes[name]))) if part is None else {part}
        if prefix in self.layers and not self.waiting[name]:
            locals_ = self.layers[prefix].part_shapes()
            if not any(self.waiting[f"{prefix}.{n}"] for n in locals_):
                self.layers[prefix].finish_load()


def _dense(tensor: Tensor | RawTensor) -> Tensor:
    return tensor.dequantize() if isinstance(tensor, RawTensor) else tensor


@torch.no_grad()
def load_model_weights(model: CausalLM, stream: WeightStream, progress: Progress | None = None) -> None:
    """Fill a model's storage from a stream, for the first time or again: addresses do not change.

    progress(label, bytes done, bytes in all) is called after each tensor. Raises ModelLoadError, naming file and
    tensor, unless every part of every parameter comes exactly once, in its shape, and nothing else comes.
    """
    plan = _Plan(model)
    scales = KvScales(model)
    if isinstance(stream, DummyStream):
        _load_dummy(model, plan, progress)
        return
    unexpected: list[str] = []
    done = 0
    for name, tensor in stream:
        done += tensor.data.nbytes if isinstance(tensor, RawTensor) else tensor.nbytes
        place = plan.map.locate(name)
        if place is not None and not _is_tied_head(model, place[0]):
            target, part = place
            if scales.take(target, part, tensor, f"{stream.where(name)}: tensor {name}"):
                pass
            elif target in plan.shapes:
                _check(plan, target, part, name, tensor, stream)
                plan.load(target, part, tensor)
            else:
                unexpected.append(name)
        # The mapped pages are given back before the next tensor is opened.
        del tensor
        if progress is not None:
            progress(LABEL, min(done, stream.total_bytes), stream.total_bytes)
    _report(model, plan, unexpected, stream)
    scales.finish()


def _is_tied_head(model: CausalLM, target: str) -> bool:
    """A checkpoint may store the head that its config ties to the embedding."""
    return model.cfg.tie_word_embeddings and target.startswith("lm_head.")


def _check(
    plan: _Plan, target: str, part: int | None, name: str, tensor: Tensor | RawTensor, stream: WeightStream
) -> None:
    shapes = plan.shapes[target]
    if part is not None and part >= len(shapes):
        raise ModelLoadError(f"{stream.where(name)}: the model has no place for tensor {name}.")
    wanted = (sum(s[0] for s in shapes), *shapes[0][1:]) if part is None else shapes[part]
    came = tuple(tensor.shape)
    file = stream.where(name)
    if came != wanted:
        raise ModelLoadError(f"{file}: tensor {name} has shape {list(came)}; the config asks for {list(wanted)}.")
    parts = set(range(len(shapes))) if part is None else {part}
    if not parts <= plan.waiting[target]:
        raise ModelLoadError(f"{file}: tensor {name} comes twice (under this name or as part of {target}).")


def _report(model: CausalLM, plan: _Plan, unexpected: list[str], stream: WeightStream) -> None:
    missing = plan.missing()
    if not missing and not unexpected:
        return
    said = []
    if missing:
        said.append(f"lacks {_list(missing)}")
    if unexpected:
        files = sorted({str(stream.where(name)) for name in unexpected[:1]})
        said.append(f"has {_list(unexpected)}, which {type(model).__name__} does not know (in {files[0]})")
    raise ModelLoadError(f"the checkpoint {stream.path} {' and '.join(said)}.")


def _list(names: list[str]) -> str:
    shown = ", ".join(names[:LISTED])
    more = f" and {len(names) - LISTED} more" if len(names) > LISTED else ""
    return f"{len(names)} tensor{'s' if len(names) > 1 else ''}: {shown}{more}"


def _load_dummy(model: CausalLM, plan: _Plan, progress: Progress | None) -> None:
    """Random weights of the scale that keeps activations near 1; a name always gets the same on one kind of device."""
    total = sum(math.prod(shape) for shapes in plan.shapes.values() for shape in shapes)
    done = 0
    device = next(model.parameters()).device
    for name, shapes in plan.shapes.items():
        for part, shape in enumerate(shapes):
            plan.load(name, part, _random(plan.checkpoint_name(name, part), shape, model, device))
            done += math.prod(shape)
            if progress is not None:
                progress(LABEL, done, total)


def _random(name: str, shape: tuple[int, ...], model: CausalLM, device: torch.device) -> Tensor:
    if name.endswith("norm.weight"):
        return torch.full(shape, 1.0 - model.norm_offset, device=device)
    if len(shape) == 1:
        return torch.zeros(shape, device=device)
    generator = torch.Generator(device).manual_seed(zlib.crc32(name.encode()))
    weight = torch.empty(shape, dtype=torch.bfloat16, device=device)
    return weight.normal_(0.0, shape[-1] ** -0.5, generator=generator)
