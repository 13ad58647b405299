"""Client of a running server, with the same calls as `LLM`, over HTTP."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import closing, contextmanager
from pathlib import Path
from typing import Any, BinaryIO, Self
from urllib.parse import quote

import httpx

from cairn.cli.connection.http_stream import HttpStream, read_events, why
from cairn.cli.connection.trust import tls_context
from cairn.config.config import Config
from cairn.config.resolve import Resolved
from cairn.types.errors import CairnError, ConfigError, InvalidRequest, Unavailable, by_code

_TIMEOUT = httpx.Timeout(10, read=600)
_PATIENT = httpx.Timeout(10, read=None)


def connect(resolved: Resolved, url: str | None = None, model: str = "") -> Client:
    """Return a client of the server at `url` (host:port is enough), or at the configured host and port.

    It asks `model`, else the MODEL of the command line, else the server's first model.
    """
    config = resolved.config
    own = address(config, admin=True) if url is None and config.admin_port is not None else ""
    certificate = own_certificate(config, url)
    url = address(config) if url is None else url
    key = config.api_key[0].reveal() if config.api_key else ""
    model = model or (config.model if resolved.source("model") == "MODEL" else "")
    admin = config.admin_key.reveal() if config.admin_key else key
    return Client(url, key, admin, model, admin_url=own, certificate=certificate)


def own_certificate(config: Config, url: str | None) -> str | None:
    """Return the configured certificate if the address is that of the configured server, else None."""
    return config.tls_cert if url is None or url == address(config) else None


def address(config: Config, *, admin: bool = False) -> str:
    """Return the URL at which this machine reaches the configured server, or with `admin` its admin listener."""
    bare = (config.admin_host if admin else config.host).strip("[]")
    bare = "127.0.0.1" if bare in ("0.0.0.0", "::") else bare
    host = f"[{bare}]" if ":" in bare else bare
    scheme = "https" if config.tls_cert is not None else "http"
    return f"{scheme}://{host}:{config.admin_port if admin else config.port}"


def first_chat(models: Sequence[Mapping[str, Any]]) -> Mapping[str, Any]:
    """Return the model of a server to talk to: the first loaded chat model, else the first chat model."""
    chats = [model for model in models if model.get("kind") in (None, "chat")] or list(models)
    return next((model for model in chats if model.get("state", "loaded") == "loaded"), chats[0])


class Client:
    """A client of one server, for a `with`. Raises the server's errors as CairnError, Unavailable if none answers."""

    def __init__(
        self,
        url: str,
        key: str = "",
        admin_key: str = "",
        model: str = "",
        admin_url: str = "",
        certificate: str | None = None,
    ) -> None:
        """Check the address and the keys; connect later.

        `admin_url`: the address of admin routes, if it is another one. `certificate`: the file of the certificate to
        trust at `url`. Raises ConfigError.
        """
        self.url = (url if "://" in url else f"http://{url}").rstrip("/").removesuffix("/v1")
        try:
            parsed = httpx.URL(self.url)
        except httpx.InvalidURL:
            parsed = httpx.URL("")
        if parsed.scheme not in ("http", "https") or not parsed.host:
            raise ConfigError(f"{url!r} is not the address of a server; it should look like http://127.0.0.1:8000")
        if not (key.isascii() and admin_key.isascii()):
            raise ConfigError("the API key has characters that an HTTP header cannot carry: use ASCII", field="api_key")
        self._key = key
        self._model = model
        self._admin_key, self._admin_url = admin_key, admin_url or self.url
        # Proxies are for the internet; one's own server is reached directly.
        self._http = httpx.Client(timeout=_TIMEOUT, trust_env=False, verify=tls_context(self.url, certificate))

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: object, error: BaseException | None, _: object) -> None:
        self.close()
        if isinstance(error, KeyError | TypeError):  # the answer lacks a field that every Cairn server sends
            raise self._not_cairn() from error

    def close(self) -> None:
        """Close the connections."""
        self._http.close()

    def get(self, path: str, *, admin: bool = False) -> dict[str, Any]:
        """Send GET and return the JSON object; a 503 of /health/ready is an answer, not an error."""
        return self._read(self._whole("GET", path, admin=admin, fine=503 if path == "/health/ready" else 200))

    def items(self, path: str) -> Iterator[dict[str, Any]]:
        """Return all items of a list, which the server sends page by page."""
        after = ""
        while True:
            page = self.get(f"{path}?limit=100{after}")
            yield from page["data"]
            last = page.get("next") or page.get("last_id")
            if not page["has_more"] or last is None:
                return
            after = f"&after={quote(str(last), safe='')}"

    def text(self, path: str, *, admin: bool = False) -> str:
        """Send GET and return the text."""
        return self._whole("GET", path, admin=admin).text

    def bytes(self, path: str) -> bytes:
        """Send GET and return the body's bytes."""
        return self._whole("GET", path).content

    def post(self, path: str, body: Mapping[str, Any], *, admin: bool = False, patient: bool = False) -> dict[str, Any]:
        """Send JSON by POST and return the JSON object. `patient`: wait for the answer without a time limit."""
        return self._read(self._whole("POST", path, body, admin=admin, patient=patient))

    def delete(self, path: str) -> None:
        """Send DELETE."""
        if self._read(self._whole("DELETE", path))["deleted"] is not True:
            raise self._not_cairn()

    def download(self, path: str, target: Path) -> None:
        """Send GET and write the body to a new file; remove it if the body is cut off. CairnError if it exists."""
        with closing(self._begin("GET", path)) as response:
            try:
                file = target.open("xb")
            except FileExistsError:
                raise CairnError(f"{target} exists already; give another name") from None
            except OSError as error:
                raise CairnError(f"{target} cannot be written: {error.strerror or error}") from error
            whole = False
            try:
                with file, self._reading():
                    for piece in response.iter_bytes():
                        file.write(piece)
                whole = True
            except OSError as error:
                raise CairnError(f"{target} cannot be written: {error.strerror or error}") from error
            finally:
                if not whole:
                    target.unlink(missing_ok=True)

    def upload(self, path: str, source: Path) -> dict[str, Any]:
        """Send a file by POST and return the JSON object. CairnError if the file cannot be read."""
        try:
            with source.open("rb") as file:
                return self._read(self._whole("POST", path, file=file))
        except OSError as error:
            raise CairnError(f"{source} cannot be read: {error.strerror or error}") from error

    def turn(self, agent: str, message: Mapping[str, Any], **sampling: Any) -> HttpStream:
        """Send a message to an agent and stream its answer."""
        return self._stream(f"/v1/agents/{quote(agent, safe='')}/turns", {"messages": [message]}, sampling)

    def resume(self, agent: str) -> HttpStream:
        """Resume an agent's interrupted turn and stream the whole answer."""
        return self._open(f"/v1/agents/{quote(agent, safe='')}/resume", {"stream": True})

    def events(self, path: str, body: Mapping[str, Any], *, admin: bool = False) -> Iterator[dict[str, Any]]:
        """Send JSON by POST and yield the events of the work."""
        with closing(self._begin("POST", path, body, admin=admin, patient=True)) as response:
            yield from read_events(response, self.url)

    def send_form(self, path: str, source: Path, fields: Mapping[str, str]) -> Iterator[dict[str, Any]]:
        """Send a form with a file and yield the events of the work. CairnError if the file cannot be read."""
        try:
            with (
                source.open("rb") as file,
                closing(self._begin("POST", path, form=(source.name, file, fields), patient=True)) as response,
            ):
                yield from read_events(response, self.url)
        except OSError as error:
            raise CairnError(f"the file cannot be read: {error.strerror or error}") from error

    def model(self) -> str:
        """Return the name of the model to ask. Unavailable if the server has none."""
        if self._model:
            return self._model
        models = self.get("/v1/models").get("data")
        if not models:
            raise Unavailable(f"the server at {self.url} has no model")
        self._model = str(first_chat(models)["id"])
        return self._model

    def chat(self, messages: Sequence[Mapping[str, Any]], **sampling: Any) -> HttpStream:
        """Stream the answer to a conversation."""
        return self._stream("/v1/chat/completions", {"messages": list(messages)}, sampling)

    def generate(self, prompt: str, **sampling: Any) -> HttpStream:
        """Stream the continuation of a text; without `max_tokens` it may fill the context."""
        if sampling.get("max_tokens") is None:
            special = sampling.get("parse_special")
            more = {} if special is None else {"parse_special": special}
            size = self.post("/tokenize", {"model": self.model(), "prompt": prompt} | more)
            sampling["max_tokens"] = max(1, size["max_model_len"] - size["count"])
        return self._stream("/v1/completions", {"prompt": prompt}, sampling)

    def _stream(self, path: str, body: dict[str, Any], sampling: Mapping[str, Any]) -> HttpStream:
        body |= {"model": self.model(), "stream": True, "stream_options": {"include_usage": True}}
        body |= {name: value for name, value in sampling.items() if value is not None}
        return self._open(path, body)

    def _open(self, path: str, body: dict[str, Any]) -> HttpStream:
        return HttpStream(self._begin("POST", path, body), self.url)

    def _read(self, response: httpx.Response) -> dict[str, Any]:
        try:
            body = response.json()
        except (ValueError, RecursionError):
            body = None
        if not isinstance(body, dict):
            raise self._not_cairn()
        return body

    def _not_cairn(self) -> CairnError:
        return CairnError(f"the server at {self.url} is not a Cairn server")

    def _whole(self, method: str, path: str, body: Mapping[str, Any] | None = None, **how: Any) -> httpx.Response:
        """Send a request and read the whole answer; `how` as in `_begin`."""
        with closing(self._begin(method, path, body, **how)) as response, self._reading():
            response.read()
        return response

    def _begin(
        self,
        method: str,
        path: str,
        body: Mapping[str, Any] | None = None,
        *,
        file: BinaryIO | None = None,
        form: tuple[str, BinaryIO, Mapping[str, str]] | None = None,
        admin: bool = False,
        patient: bool = False,
        fine: int = 200,
    ) -> httpx.Response:
        """Send a request and return the answer before its body is read; the caller closes it.

        Raises the server's error for a status that is neither a success nor `fine`, Unavailable if it does not answer.
        """
        key = self._admin_key if admin else self._key
        headers = {"authorization": f"Bearer {key}"} if key else {}
        if file is not None:
            headers["content-type"] = "application/octet-stream"
        try:
            request = self._http.build_request(
                method,
                (self._admin_url if admin else self.url) + path,
                json=body,
                content=file,
                files=None if form is None else {"file": form[:2]},
                data=None if form is None else form[2],
                headers=headers,
                timeout=_PATIENT if patient else _TIMEOUT,
            )
        except ValueError as error:  # a lone surrogate, or a number that JSON lacks
            raise InvalidRequest(f"this cannot be sent: {error}") from None
        try:
            response = self._http.send(request, stream=True)
        except UnicodeError:
            raise Unavailable(f"no server answers at {self.url}: the host name is not valid") from None
        except httpx.HTTPError as error:
            if _refused(error):
                raise Unavailable(f"no server answers at {self.url}; start one with: cairn serve") from None
            hint = _tls_hint(self.url, error)
            raise Unavailable(f"the server at {self.url} did not answer: {why(error)}{hint}") from None
        if not response.is_success and response.status_code != fine:
            with closing(response), self._reading():
                response.read()
            raise _error(response, admin)
        return response

    @contextmanager
    def _reading(self) -> Iterator[None]:
        try:
            yield
        except httpx.HTTPError as error:
            raise Unavailable(f"the connection to {self.url} was lost: {why(error)}") from None


