"""The engine after a device failed twice: the CPU alone, or ranks on the CPU."""

from __future__ import annotations

from cairn.config.config import Config
from cairn.frontend.device_fallback import DeviceFallback
from cairn.worker import wire
from tests.kv.stored import Time


def after_two_failures(config: Config) -> tuple[list[str], Config]:
    fallback = DeviceFallback(Time())
    load = wire.LoadModel(config=config, folder="somewhere")
    fallback.load(load)
    said = [fallback.failed("rank 1 is gone") for _ in range(2)]
    return said, fallback.load(load).config


def test_ranks_on_the_cpu_start_again_however_often_one_dies() -> None:
    for device in ("cpu", "auto"):
        said, config = after_two_failures(Config(device=device, tp=2))
        assert said == ["", ""] and (config.device, config.tp) == (device, 2)


def test_ranks_on_a_device_give_way_to_the_cpu_alone() -> None:
    said, config = after_two_failures(Config(device="cuda:0", tp=2))
    assert said[0] == "" and "failed twice" in said[1] and (config.device, config.tp) == ("cpu", 1)
