"""Messages that a server prints when it starts."""

import ipaddress
import json
from types import SimpleNamespace
from typing import Any

import msgspec
import pytest

from cairn.api.lifetime import _announce, elsewhere
from cairn.config.config import Config
from cairn.system.posix import JsonLines, SystemNetwork
from tests.frontend.test_request_options import SPEC


class House:
    def addresses(self) -> list[str]:
        return ["192.168.1.5", "10.0.0.2", "2001:db8::1"]


@pytest.mark.parametrize(
    ("host", "urls"),
    [
        ("127.0.0.1", []),
        ("192.168.1.5", []),
        ("0.0.0.0", ["http://192.168.1.5:80", "http://10.0.0.2:80"]),
        ("::", ["http://192.168.1.5:80", "http://10.0.0.2:80", "http://[2001:db8::1]:80"]),
        ("[::]", ["http://192.168.1.5:80", "http://10.0.0.2:80", "http://[2001:db8::1]:80"]),
    ],
)
def test_a_server_on_every_interface_names_the_addresses_that_others_use(host: str, urls: list[str]) -> None:
    assert elsewhere(Config(host=host), 80, House()) == urls


def test_this_machines_addresses_are_addresses_of_it_and_no_loopback() -> None:
    for address in map(ipaddress.ip_address, SystemNetwork().addresses()):
        assert not address.is_loopback and not address.is_link_local


def test_without_a_list_of_interfaces_the_outgoing_address_is_announced(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(SystemNetwork, "_interfaces", staticmethod(lambda: []))
    monkeypatch.setattr(SystemNetwork, "_inet6", staticmethod(lambda: []))
    monkeypatch.setattr(SystemNetwork, "_outside", staticmethod(lambda: ["192.168.1.5", "127.0.0.1"]))
    assert SystemNetwork().addresses() == ["192.168.1.5"]


def named_m() -> Any:
    info = SimpleNamespace(device="cuda:0", device_text="NVIDIA H100: plain torch, driver 550.54, 78.00 GB free")
    return SimpleNamespace(name="m", spec=msgspec.structs.replace(SPEC, defaults={"temperature": 0.6}), info=info)


def test_the_start_says_where_and_how_the_model_is_sampled(capsys: pytest.CaptureFixture[str]) -> None:
    service = named_m()
    _announce("http://127.0.0.1:80", ["http://192.168.1.5:80"], service, Config(host="0.0.0.0", unsafe_no_auth=True))
    said = capsys.readouterr().err
    assert "From other machines: http://192.168.1.5:80/v1\n" in said
    assert (
        "Sampling where a request says nothing: temperature 0.6 (the model's own), top_k 40, top_p 0.95, min_p 0.05 "
        "(Cairn's defaults). Try:\n" in said
    )
    _announce("http://127.0.0.1:80", [], service, Config())
    said = capsys.readouterr().err
    assert "Why is the sky blue?" in said and '"stream": true, "repetition_stop": true' in said and "curl -N" in said
    assert "From other machines" not in said and "In a browser" in said and "http://127.0.0.1:80/\n" in said
    _announce("https://127.0.0.1:80", [], service, Config(tls_cert="a b.pem", tls_key="k.pem"))
    assert "curl -N --cacert 'a b.pem' https://127.0.0.1:80/v1/" in capsys.readouterr().err
    _announce("http://127.0.0.1:80", [], service, Config(page=False))
    assert "In a browser" not in capsys.readouterr().err
    _announce("http://127.0.0.1:80", [], service, Config(log_level="warning"))
    assert capsys.readouterr().err == ""
    _announce("http://0.0.0.0:80", [], service, Config(log_level="warning", host="0.0.0.0", unsafe_no_auth=True))
    assert capsys.readouterr().err.startswith("Everyone who can reach this address can use it")


def test_a_log_of_json_lines_holds_facts_and_no_greeting(
    capsys: pytest.CaptureFixture[str], caplog: pytest.LogCaptureFixture
) -> None:
    """Programs read these lines: no curl example, no page to open."""
    service = named_m()
    config = Config(host="0.0.0.0", unsafe_no_auth=True, log_format="json")
    with caplog.at_level("INFO", logger="cairn.api"):
        _announce("http://127.0.0.1:80", ["http://192.168.1.5:80"], service, config)
    assert capsys.readouterr().err == ""
    serves, opened = [json.loads(JsonLines().format(record)) for record in caplog.records]
    assert serves["message"] == "serves m at http://127.0.0.1:80"
    assert (serves["model"], serves["url"], serves["other_urls"]) == (
        "m",
        "http://127.0.0.1:80",
        ["http://192.168.1.5:80"],
    )
    assert serves["device"] == "cuda:0"
    assert opened["level"] == "warning" and "no API key is set" in opened["message"]
