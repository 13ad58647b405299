"""A running server as the command line sees it: the same calls that `LLM` has, over HTTP."""

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
    """The server at `url` (host:port is enough), or at the configured host and port.

    `model` is the one to ask, else a MODEL on the command line, else the one that the server has.
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
    """The configured certificate, where an address is that of the configured server."""
    return config.tls_cert if url is None or url == address(config) else None


def address(config: Config, *, admin: bool = False) -> str:
    """Where this machine reaches the server of a configuration, `admin` its listener for admin routes."""
    bare = (config.admin_host if admin else config.host).strip("[]")
    bare = "127.0.0.1" if bare in ("0.0.0.0", "::") else bare
    host = f"[{bare}]" if ":" in bare else bare
    scheme = "https" if config.tls_cert is not None else "http"
    return f"{scheme}://{host}:{config.admin_port if admin else config.port}"


def first_chat(models: Sequence[Mapping[str, Any]]) -> Mapping[str, Any]:
    """Of a server's models the one to talk to: the first that is made for chats, a loaded one before others."""
    chats = [one for one in models if one.get("kind") in (None, "chat")] or list(models)
    return next((one for one in chats if one.get("state", "loaded") == "loaded"), chats[0])


class Client:
    """One server, best in a `with`. Raises what the server said as a CairnError, and Unavailable if nobody answers."""

    def __init__(
        self,
        url: str,
        key: str = "",
        admin_key: str = "",
        model: str = "",
        admin_url: str = "",
        certificate: str | None = None,
    ) -> None:
        """`admin_url`: where the server answers admin routes, if that is another address. `certificate`: the file of
        the one that is trusted there."""
        self.url = (url if "://" in url else f"http://{url}").rstrip("/").removesuffix("/v1")
        try:
            parsed = httpx.URL(self.url)
        except httpx.InvalidURL:
            parsed = httpx.URL("")
        if parsed.scheme not in ("http", "https") or not parsed.host:
            raise ConfigError(f"{url!r} is not the address of a server; it should look like http://127.0.0.1:8000")
        if not (key.isascii() and admin_key.isascii()):
            raise ConfigError("the API key holds letters that an HTTP header cannot carry", field="api_key")
        self._key = key
        self._model = model
        self._admin_key, self._admin_url = admin_key, admin_url or self.url
        # Proxies are for the internet; a server of one's own is addressed directly.
        self._http = httpx.Client(timeout=_TIMEOUT, trust_env=False, verify=tls_context(self.url, certificate))

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: object, error: BaseException | None, _: object) -> None:
        self.close()
        if isinstance(error, KeyError | TypeError):  # something is missing, or another thing, than ours all have
            raise self._stranger() from error

    def close(self) -> None:
        """Close the connections."""
        self._http.close()

    def get(self, path: str, *, admin: bool = False) -> dict[str, Any]:
        """GET JSON; a 503 of /health/ready is an answer, not an error."""
        return self._read(self._whole("GET", path, admin=admin, fine=503 if path == "/health/ready" else 200))

    def text(self, path: str, *, admin: bool = False) -> str:
        """GET text."""
        return self._whole("GET", path, admin=admin).text

    def bytes(self, path: str) -> bytes:
        """GET what is perhaps no text."""
        return self._whole("GET", path).content

    def post(self, path: str, body: Mapping[str, Any], *, admin: bool = False, patient: bool = False) -> dict[str, Any]:
        """POST JSON, get JSON. `patient`: however long the server says nothing."""
        return self._read(self._whole("POST", path, body, admin=admin, patient=patient))

    def delete(self, path: str) -> None:
        """DELETE."""
        if self._read(self._whole("DELETE", path))["deleted"] is not True:
            raise self._stranger()

    def download(self, path: str, target: Path) -> None:
        """GET into a new file, which is removed again if it did not come whole. CairnError if it cannot be written."""
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
        """POST a file, get JSON. CairnError if it cannot be read."""
        try:
            with source.open("rb") as file:
                return self._read(self._whole("POST", path, file=file))
        except OSError as error:
            raise CairnError(f"{source} cannot be read: {error.strerror or error}") from error

    def turn(self, agent: str, message: Mapping[str, Any], **sampling: Any) -> HttpStream:
        """The answer of an agent to a new message, as it comes."""
        return self._stream(f"/v1/agents/{quote(agent, safe='')}/turns", {"messages": [message]}, sampling)

    def resume(self, agent: str) -> HttpStream:
        """The whole answer of an agent's interrupted turn, as it comes."""
        return self._open(f"/v1/agents/{quote(agent, safe='')}/resume", {"stream": True})

    def events(self, path: str, body: Mapping[str, Any]) -> Iterator[dict[str, Any]]:
        """POST JSON, and what is told of the work as it goes."""
        with closing(self._begin("POST", path, body, patient=True)) as response:
            yield from read_events(response, self.url)

    def send_form(self, path: str, source: Path, fields: Mapping[str, str]) -> Iterator[dict[str, Any]]:
        """POST a form with a file, and what is told of the work as it goes. CairnError if the file cannot be read."""
        try:
            with (
                source.open("rb") as file,
                closing(self._begin("POST", path, form=(source.name, file, fields), patient=True)) as response,
            ):
                yield from read_events(response, self.url)
        except OSError as error:
            raise CairnError(f"it cannot be read: {error.strerror or error}") from error

    def model(self) -> str:
        """The name of the model to ask."""
        if self._model:
            return self._model
        models = self.get("/v1/models").get("data")
        if not models:
            raise Unavailable(f"the server at {self.url} has no model")
        self._model = str(first_chat(models)["id"])
        return self._model

    def chat(self, messages: Sequence[Mapping[str, Any]], **sampling: Any) -> HttpStream:
        """The answer to a conversation, as it comes."""
        return self._stream("/v1/chat/completions", {"messages": list(messages)}, sampling)

    def generate(self, prompt: str, **sampling: Any) -> HttpStream:
        """The continuation of a text, as it comes; without `max_tokens` as long as the context allows."""
        if sampling.get("max_tokens") is None:
            told = {name: sampling[name] for name in ("parse_special",) if sampling.get(name) is not None}
            size = self.post("/tokenize", {"model": self.model(), "prompt": prompt} | told)
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
            found = response.json()
        except (ValueError, RecursionError):
            found = None
        if not isinstance(found, dict):
            raise self._stranger()
        return found

    def _stranger(self) -> CairnError:
        return CairnError(f"what answers at {self.url} is no Cairn server")

    def _whole(self, method: str, path: str, body: Mapping[str, Any] | None = None, **how: Any) -> httpx.Response:
        """An answer that is read to its end; `how` as of `_begin`."""
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
        """An answer whose body is still to be read: a success, or of status `fine`. The caller closes it."""
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
        except ValueError as error:  # half a surrogate pair, or a number that JSON has not
            raise InvalidRequest(f"this cannot be sent: {error}") from None
        try:
            response = self._http.send(request, stream=True)
        except UnicodeError:
            raise Unavailable(f"no server answers at {self.url}: no machine can have that name") from None
        except httpx.HTTPError as error:
            if _refused(error):
                raise Unavailable(f"no server answers at {self.url}; start one with: cairn serve") from None
            hint = _tls_hint(self.url, error)
            raise Unavailable(f"the server at {self.url} did not answer: {why(error)}{hint}") from None
        if not response.is_success and response.status_code != fine:
            with closing(response), self._reading():
                response.read()
            raise _error(response)
        return response

    @contextmanager
    def _reading(self) -> Iterator[None]:
        try:
            yield
        except httpx.HTTPError as error:
            raise Unavailable(f"the connection to {self.url} was lost: {why(error)}") from None


