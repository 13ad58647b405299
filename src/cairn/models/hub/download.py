"""The hub's HTTP interface: listing a model's files, and downloading them, resumed and verified.

`GET /api/models/ID/revision/REV?blobs=true` states names, sizes and checksums (`lfs.sha256` for large files, `blobId`,
the SHA-1 of the git blob, for small ones); `GET /ID/resolve/COMMIT/FILE` serves the bytes and honours Range.
HF_ENDPOINT names another hub; HF_TOKEN, or the file `token` in HF_HOME, opens gated models.
"""

from __future__ import annotations

import contextlib
import hashlib
import itertools
import re
import socket
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import closing, contextmanager
from dataclasses import dataclass
from email.utils import parsedate_to_datetime
from http import HTTPStatus
from pathlib import Path
from typing import Any, BinaryIO
from urllib.parse import quote, urlsplit

import httpx

from cairn.config.values import is_key
from cairn.models.hub.addresses import search_page
from cairn.system.interfaces import Clock
from cairn.types.errors import ModelError, ModelFileError

MOST_AT_ONCE = 600.0
"""Longest single wait in seconds; the hub counts requests over five minutes."""
MOST = 1800.0
"""Longest total wait of one download in seconds."""
_UNSAID = (5.0, 10.0, 20.0, 40.0)
"""Waits in seconds if a server answers 429 without saying how long."""
_RESET = re.compile(r";\s*r=0\s*;\s*t=(\d{1,9})(?:\s*[;,]|\s*\Z)")
"""The hub's header `RateLimit: "resolvers";r=0;t=55`: no requests left, more in 55 seconds."""


class Pauses:
    """Waits that an overloaded server asks for in one download: bounded, and announced."""

    def __init__(self, clock: Clock, sleep: Callable[[float], None], say: Callable[[str], None]) -> None:
        """Announce each longer wait with a sentence to `say`."""
        self._clock, self._sleep, self._say = clock, sleep, say
        self._left = MOST

    def short(self, seconds: float) -> None:
        """Wait a moment before a retry."""
        self._sleep(seconds)

    def wait_if_asked(self, status: int, headers: Mapping[str, str], attempt: int, host: str) -> bool:
        """Wait if the response to attempt `attempt` (from 0) asks for it; return whether to retry.

        Raise ModelError if the wait would be too long.
        """
        if status not in (429, 503):
            return False
        seconds = self._seconds_asked(headers)
        if seconds is None and status == 429:
            seconds = _UNSAID[attempt] if attempt < len(_UNSAID) else None
        if seconds is None:
            return False
        why = f"({status} {HTTPStatus(status).phrase})"
        if seconds > min(MOST_AT_ONCE, self._left):
            raise ModelError(f"{host} asks to wait {seconds:,.0f} s {why}; run the same command again afterwards")
        self._left -= seconds
        self._say(f"{host} asks to wait {seconds:.0f} s {why} ...")
        self._sleep(seconds)
        return True

    def _seconds_asked(self, headers: Mapping[str, str]) -> float | None:
        """Return the seconds that the headers ask for, at least 1; None if they do not say."""
        retry_after = headers.get("retry-after", "").strip()
        if re.fullmatch(r"\d{1,9}(\.\d{1,9})?", retry_after):
            return max(1.0, float(retry_after))
        with contextlib.suppress(ValueError, TypeError, OverflowError):
            until = parsedate_to_datetime(retry_after)
            try:  # the server's clock: this machine's may be wrong
                now = parsedate_to_datetime(headers.get("date", "")).timestamp()
            except (ValueError, TypeError):
                now = self._clock.time_ns() / 1e9
            return max(1.0, until.timestamp() - now)
        reset = _RESET.search(headers.get("ratelimit", ""))
        return max(1.0, float(reset[1])) if reset else None


ENDPOINT = "https://huggingface.co"

