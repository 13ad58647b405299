"""Health of a server's models: reasons for not serving, other problems, and metrics."""

from __future__ import annotations

from collections.abc import Iterator

from cairn.frontend.service import Service
from cairn.served_models.loaded_models import Models


def unready(models: Models) -> list[str]:
    """Return the reasons why new requests would not be served well now.

    On a server with several models a model's reasons count only if every loaded model has one; else they are troubles.
    """
    if models.several:
        by_model = _reasons(models)
        reasons = (
            [reason for of_model in by_model.values() for reason in of_model]
            if by_model and all(by_model.values())
            else []
        )
    else:
        (model,) = models.models
        reasons = _of_service(model.loaded.service) if model.loaded is not None else []
        if model.swapping is not None and (model.loaded is None or model.loaded.closing):
            reasons = [f"{model.name} is being swapped for another model"]
    return [*reasons, models.leaving] if models.leaving else reasons


def stalled(models: Models) -> bool:
    """Return whether no worker makes progress. On a server with several models one stalled worker is a trouble."""
    workers = [bool(loaded.service.stalled) for _, loaded in models.loaded()]
    return bool(workers) and all(workers)


def troubles(models: Models) -> list[str]:
    """Return what does not work although requests are served.

    No message names a file or folder: those are in the log and in the administrator's list.
    """
    messages = []
    for model, loaded in models.loaded():
        name = f"{model.name}: " if models.several else ""
        messages += [name + trouble for trouble in loaded.service.troubles()]
    if models.several and not all(reasons := _reasons(models).values()):
        messages += [reason for of_model in reasons for reason in of_model]
    return messages + [f"{model.name} cannot be loaded" for model in models.models if model.state == "failed"]


def devices(models: Models) -> list[str]:
    """Return the names of the devices that loaded models are computed on, each once."""
    return list(dict.fromkeys(loaded.service.info.device for _, loaded in models.loaded()))


def speeds(models: Models) -> tuple[float | None, float | None]:
    """Return the prompt tokens a second that the slowest model computes, and that it loads; None if not measured."""
    services = [loaded.service for _, loaded in models.loaded()]
    computed = [1 / seconds for one in services if (seconds := one.metrics.token_seconds) > 0]
    loaded = [kv.loaded / kv.load_seconds for one in services if (kv := one.kv()).load_seconds > 0 and kv.loaded]
    return min(computed, default=None), min(loaded, default=None)


def shares(models: Models) -> bool:
    """Return whether all loaded models have a store in common with other servers."""
    loaded = [loaded.service for _, loaded in models.loaded()]
    return bool(loaded) and all(one.kv().shared is not None for one in loaded)


def queue_seconds(models: Models) -> float:
    """Return the seconds until all requests that wait now have begun, of the model whose queue takes longest."""
    return max((loaded.service.queue_seconds() for _, loaded in models.loaded()), default=0.0)


def cpu_experts(models: Models) -> list[str]:
    """Return the names of loaded models whose experts, all or some, the CPU computes beside a device."""
    return [model.name for model, loaded in models.loaded() if loaded.service.info.cpu_experts not in ("", "off")]


def metrics(models: Models) -> Iterator[tuple[str, str, str, list[tuple[str, float]]]]:
    """Yield the metrics of the models: type, name, help text, and a value for each model that was ever loaded."""
    ever = [model for model in models.models if model.loads or model.failures]
    up = [(model.name, float(model.state == "loaded")) for model in ever]
    yield "gauge", "model_loaded", "1 where the model is loaded.", up
    held = [(model.name, float(model.held)) for model in ever]
    yield "gauge", "model_memory_bytes", "Memory that the loaded model takes: weights, KV pool, buffers.", held
    last = [(model.name, model.load_seconds) for model in ever]
    yield "gauge", "model_load_seconds", "How long its last load took.", last
    yield "counter", "model_loads", "Times the model was loaded.", [(model.name, float(model.loads)) for model in ever]
    failed = [(model.name, float(model.failures)) for model in ever]
    yield "counter", "model_load_failures", "Times that failed.", failed
    yield (
        "counter",
        "model_swaps",
        "Times another took its place.",
        [(model.name, float(model.swaps)) for model in ever],
    )


def _reasons(models: Models) -> dict[str, list[str]]:
    """Return the reasons why each loaded model is not ready, by the model's name."""
    reasons = {}
    for model, loaded in models.loaded():
        reasons[model.name] = [f"{model.name}: {reason}" for reason in _of_service(loaded.service)]
    return reasons


def _of_service(service: Service) -> list[str]:
    """Return why one model does not serve well, without the reason that is common to all: a shutdown."""
    return [reason for reason in service.unready() if reason != service.leaving]
