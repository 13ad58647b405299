"""Which web pages may call the API: the origins of `--cors-origins`, as browsers write them.

An origin is a scheme, a host and a port that is not the scheme's own (html.spec.whatwg.org, 7.1.1; RFC 6454, 6.2). What
is written otherwise could never match, so it is refused when the server starts. The exception is a bare `localhost`:
it stands for pages of this machine, by whichever of its names.
"""

from __future__ import annotations

import re

from cairn.config.config import Config
from cairn.types.errors import ConfigError

ANY = "*"
LOCAL = frozenset({"localhost", "127.0.0.1", "[::1]"})
"""Hosts that are this machine: pages of any of its ports may call where no port is written."""
_USUAL = {"http": "80", "https": "443"}
_ORIGIN = re.compile(r"([a-z][a-z0-9+.-]*)://(\[[0-9a-f:.]+\]|[a-z0-9_.-]+)(?::([0-9]{1,5}))?")


class Origins:
    """The origins of one server. Raises ConfigError for one that no page can have."""

    def __init__(self, config: Config) -> None:
        local = any(one.lower() in LOCAL for one in config.cors_origins)
        given = [one for one in config.cors_origins if one not in (ANY, "null") and one.lower() not in LOCAL]
        given += [f"{scheme}://{host}" for scheme in _USUAL for host in LOCAL if local]
        written = [_read(one) for one in given]
        self.any = ANY in config.cors_origins
        self._exact = {_spelt(*one) for one in written} | ({"null"} & set(config.cors_origins))
        self._ports = {(scheme, host) for scheme, host, port in written if host in LOCAL and port is None}

    def __bool__(self) -> bool:
        return self.any or bool(self._exact)

    def allow(self, origin: str) -> bool:
        """Whether pages of this origin may call."""
        if not origin:
            return False
        if self.any or origin in self._exact:
            return True
        found = _ORIGIN.fullmatch(origin)
        return found is not None and (found[1], found[2]) in self._ports


def _read(text: str) -> tuple[str, str, str | None]:
    """Scheme, host and port of an origin as somebody wrote it."""
    found = _ORIGIN.fullmatch(text.lower())
    if found is None:
        raise ConfigError(
            f"cors_origins: {text!r} can never match: an origin is a scheme, a host and perhaps a port, such as "
            f"https://app.example or http://localhost:3000{_hint(text)}; '*' allows every page",
            field="cors_origins",
        )
    return found[1], found[2], found[3]


def _hint(text: str) -> str:
    """What is wrong with it, where that is plain."""
    scheme, _, rest = text.rpartition("://")
    if not scheme:
        return "; this one has no scheme"
    if "/" in rest:
        return "; this one has a path"
    if ANY in rest:
        return "; a star stands for nothing within one"
    if not rest.isascii():
        return "; browsers write other letters as xn--..."
    return ""


def _spelt(scheme: str, host: str, port: str | None) -> str:
    """An origin as a browser sends it: without the port that is the scheme's own."""
    return f"{scheme}://{host}" + (f":{int(port)}" if port is not None and port != _USUAL.get(scheme) else "")