def _tls_hint(url: str, error: httpx.HTTPError) -> str:
    """Return what to do about http against https, or a certificate that is not trusted; "" for other errors."""
    if "IP address mismatch" in str(error) or "Hostname mismatch" in str(error):
        return "; give --host a name that is in its certificate, or skip the check with --insecure"
    if "CERTIFICATE_VERIFY_FAILED" in str(error):
        return "; trust its certificate, or its authority's, with --cacert FILE; or skip the check with --insecure"
    if url.startswith("https:") and "WRONG_VERSION_NUMBER" in str(error):
        return "; it seems to speak http: give --host http://..."
    if url.startswith("http:") and isinstance(error, httpx.RemoteProtocolError | httpx.ReadError):
        return "; if it speaks https, give --host https://..."
    return ""


def _refused(error: BaseException | None) -> bool:
    """Return whether the connection was refused: the machine is there, but nothing listens."""
    while error is not None and not isinstance(error, ConnectionRefusedError):
        error = error.__cause__ or error.__context__
    return error is not None


def _error(response: httpx.Response, admin: bool = False) -> CairnError:
    """Return the server's error as the class that its code names, or an error with the status.

    `admin`: the request was sent with the admin key, or would have been.
    """
    code, field = "", None
    try:
        error = response.json()["error"]
        message, field, code = str(error["message"]), error.get("param"), str(error.get("code"))
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError):
        message = f"the server answered {response.status_code} {response.reason_phrase}"
    if response.status_code == 401:
        message = message.partition("; send it as")[0]  # which is for those who write requests
        message += f"; give the key with {'CAIRN_ADMIN_KEY' if admin else 'CAIRN_API_KEY or --api-key @FILE'}"
    return by_code(code, message, field)