_COMMIT = re.compile(r"[0-9a-f]{40}")
_DIGEST = re.compile(r"[0-9a-f]{40}|[0-9a-f]{64}")
_CHUNK = 1 << 20
_TRIES = 5
"""Consecutive attempts without progress before a download fails."""
_BROKEN = (500, 502, 503, 504)
"""Errors of a server or proxy that may be temporary."""
_MAX_LISTING = 64 << 20
"""Bytes; a listing has a few KB."""


@dataclass(frozen=True, slots=True)
class RemoteFile:
    """A file as the hub states it; `digest` is its SHA-256, or for a small file the SHA-1 of its git blob."""

    name: str
    size: int
    digest: str

    def hasher(self) -> Any:
        """Return a hash object that yields `digest` after the whole file."""
        if len(self.digest) == 64:
            return hashlib.sha256()
        return hashlib.sha1(f"blob {self.size}\0".encode(), usedforsecurity=False)


@dataclass(frozen=True, slots=True)
class Listing:
    """What a hub states about a model's files."""

    commit: str
    files: dict[str, RemoteFile]
    """Files that can be verified, by name."""
    unstated: frozenset[str]
    """Names of files without a checksum: some mirrors omit it."""

    @property
    def names(self) -> list[str]:
        """Names of all files."""
        return [*self.files, *self.unstated]


