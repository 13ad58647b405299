"""Access control: one layer before every route, closed by default. Which key a route wants is `Route.access`.

Without configured keys everything is open to any caller that can reach the address, which is this machine unless
`unsafe_no_auth` was given. With keys, only the health routes are open. The Host header is checked always, so that
a web page cannot reach a local server through a name it controls (DNS rebinding). Names that nobody can register and
literal addresses of this machine or of a private network cannot be rebound, so they pass.
"""

from __future__ import annotations

import hashlib
import hmac
import ipaddress
import re
import ssl
from dataclasses import dataclass
from functools import lru_cache

from cairn.api.http.call import AUTHORITY, Headers, HTTPCall, Scope, shown
from cairn.config.config import Config
from cairn.config.paths import expanded
from cairn.config.values import Secret
from cairn.types.errors import ConfigError, Forbidden, InvalidRequest, Unauthorized


def check_tls(config: Config) -> None:
    """Raise ConfigError unless certificate and key are both given and can be used, or both absent."""
    tls_context(config)


def tls_context(config: Config) -> ssl.SSLContext | None:
    """Return the TLS context for connections; None for plain HTTP.

    Raises ConfigError if the certificate or the key cannot be used.
    """
    if config.tls_cert is None and config.tls_key is None:
        return None
    if config.tls_cert is None or config.tls_key is None:
        missing = "tls_cert" if config.tls_cert is None else "tls_key"
        raise ConfigError(f"HTTPS needs tls_cert and tls_key; {missing} is missing", field=missing)
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.minimum_version = ssl.TLSVersion.TLSv1_2
    context.set_alpn_protocols(["http/1.1"])
    load_certificate(context, config)
    return context


def load_certificate(context: ssl.SSLContext, config: Config) -> None:
    """Read the certificate and the key into `context`. Raises ConfigError if they cannot be used."""
    assert config.tls_cert is not None and config.tls_key is not None
    cert, key = expanded(config.tls_cert), expanded(config.tls_key)
    try:
        context.load_cert_chain(cert, key, password=_no_password)
    except (OSError, ValueError) as error:  # SSLError is an OSError
        why = getattr(error, "reason", None) or getattr(error, "strerror", None) or str(error)
        raise ConfigError(
            f"the certificate {cert} with the key {key} cannot be used: {why}", field="tls_cert"
        ) from None


def _no_password() -> str:
    raise ValueError("the key has a password, which nobody could be asked for")


ANY = "*"
LOCAL = frozenset({"localhost", "127.0.0.1", "[::1]"})
"""Hosts that are this machine. Written without a port, they allow pages of any of its ports."""
_USUAL = {"http": "80", "https": "443"}
_ORIGIN = re.compile(r"([a-z][a-z0-9+.-]*)://(\[[0-9a-f:.]+\]|[a-z0-9_.-]+)(?::([0-9]{1,5}))?")


class Origins:
    """The origins of one server. Raises ConfigError for an origin that no page can have."""

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
        """Return whether pages of this origin may call."""
        if not origin:
            return False
        if self.any or origin in self._exact:
            return True
        found = _ORIGIN.fullmatch(origin)
        return found is not None and (found[1], found[2]) in self._ports


def _read(text: str) -> tuple[str, str, str | None]:
    """Split an origin from the options into scheme, host and port. Raises ConfigError for anything else."""
    found = _ORIGIN.fullmatch(text.lower())
    if found is None:
        raise ConfigError(
            f"cors_origins: {text!r} can never match: an origin is a scheme, a host and perhaps a port, such as "
            f"https://app.example or http://localhost:3000{_hint(text)}; '*' allows every page",
            field="cors_origins",
        )
    return found[1], found[2], found[3]


def _hint(text: str) -> str:
    """Say what is wrong with an origin, if that is plain."""
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
    """Format an origin as a browser sends it: without the scheme's default port."""
    return f"{scheme}://{host}" + (f":{int(port)}" if port is not None and port != _USUAL.get(scheme) else "")


