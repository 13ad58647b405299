"""Trust over https: the configured certificate, the file of `--cacert`, or the system's authorities."""

from __future__ import annotations

import inspect
import re
import ssl
from contextvars import ContextVar
from pathlib import Path
from typing import Annotated, NamedTuple

import typer

from cairn.config.paths import expanded
from cairn.types.errors import ConfigError

_PEM = re.compile(r"-----BEGIN CERTIFICATE-----.*?-----END CERTIFICATE-----", re.DOTALL)


class TrustFlags(NamedTuple):
    """The trust flags of a command."""

    cacert: Path | None = None
    insecure: bool = False


chosen: ContextVar[TrustFlags] = ContextVar("chosen", default=TrustFlags())  # noqa: B039  (it cannot be changed)
"""The flags of the running command; they apply to every connection that it makes."""

_Cacert = Annotated[
    Path | None,
    typer.Option("--cacert", metavar="FILE", help="For https: the certificate to trust, or that of its authority."),
]
_Insecure = Annotated[bool, typer.Option("--insecure", help="For https: do not check the server's certificate.")]
TRUST_PARAMETERS = (
    inspect.Parameter("cacert", inspect.Parameter.KEYWORD_ONLY, default=None, annotation=_Cacert),
    inspect.Parameter("insecure", inspect.Parameter.KEYWORD_ONLY, default=False, annotation=_Insecure),
)
"""The flags as parameters of a command."""


def tls_context(url: str, own_certificate: str | None = None) -> ssl.SSLContext:
    """Return the TLS context for an address.

    `own_certificate`: the file of the configured server's certificate, if the address is that server's: exactly that
    certificate is trusted, whatever names are in it. `--cacert` and `--insecure` come before it. Without any of them
    SSL_CERT_FILE, SSL_CERT_DIR or the system's authorities apply. ConfigError for files that cannot be used.
    """
    flags = chosen.get()
    if not url.startswith("https:"):
        if flags != TrustFlags():
            flag = "--insecure" if flags.insecure else "--cacert"
            raise ConfigError(f"{flag} is for https, and the server is at {url}; give --host https://...")
        return ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)  # reading all authorities takes longer than a short command
    if flags.insecure:
        context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
        context.check_hostname = False
        context.verify_mode = ssl.CERT_NONE
        return context
    if flags.cacert is not None:
        return _trusting(expanded(flags.cacert), "--cacert", whole=True)
    if own_certificate is not None:
        context = _trusting(expanded(own_certificate), "tls_cert", whole=False)
        context.check_hostname = False  # the certificate itself is known, so its names do not matter
        return context
    import httpx

    try:
        return httpx.create_ssl_context(trust_env=True)
    except (ImportError, ValueError, OSError) as error:
        raise ConfigError(f"the certificates in SSL_CERT_FILE or SSL_CERT_DIR cannot be used: {error}") from error


def _trusting(path: Path, name: str, *, whole: bool) -> ssl.SSLContext:
    """Return a context that trusts a file's certificates; not `whole`: only the first, the server's own."""
    try:
        found = _PEM.findall(path.read_text("ascii"))
        if not found:
            raise ConfigError(f"{name}: {path} holds no certificate in PEM form")
        context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
        context.verify_flags |= ssl.VERIFY_X509_PARTIAL_CHAIN  # a certificate in the file need not be an authority
        context.load_verify_locations(cadata="\n".join(found if whole else found[:1]))
        return context
    except (OSError, ValueError) as error:  # ssl.SSLError is an OSError, UnicodeDecodeError a ValueError
        raise ConfigError(f"{name}: the certificate in {path} cannot be used: {error}") from None


def certificate_file(own_certificate: str | None) -> Path | None:
    """Return the certificate file that another program must trust to reach the server, or None."""
    flags = chosen.get()
    if flags.cacert is not None:
        return expanded(flags.cacert).absolute()
    return None if own_certificate is None else expanded(own_certificate).absolute()
