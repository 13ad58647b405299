"""The command line over https: the configured certificate, `--cacert`, `--insecure`, and the errors without them."""

from __future__ import annotations

import json
import ssl
import subprocess
from pathlib import Path

import pytest

from tests.cli.test_cli import canned, elsewhere, run, sentence  # noqa: F401  (fixtures by name)

READY = '{"status": "ready", "reasons": [], "troubles": []}'


def certificate(folder: Path, name: str, alternative: str = "DNS:cairn.example") -> tuple[Path, Path]:
    """Make a self-signed certificate and its key."""
    cert, key = folder / f"{name}.pem", folder / f"{name}.key"
    made = ["openssl", "req", "-x509", "-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:P-256", "-nodes", "-days", "2"]
    subject = ["-subj", f"/CN={name}", "-addext", f"subjectAltName={alternative}"]
    files = ["-keyout", str(key), "-out", str(cert)]
    subprocess.run([*made, *subject, *files], check=True, capture_output=True)
    return cert, key


@pytest.fixture
def secure(canned, tmp_path: Path):  # noqa: F811
    """Yield an https server whose certificate names another machine; cairn.toml has its configuration."""
    import http.server
    import threading

    cert, key = certificate(tmp_path, "server")
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.load_cert_chain(cert, key)
    server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), canned)
    server.daemon_threads = True
    server.socket = context.wrap_socket(server.socket, server_side=True)
    threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.02}, daemon=True).start()
    canned.answers["/health/ready"] = (200, READY)
    canned.answers["/metrics"] = (200, "")
    canned.port = server.server_address[1]
    canned.secure = f"https://127.0.0.1:{canned.port}"
    options = f'port = {canned.port}\ntls_cert = "{cert}"\ntls_key = "{key}"\n'
    (tmp_path / "cairn.toml").write_text(options)
    yield canned
    server.shutdown()
    server.server_close()


def test_the_configured_certificate_is_trusted_and_no_other(secure, tmp_path):
    done = run("status")
    assert (done.returncode, done.stderr) == (0, "") and f"server\t{secure.secure}\n" in done.stdout
    done = run("chat", typed="/bye\n")
    assert f"The server at {secure.secure} answers, with m" in done.stderr
    certificate(tmp_path, "other")
    options = (tmp_path / "cairn.toml").read_text().replace("server.pem", "other.pem")
    (tmp_path / "cairn.toml").write_text(options)
    said = sentence(run("status"), 1)
    assert "CERTIFICATE_VERIFY_FAILED" in said and "--cacert FILE" in said and "--insecure" in said


def test_a_certificate_can_be_named_or_anyone_trusted(secure, tmp_path):
    (tmp_path / "cairn.toml").unlink()
    host = ("--host", secure.secure)
    assert "--cacert FILE" in sentence(run("status", *host), 1)
    assert run("status", *host, "--insecure").returncode == 0
    said = sentence(run("status", *host, "--cacert", str(tmp_path / "server.pem")), 1)
    assert "IP address mismatch" in said or "not valid for" in said, (
        "the certificate must name the machine that answers"
    )
    assert "give --host a name that is in its certificate" in said and "--cacert" not in said
    assert run("status", "--host", f"https://localhost:{secure.port}", "--insecure").returncode == 0


def test_a_named_certificate_with_the_right_name(canned, tmp_path, monkeypatch):  # noqa: F811
    from cairn.cli.connection.trust import TrustFlags, chosen, tls_context

    cert, _ = certificate(tmp_path, "right", "IP:127.0.0.1")
    token = chosen.set(TrustFlags(cacert=cert))
    try:
        context = tls_context("https://127.0.0.1:1")
        assert context.check_hostname and len(context.get_ca_certs()) <= 1
    finally:
        chosen.reset(token)


@pytest.mark.parametrize("flags", [("--insecure",), ("--cacert", "x.pem")])
def test_flags_of_https_are_refused_over_http(canned, flags):  # noqa: F811
    assert f"{flags[0]} is for https" in sentence(run("status", "--host", canned.url, *flags))


def test_files_that_hold_no_certificate(canned, tmp_path):  # noqa: F811
    (tmp_path / "empty.pem").write_text("nothing")
    for name, words in (("gone.pem", "cannot be used"), ("empty.pem", "no certificate in PEM form")):
        assert words in sentence(run("status", "--host", "https://127.0.0.1:1", "--cacert", str(tmp_path / name)))


def test_the_wrong_scheme_is_reported(secure, canned, tmp_path):  # noqa: F811
    (tmp_path / "cairn.toml").unlink()
    said = sentence(run("status", "--host", f"127.0.0.1:{secure.port}"), 1)
    assert "if it speaks https, give --host https://" in said, said
    said = sentence(run("status", "--insecure", "--host", canned.url.replace("http:", "https:")), 1)
    assert "it seems to speak http" in said or "did not answer" in said


def test_an_agent_gets_the_certificate_to_trust(secure, tmp_path):
    models = {"data": [{"id": "m", "max_model_len": 65536}]}
    secure.answers["/v1/models"] = (200, json.dumps(models))
    shown = run("launch", "claude", "--print").stdout
    assert f"export ANTHROPIC_BASE_URL={secure.secure}" in shown
    assert f"export NODE_EXTRA_CA_CERTS={tmp_path}/server.pem" in shown
    assert "export SSL_CERT_FILE=" in run("launch", "codex", "--print").stdout