AGENT = b"x-cairn-agent"
KEYS = (b"x-api-key", b"api-key")
"""Headers with a key, of clients of Anthropic and of Azure, beside Authorization."""
NAMES = frozenset({"localhost", "host.docker.internal"})
"""Names of this machine that no resolver of the internet answers."""
PRIVATE = tuple(
    ipaddress.ip_network(one)
    for one in (
        *("127.0.0.0/8", "10.0.0.0/8", "172.16.0.0/12", "192.168.0.0/16", "169.254.0.0/16"),
        *("::1/128", "fc00::/7", "fe80::/10"),
    )
)
"""Addresses of this machine and of private networks (RFC 1918, 3927, 4193, 4291)."""
ADMIN_KEY = b"x-cairn-admin-key"
"""Header for the admin key beside that of a tenant."""
KEY_LABEL = b"cairn tenant salt 1\0"
NAME_LABEL = b"cairn tenant name 1\0"
_BRACKETED = re.compile(r"\[([^\[\]]*)\](?::(.*))?")
_PORT = re.compile(r"[0-9]{1,5}")
_NAMES = re.compile(rb"[A-Za-z0-9_, -]{0,2000}")


@dataclass(frozen=True, slots=True)
class Tenant:
    """The tenant that a request belongs to. Tenants never share KV (`salt`) and never see each other's requests."""

    name: str
    salt: bytes


DEFAULT = Tenant("default", b"")
"""The tenant without keys, of a single key without a tenant, and of a configured tenant of this name."""


class Access:
    """The access rules of one server."""

    def __init__(self, config: Config) -> None:
        self.configure(config)

    def configure(self, config: Config) -> None:
        """Apply the rules of these options."""
        origins, tenants = Origins(config), _tenants(config)  # either may refuse: then the old rules hold
        self._origins = origins
        self._tenants = [(_digest(key), tenant) for key, tenant in tenants]
        self._admin = _digest(_bytes(config.admin_key)) if config.admin_key else None
        self._hosts = {*NAMES, _bare(config.host)}
        if config.admin_port is not None:
            self._hosts.add(_bare(config.admin_host))
        self._hosts |= {_bare(_without_port(host)) for host in config.allowed_hosts}
        self._any_host = "*" in config.allowed_hosts

    def check(self, call: HTTPCall, access: str = "key") -> None:
        """Set the call's tenant, or raise Unauthorized or Forbidden.

        A route's `access` is `open` to everybody, or needs a tenant's `key` or, on a server with keys, that of the
        `admin`.
        """
        call.share = _client(call)
        call.payer = payer_of(call.share)
        if access == "open":
            return
        if access == "admin":
            self._check_admin(call)
            return
        if not self._tenants:
            return
        given = _digest(_credential(call))
        found = None
        for digest, tenant in self._tenants:
            if hmac.compare_digest(given, digest):
                found = tenant
        if found is None:
            raise _unauthorized("an API key is needed" if not _credential(call) else "the API key is not known here")
        call.tenant = call.share = call.payer = found.name
        call.salt = found.salt

    def may_administer(self, call: HTTPCall) -> bool:
        """Return whether the call may see what belongs to all tenants.

        It may with the admin key, beside its own key or in its place; on a server without keys anybody may. Raises
        Unauthorized for a wrong admin key.
        """
        given = call.header(ADMIN_KEY)
        if self._admin is None:
            return not self._tenants
        if given is None:
            return hmac.compare_digest(_digest(_credential(call)), self._admin)
        if not hmac.compare_digest(_digest(given.strip()), self._admin):
            raise Unauthorized("the key in X-Cairn-Admin-Key is not the admin key")
        return True

    def cors(self, call: HTTPCall) -> None:
        """Add the CORS headers if the page's origin is one of the configured ones; never reflect another."""
        call.admits = self._origins.allow
        if not self._origins:
            return
        call.headers.append((b"vary", b"origin"))
        origin = (call.header(b"origin") or b"").decode("latin-1")
        if self._origins.allow(origin):
            allowed = b"*" if self._origins.any else origin.encode("latin-1")
            named = [] if self._origins.any else [(b"access-control-allow-credentials", b"true")]
            call.headers += [
                (b"access-control-allow-origin", allowed),
                *named,
                (
                    b"access-control-expose-headers",
                    b"x-request-id, x-cairn-request-id, retry-after, x-cairn-agent, x-cairn-turn, x-cairn-warning",
                ),
            ]

    def is_preflight(self, call: HTTPCall) -> bool:
        """Return whether the call is a CORS preflight from a configured origin, which carries no key."""
        return (
            call.scope["method"] == "OPTIONS"
            and call.header(b"access-control-request-method") is not None
            and any(name == b"access-control-allow-origin" for name, _ in call.headers)
        )

    def _check_admin(self, call: HTTPCall) -> None:
        if self._admin is None:
            if self._tenants:
                raise Forbidden("this route needs an admin key and the server has none; start it with --admin-key")
            return
        if not hmac.compare_digest(_digest(_credential(call)), self._admin):
            raise _unauthorized("this route needs the admin key")

    def check_host(self, scope: Scope) -> None:
        """Raise InvalidRequest or Forbidden unless Host, and a host in the request line, are names of this server."""
        values = [value for name, value in scope["headers"] if name == b"host"]
        if len(values) != 1:
            raise InvalidRequest("the request must carry exactly one Host header", field="Host")
        if self._any_host:
            return
        for value in (*values, *([scope[AUTHORITY]] if AUTHORITY in scope else ())):
            host = _without_port(value.decode("latin-1")).lower()
            if not self._is_ours(host, scope.get("server")):
                raise Forbidden(
                    f"the Host {shown(host)!r} is not served here; allow it with --allowed-hosts", field="Host"
                )

    def _is_ours(self, host: str, server: tuple[str, int] | None) -> bool:
        if host in self._hosts or host.endswith(".localhost") or _is_private(host):
            return True
        return server is not None and _same_address(host, server[0])