class Hub:
    """A model on the hub, as a context manager; raises ModelError for network and server errors."""

    def __init__(self, model: str, env: Mapping[str, str], home: Path, pauses: Pauses) -> None:
        self.model = model
        self._pauses = pauses
        self.endpoint = (env.get("HF_ENDPOINT") or ENDPOINT).rstrip("/")
        token = env.get("HF_TOKEN", "").strip() or _token(home / "token")
        if token and not is_key(token):  # httpx would quote an invalid header value in its error
            raise ModelError(
                "the token of the hub (HF_TOKEN, or the file `token`) has characters that a token cannot have"
            )
        self._token = f"the token (HF_TOKEN, or {home / 'token'})" if token else ""
        headers = {"user-agent": "cairn", "accept-encoding": "identity"}
        if token:
            headers["authorization"] = f"Bearer {token}"
        if not _is_address(self.endpoint):
            raise ModelError(f"HF_ENDPOINT is {self.endpoint!r} but must be an http or https address")
        try:
            self._client = httpx.Client(headers=headers, timeout=httpx.Timeout(30, connect=10), follow_redirects=True)
        except (ImportError, ValueError, OSError, httpx.InvalidURL) as error:
            raise ModelError(
                f"the proxy or the certificates that the environment names cannot be used: {error}"
            ) from error

    def __enter__(self) -> Hub:
        return self

    def __exit__(self, *_: object) -> None:
        self._client.close()

    def listing(self) -> Listing:
        """Return the newest commit of `main` and its files."""
        url = f"{self.endpoint}/api/models/{self.model}/revision/main?blobs=true"
        try:
            with self._stream(url, tries=_TRIES) as response:
                self._check(response)
                body = b""
                for chunk in response.iter_bytes(_CHUNK):
                    body += chunk
                    if len(body) > _MAX_LISTING:
                        raise ModelError(f"{self.endpoint} lists more than {_MAX_LISTING >> 20} MiB for {self.model}")
        except httpx.HTTPError as error:
            raise self._unreachable(error) from error
        try:
            return _parse(httpx.Response(200, content=body).json())
        except (ValueError, KeyError, TypeError, AttributeError, RecursionError):
            raise ModelError(f"{self.endpoint} does not answer as a model hub does (listing of {self.model})") from None

    def check_stated(self, listed: Listing, names: Iterable[str]) -> None:
        """Raise ModelFileError if one of the wanted files exists but has no checksum."""
        for name in names:
            if name in listed.unstated:
                raise ModelFileError(
                    f"{self.endpoint} states no checksum of {name} of {self.model}, and Cairn keeps no download that "
                    "it cannot verify; name another hub with HF_ENDPOINT"
                )

    def fetch(self, commit: str, file: RemoteFile, blob: Path, progress: Callable[[int], None]) -> None:
        """Make `blob` the verified file; `progress` gets the bytes downloaded so far.

        An existing blob is verified, and fetched again only if it is damaged. A partial download in `<blob>.incomplete`
        is continued. Raise ModelFileError if the download does not match its checksum.
        """
        sized = blob.is_file() and blob.stat().st_size == file.size
        if sized and _hash_of(file, blob, progress) == file.digest:
            return
        part = blob.with_name(blob.name + ".incomplete")
        with part.open("a+b") as out:
            digest = self._fill(commit, file, out, progress)
            out.flush()
        if digest != file.digest:
            part.unlink()
            raise ModelFileError(
                f"{file.name} of {self.model} has checksum {digest}, but the hub states {file.digest}; "
                "what was downloaded is removed, try again"
            )
        part.replace(blob)

    def _fill(self, commit: str, file: RemoteFile, out: BinaryIO, progress: Callable[[int], None]) -> str:
        """Append the missing bytes, over as many connections as needed; return the digest of the whole."""
        hasher = file.hasher()
        have = _rehash(hasher, out, file.size, progress)
        out.truncate(have)
        failures = 0
        while have < file.size:
            before = have
            try:
                with closing(self._bytes(commit, file, have)) as chunks:
                    for chunk in chunks:
                        if chunk is None:  # the server starts over
                            hasher, have = file.hasher(), 0
                            out.truncate(0)
                            continue
                        beyond = have + len(chunk) > file.size
                        chunk = chunk[: file.size - have]
                        out.write(chunk)
                        hasher.update(chunk)
                        have += len(chunk)
                        progress(have)
                        if beyond:  # the server may send without end
                            break
            except httpx.HTTPError as error:
                failures = 0 if have > before else failures + 1
                if failures >= _TRIES:
                    raise self._unreachable(error, "; run the same command again to continue") from error
                self._pauses.short(min(0.1 * 2**failures, 5))
                continue
            if have < file.size:
                failures = 0 if have > before else failures + 1
                if failures >= _TRIES:
                    raise ModelError(f"{self.endpoint} sent {have} of {file.size} bytes of {file.name} and stopped")
        return str(hasher.hexdigest())

    def _bytes(self, commit: str, file: RemoteFile, start: int) -> Any:
        """Yield the file's bytes from `start`; None first if the server sends the whole file instead.

        If the server has no bytes from `start` on, only None is yielded: the partial file may not be a prefix of the
        server's.
        """
        url = f"{self.endpoint}/{self.model}/resolve/{commit}/{quote(file.name)}"
        headers = {"range": f"bytes={start}-"} if start else {}
        with self._stream(url, headers) as response:
            if response.status_code in _BROKEN:  # retried like a broken connection
                reason = f"it answered {response.status_code}"
                raise httpx.HTTPStatusError(reason, request=response.request, response=response)
            if start and response.status_code == 416:
                yield None
                return
            self._check(response, file.name)
            if start and response.status_code != 206:
                yield None
            yield from response.iter_bytes()

    @contextmanager
    def _stream(self, url: str, headers: Mapping[str, str] | None = None, tries: int = 1) -> Iterator[httpx.Response]:
        """Yield a response after any wait it asks for; on server errors the last of `tries`."""
        try:
            for attempt in itertools.count():
                with self._client.stream("GET", url, headers=headers) as response:
                    status, answered, host = response.status_code, response.headers, response.url.netloc.decode()
                    asks = status == 429 or (status == 503 and "retry-after" in answered)
                    broken = status in _BROKEN and not asks and attempt < tries - 1
                    if not asks and not broken:
                        yield response
                        return
                if broken:
                    self._pauses.short(0.1 * 2**attempt)
                elif not self._pauses.wait_if_asked(status, answered, attempt, host):
                    raise ModelError(f"{host} asks to wait ({status}); try again later")
        except (httpx.InvalidURL, UnicodeError) as error:  # of the endpoint or of a redirect
            raise self._unreachable(error) from error

    def _check(self, response: httpx.Response, file: str = "") -> None:
        """Raise ModelError unless the response succeeded: the listing, or bytes of `file`."""
        status = response.status_code
        if status in (200, 206):
            return
        code = response.headers.get("x-error-code", "")
        where = urlsplit(str(response.url)).netloc
        what = f"{file} of {self.model}" if file else self.model
        unfit = f"{self._token} is not valid or has no access"
        if code == "GatedRepo":
            text = f"{self.model} is gated on {where}: accept its terms there, "
            text += f"or {unfit}: renew it" if self._token else "then set HF_TOKEN to your token"
        elif status == 403:
            text = f"{where} refuses {what} (403 Forbidden)"
            text += f", or {unfit}" if self._token else ""
            text += "; a firewall or a proxy may be in between" if not code else ""
        elif status == 401:
            text = f"{what} does not exist on {where}, or "
            text += (
                f"{unfit}: check the name, renew or remove the token"
                if self._token
                else "is private: check the name, or set HF_TOKEN"
            )
            text += "" if file else f"; search: {search_page(self.model)}"
        elif status == 404:
            text = f"there is no {what} on {where} ({urlsplit(str(response.url)).path})"
            text += "" if file else f"; search: {search_page(self.model)}"
        else:
            text = f"{where} answered {status} for {what}"
        raise ModelError(text)

    def _unreachable(self, error: Exception, hint: str = "") -> ModelError:
        reason = str(error) or type(error).__name__
        if any(isinstance(one, socket.gaierror) for one in _causes(error)):
            reason = "its address was not found; is this machine online?"
        return ModelError(f"cannot download {self.model} from {self.endpoint}: {reason}{hint}")


