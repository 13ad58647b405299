"""What `cairn show` tells of a model: read from its files' headers, never from its weights."""

from __future__ import annotations

from collections import Counter
from pathlib import Path
from typing import TYPE_CHECKING

from cairn.cli.output import amount
from cairn.errors import ModelError

if TYPE_CHECKING:
    from cairn.types import ModelSpec

_KINDS = {"float32": "F32", "float16": "F16", "bfloat16": "BF16"}


def facts(model: str) -> list[tuple[str, str]]:
    """Names and values. Raises CairnError where it cannot be read."""
    from cairn.models import hub
    from cairn.models.spec import load_spec
    from cairn.models.weights import parameters
    from cairn.service.sampling_defaults import sampling_defaults, sentence
    from cairn.text.templates import load_text

    place = hub.locate(model)
    spec = load_spec(place, identify=False)
    tokenizer, templates = load_text(place)
    sizes = _bytes(place, spec)
    window = next((group.window for group in spec.groups if group.window), 0)
    ends = [tokenizer.decode([token], skip_special=False) for token in spec.eos_ids]
    return [
        ("model", spec.name),
        ("place", str(place)),
        ("family", spec.architecture),
        ("parameters", _count(parameters(spec))),
        ("layers", f"{spec.layers} of width {spec.hidden}, {spec.heads} heads, {spec.kv_heads} of keys and values"),
        ("context", f"{spec.context} tokens" + (f", a window of {window} in some layers" if window else "")),
        ("vocabulary", f"{spec.vocab} tokens"),
        ("quantisation", _shares(sizes)),
        ("size", amount(sizes.total())),
        ("chat template", _templates(templates)),
        ("ends", " ".join(ends) or "none: an answer goes on until its limit"),
        ("sampling", sentence(sampling_defaults(spec))),
    ]


def template_of(model: str) -> str:
    """The chat template of a model. Raises ModelError where it has none."""
    from cairn.models import hub
    from cairn.text.templates import load_templates

    templates = load_templates(hub.locate(model))
    if not templates:
        raise ModelError(f"{model} has no chat template")
    return templates["default"]


def _bytes(place: Path, spec: ModelSpec) -> Counter[str]:
    """Bytes of the tensors by number format."""
    from cairn.models.files import is_gguf
    from cairn.models.gguf import read_gguf
    from cairn.models.weights import open_weights

    found: Counter[str] = Counter()
    if is_gguf(place):
        for tensor in read_gguf(place).tensors.values():
            found[tensor.kind.name] += tensor.size
    else:
        for array in open_weights(place, spec).values():
            found[_KINDS.get(array.dtype.name, array.dtype.name)] += array.nbytes
    return found


def _shares(sizes: Counter[str]) -> str:
    """The number formats by what they take; norms and the like, which take next to nothing, are left out."""
    shares = [(kind, size / sizes.total()) for kind, size in sizes.most_common()]
    return ", ".join(f"{kind} {share:.0%}" for kind, share in shares if share >= 0.005)


def _templates(templates: dict[str, str]) -> str:
    if not templates:
        return "none: cairn generate --raw and /v1/completions only"
    tools = "tools" in templates["default"] or "tool_use" in templates
    names = sorted(templates)
    return ("with tools" if tools else "without tools") + (f" ({', '.join(names)})" if len(names) > 1 else "")


def _count(number: int) -> str:
    for unit, scale in (("billion", 1e9), ("million", 1e6)):
        if number >= scale:
            return f"{number / scale:.2f} {unit}"
    return str(number)