def preflight(call: HTTPCall) -> Headers:
    """Return the headers that answer a CORS preflight. Any request header is allowed: clients add some of their own."""
    asked = call.header(b"access-control-request-headers") or b""
    return [
        (b"access-control-allow-methods", b"GET, POST, PATCH, DELETE"),
        (b"access-control-allow-headers", asked if _NAMES.fullmatch(asked) else b""),
        (b"access-control-max-age", b"600"),
    ]


def check_exposure(config: Config) -> None:
    """Raise ConfigError if the server would listen beyond this machine without any key."""
    if config.admin_port is not None and config.admin_key is None and not is_local(config.admin_host):
        raise ConfigError(
            f"admin_host {config.admin_host} can be reached from other machines: set --admin-key", field="admin_host"
        )
    if has_keys(config) or config.unsafe_no_auth or is_local(config.host):
        return
    raise ConfigError(
        f"host {config.host} can be reached from other machines: set --api-key, "
        "or say --unsafe-no-auth to serve everyone without a key",
        field="host",
    )


def salts(config: Config) -> dict[str, bytes]:
    """Return the salts of all tenants that may call, by tenant name."""
    return {tenant.name: tenant.salt for tenant in (DEFAULT, *(tenant for _, tenant in _tenants(config)))}


def has_keys(config: Config) -> bool:
    """Return whether callers need a key."""
    return bool(config.api_key or config.tenants)


def has_tenants(config: Config) -> bool:
    """Return whether several tenants share the server.

    Without keys, each client of a server that other machines can reach counts as a tenant.
    """
    if not has_keys(config):
        return not is_local(config.host)
    return len({tenant.name for _, tenant in _tenants(config)}) > 1


def is_local(host: str) -> bool:
    """Return whether only this machine can reach the address."""
    bare = _bare(host)
    if bare == "localhost":
        return True
    try:
        return ipaddress.ip_address(bare).is_loopback
    except ValueError:
        return False


def payer_of(share: str) -> str:
    """Return the tenant or client address whose limits a share counts against, without the agent that it names.

    Anyone can name a new agent with each request: a name gets its own turn in the queue, never limits of its own.
    """
    return share.partition(" ")[0]