def _causes(error: BaseException | None) -> Iterator[BaseException]:
    """Yield an error and what it came from."""
    while error is not None:
        yield error
        error = error.__cause__ or error.__context__


def _parse(body: dict[str, Any]) -> Listing:
    commit = str(body["sha"])
    if not _COMMIT.fullmatch(commit):
        raise ValueError(commit)
    found, unstated = {}, set()
    for sibling in body["siblings"]:
        lfs = sibling.get("lfs") or {}
        digest = str(lfs.get("sha256") or lfs.get("oid") or sibling.get("blobId") or "").removeprefix("sha256:")
        size = lfs.get("size", sibling.get("size"))
        name = str(sibling["rfilename"])
        if not digest:
            unstated.add(name)
        elif _DIGEST.fullmatch(digest) and type(size) is int and 0 <= size < 1 << 62:
            found[name] = RemoteFile(name, size, digest)
    return Listing(commit, found, frozenset(unstated))


def _is_address(url: str) -> bool:
    try:
        return urlsplit(url).scheme in ("http", "https")
    except ValueError:
        return False


def _token(file: Path) -> str:
    try:
        return file.read_text(encoding="utf-8").strip()
    except (OSError, UnicodeDecodeError):
        return ""


def _hash_of(file: RemoteFile, path: Path, progress: Callable[[int], None]) -> str:
    hasher = file.hasher()
    with path.open("rb") as source:
        _rehash(hasher, source, file.size, progress)
    return str(hasher.hexdigest())


def _rehash(hasher: Any, source: BinaryIO, size: int, progress: Callable[[int], None]) -> int:
    """Hash the bytes of `source`, at most `size`; return how many there were."""
    source.seek(0)
    have = 0
    while have < size and (chunk := source.read(min(_CHUNK, size - have))):
        hasher.update(chunk)
        have += len(chunk)
        progress(have)
    return have
