"""The certificate of a server that speaks HTTPS."""

from __future__ import annotations

import ssl

from cairn.config.config import Config
from cairn.config.paths import expanded
from cairn.types.errors import ConfigError


def check_tls(config: Config) -> None:
    """ConfigError unless there are both of certificate and key, and they can be used, or neither."""
    tls_context(config)


def tls_context(config: Config) -> ssl.SSLContext | None:
    """What connections are wrapped in; None for plain HTTP. ConfigError where the files cannot be used."""
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
    """Read certificate and key, which are named. ConfigError where they cannot be used."""
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
