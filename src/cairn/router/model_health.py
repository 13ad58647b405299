"""How the models of a server are: what keeps them from serving, what is wrong although they do, and their figures."""

from __future__ import annotations

from collections.abc import Iterator

from cairn.frontend.service import Service
from cairn.router.models import Models


def unready(models: Models) -> list[str]:
    """Why new requests would not be served well now; of several models only where that is true of all that are
    loaded, else it is a trouble."""
    if models.several:
        reasons = _reasons(models)
        found = [reason for one in reasons.values() for reason in one] if reasons and all(reasons.values()) else []
    else:
        (model,) = models.models
        found = _of_service(model.loaded.service) if model.loaded is not None else []
        if model.swapping is not None and (model.loaded is None or model.loaded.closing):
            found = [f"{model.name} is being swapped for another model"]
    return [*found, models.leaving] if models.leaving else found


def stalled(models: Models) -> bool:
    """Whether no worker gets on; of several models one that does not is a trouble."""
    workers = [bool(loaded.service.stalled) for _, loaded in models.loaded()]
    return bool(workers) and all(workers)


def troubles(models: Models) -> list[str]:
    """What does not work although requests are served. Nothing here names a place; the log and the admin's list do."""
    found = []
    for model, loaded in models.loaded():
        name = f"{model.name}: " if models.several else ""
        found += [name + trouble for trouble in loaded.service.troubles()]
    if models.several and not all(reasons := _reasons(models).values()):
        found += [reason for one in reasons for reason in one]
    return found + [f"{one.name} cannot be loaded" for one in models.models if one.state == "failed"]


def devices(models: Models) -> list[str]:
    """Return the names of the devices that loaded models are computed on, each once."""
    return list(dict.fromkeys(loaded.service.info.device for _, loaded in models.loaded()))


def metrics(models: Models) -> Iterator[tuple[str, str, str, list[tuple[str, float]]]]:
    """What is measured of the models themselves: kind, name, help, and a value for each that was ever loaded."""
    ever = [one for one in models.models if one.loads or one.failures]
    up = [(one.name, float(one.state == "loaded")) for one in ever]
    yield "gauge", "model_loaded", "1 where the model is loaded.", up
    held = [(one.name, float(one.held)) for one in ever]
    yield "gauge", "model_memory_bytes", "Memory that the loaded model takes: weights, KV pool, buffers.", held
    last = [(one.name, one.load_seconds) for one in ever]
    yield "gauge", "model_load_seconds", "How long its last load took.", last
    yield "counter", "model_loads", "Times the model was loaded.", [(one.name, float(one.loads)) for one in ever]
    failed = [(one.name, float(one.failures)) for one in ever]
    yield "counter", "model_load_failures", "Times that failed.", failed
    yield "counter", "model_swaps", "Times another took its place.", [(one.name, float(one.swaps)) for one in ever]


def _reasons(models: Models) -> dict[str, list[str]]:
    """Why each loaded model is not ready, by its name."""
    found = {}
    for model, loaded in models.loaded():
        found[model.name] = [f"{model.name}: {reason}" for reason in _of_service(loaded.service)]
    return found


def _of_service(service: Service) -> list[str]:
    """Why one model does not serve well, beside that all of them take no more requests."""
    return [reason for reason in service.unready() if reason != service.leaving]