def _tls_hint(url: str, error: httpx.HTTPError) -> str:
    """What to do where one side speaks https and the other does not, or a certificate is not trusted."""
    if "CERTIFICATE_VERIFY_FAILED" in str(error):
        return "; name its certificate, or its authority's, with --cacert FILE, or trust whoever answers: --insecure"
    if url.startswith("https:") and "WRONG_VERSION_NUMBER" in str(error):
        return "; it seems to speak http: give --host http://..."
    if url.startswith("http:") and isinstance(error, httpx.RemoteProtocolError | httpx.ReadError):
        return "; if it speaks https, give --host https://..."
    return ""


def _refused(error: BaseException | None) -> bool:
    """Whether the machine is there and nobody listens."""
    while error is not None and not isinstance(error, ConnectionRefusedError):
        error = error.__cause__ or error.__context__
    return error is not None


def _error(response: httpx.Response) -> CairnError:
    """The server's own sentence as the error that its code names, or the status."""
    code, field = "", None
    try:
        error = response.json()["error"]
        message, field, code = str(error["message"]), error.get("param"), str(error.get("code"))
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError):
        message = f"the server answered {response.status_code} {response.reason_phrase}"
    if response.status_code == 401:
        message += "; give the key with CAIRN_API_KEY or --api-key @FILE"
    return by_code(code, message, field)