def _client(call: HTTPCall) -> str:
    """Return the identity of a caller without a key: its address, or for IPv6 its /64 network.

    All callers on this machine have one address; there the agent that the request names is added.
    """
    network, local = _network((call.scope.get("client") or ("",))[0])
    if local and (agent := call.header(AGENT)) is not None:
        return f"{network} {shown(agent.decode('latin-1'))}"
    return network


@lru_cache(1024)
def _network(address: str) -> tuple[str, bool]:
    """Return what identifies the callers at an address, and whether they are on this machine."""
    try:
        found = _ip(address)
    except ValueError:  # a socket of another kind
        return address, False
    if found.is_loopback or found.version == 4:
        return str(found), found.is_loopback
    return str(ipaddress.IPv6Network((found, 64), strict=False)), False


def _credential(call: HTTPCall) -> bytes:
    value = call.header(b"authorization")
    if value is not None:
        scheme, _, key = value.partition(b" ")
        return key.strip() if scheme.lower() == b"bearer" else b""
    return next((value.strip() for name in KEYS if (value := call.header(name)) is not None), b"")


def _bytes(key: Secret) -> bytes:
    return key.reveal().encode("utf-8", "surrogateescape")


def _digest(key: bytes) -> bytes:
    return hashlib.sha256(key).digest()


def _tenants(config: Config) -> list[tuple[bytes, Tenant]]:
    """Return each key with its tenant. Raises ConfigError for a key that belongs to two tenants.

    A named tenant's salt is derived from its name, so what it keeps survives new keys. Of several keys without a
    tenant, each is a tenant of its own, identified by the key.
    """
    bare = tuple(dict.fromkeys(_bytes(key) for key in config.api_key))
    pairs = [(key, DEFAULT if len(bare) == 1 else _of_key(key)) for key in bare]
    pairs += [(_bytes(key), tenant_named(one.name)) for one in config.tenants for key in one.keys]
    owners: dict[bytes, Tenant] = {}
    for key, tenant in pairs:
        if owners.setdefault(key, tenant) != tenant:
            raise ConfigError(
                f"one API key belongs to the tenants {owners[key].name} and {tenant.name}; a key has one tenant",
                field="tenants",
            )
    return list(owners.items())


def tenant_named(name: str) -> Tenant:
    """Return the tenant with this name in the configuration."""
    if name == DEFAULT.name:
        return DEFAULT
    return Tenant(name, hashlib.sha256(NAME_LABEL + name.encode()).digest())


def _of_key(key: bytes) -> Tenant:
    salt = hashlib.sha256(KEY_LABEL + key).digest()
    return Tenant("key-" + salt.hex()[:12], salt)


def _unauthorized(why: str) -> Unauthorized:
    return Unauthorized(f"{why}; send it as 'Authorization: Bearer KEY', 'x-api-key: KEY' or 'api-key: KEY'")


def _bare(host: str) -> str:
    return host.strip("[]").lower()


def _without_port(value: str) -> str:
    """Return the host of `host[:port]`; a value of another form is returned as it is, and matches no host."""
    host, port = value, ""
    if match := _BRACKETED.fullmatch(value):
        host, port = match[1], match[2] or ""
        try:
            ipaddress.IPv6Address(host)
        except ValueError:
            return value
    elif value.count(":") == 1:
        host, _, port = value.partition(":")
    return host if host and (not port or _PORT.fullmatch(port)) else value


def _is_private(host: str) -> bool:
    """Return whether a host is a literal address of this machine or of a private network."""
    try:
        address = _ip(host)
    except ValueError:
        return False
    return any(address in network for network in PRIVATE)


def _same_address(host: str, address: str) -> bool:
    try:
        return _ip(host) == _ip(address)
    except ValueError:
        return False


def _ip(text: str) -> ipaddress.IPv4Address | ipaddress.IPv6Address:
    """Parse an address; IPv4 addresses mapped into IPv6 (::ffff:1.2.3.4) become IPv4."""
    found = ipaddress.ip_address(text)
    return (isinstance(found, ipaddress.IPv6Address) and found.ipv4_mapped) or found
