"""The hub's HTTP interface: what files a model has, and their bytes, resumed and verified.

`GET /api/models/ID/revision/REV?blobs=true` states names, sizes and checksums (`lfs.sha256` for large files, `blobId`,
the SHA-1 of the git blob, for small ones); `GET /ID/resolve/COMMIT/FILE` serves the bytes and honours Range.
HF_ENDPOINT names another hub; HF_TOKEN, or the file `token` in HF_HOME, opens gated models.
"""

from __future__ import annotations

import hashlib
import re
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import closing, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO
from urllib.parse import quote, urlsplit

import httpx

from cairn.config import is_key
from cairn.errors import ModelError, ModelFileError

ENDPOINT = "https://huggingface.co"

_COMMIT = re.compile(r"[0-9a-f]{40}")
_DIGEST = re.compile(r"[0-9a-f]{40}|[0-9a-f]{64}")
_CHUNK = 1 << 20
_TRIES = 5
"""Attempts in a row that bring no byte before a download is given up."""
_BROKEN = (500, 502, 503, 504)
"""A server, or what stands before it, that may work again in a moment."""
_MAX_LISTING = 64 << 20
"""Bytes; a listing is a few KB."""


@dataclass(frozen=True, slots=True)
class RemoteFile:
    """One file as the hub states it. `digest` is its SHA-256, or for a small file the SHA-1 of its git blob."""

    name: str
    size: int
    digest: str

    def hasher(self) -> Any:
        """A hash object that yields `digest` once it has seen the whole file."""
        if len(self.digest) == 64:
            return hashlib.sha256()
        return hashlib.sha1(f"blob {self.size}\0".encode(), usedforsecurity=False)


class Hub:
    """One model on the hub. A context manager; raises ModelError in words for whatever goes wrong on the way."""

    def __init__(self, model: str, env: Mapping[str, str], home: Path) -> None:
        self.model = model
        self.endpoint = (env.get("HF_ENDPOINT") or ENDPOINT).rstrip("/")
        token = env.get("HF_TOKEN", "").strip() or _token(home / "token")
        if token and not is_key(token):  # what could not be sent would be quoted in the error
            raise ModelError("the token of the hub (HF_TOKEN, or the file `token`) has characters that no token has")
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

    def listing(self) -> tuple[str, dict[str, RemoteFile]]:
        """The newest commit of `main` and its files by name. A file that states no checksum is left out."""
        url = f"{self.endpoint}/api/models/{self.model}/revision/main?blobs=true"
        try:
            with self._stream(url) as response:
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

    def fetch(self, commit: str, file: RemoteFile, blob: Path, progress: Callable[[int], None]) -> None:
        """Make `blob` the verified file; `progress` gets the bytes that are there so far.

        A blob that is there already is verified, and fetched only where it is damaged. A part that an earlier attempt
        left in `<blob>.incomplete` is continued. Raises ModelFileError if what the hub sent does not match its
        checksum.
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
        """Append what is missing, over as many connections as that takes; the digest of the whole."""
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
                        if beyond:  # there may be no end of it
                            break
            except httpx.HTTPError as error:
                failures = 0 if have > before else failures + 1
                if failures >= _TRIES:
                    raise self._unreachable(error, "; run the same command again to go on") from error
                time.sleep(min(0.1 * 2**failures, 5))
                continue
            if have < file.size:
                failures = 0 if have > before else failures + 1
                if failures >= _TRIES:
                    raise ModelError(f"{self.endpoint} sent {have} of {file.size} bytes of {file.name} and stopped")
        return str(hasher.hexdigest())

    def _bytes(self, commit: str, file: RemoteFile, start: int) -> Any:
        """The file's bytes from `start`; None first if the server sends the whole file instead."""
        url = f"{self.endpoint}/{self.model}/resolve/{commit}/{quote(file.name)}"
        headers = {"range": f"bytes={start}-"} if start else {}
        with self._stream(url, headers) as response:
            if response.status_code in _BROKEN:  # as a connection that breaks
                said = f"it answered {response.status_code}"
                raise httpx.HTTPStatusError(said, request=response.request, response=response)
            self._check(response)
            if start and response.status_code != 206:
                yield None
            yield from response.iter_bytes()

    @contextmanager
    def _stream(self, url: str, headers: Mapping[str, str] | None = None) -> Iterator[httpx.Response]:
        try:
            with self._client.stream("GET", url, headers=headers) as response:
                yield response
        except (httpx.InvalidURL, UnicodeError) as error:  # of the endpoint, or of where it sends us
            raise self._unreachable(error) from error

    def _check(self, response: httpx.Response) -> None:
        status = response.status_code
        if status in (200, 206):
            return
        code = response.headers.get("x-error-code", "")
        where = urlsplit(self.endpoint).netloc
        unfit = f"{self._token} is not valid or has no access"
        if status == 403 or code == "GatedRepo":
            text = f"{self.model} is gated on {where}: accept its terms there, "
            text += f"or {unfit}: renew it" if self._token else "then set HF_TOKEN to your token"
        elif status == 401:
            text = f"{self.model} does not exist on {where}, or "
            text += (
                f"{unfit}: check the name, renew or remove the token"
                if self._token
                else "is private: check the name, or set HF_TOKEN"
            )
        elif status == 404:
            text = f"there is no {self.model} on {where}, or a file of it is gone ({urlsplit(str(response.url)).path})"
        elif status == 429:
            text = f"{where} asks to wait (429 Too Many Requests); try again later"
        else:
            text = f"{where} answered {status} for {self.model}"
        raise ModelError(text)

    def _unreachable(self, error: Exception, hint: str = "") -> ModelError:
        reason = str(error) or type(error).__name__
        return ModelError(f"cannot download {self.model} from {self.endpoint}: {reason}{hint}")


def _parse(body: dict[str, Any]) -> tuple[str, dict[str, RemoteFile]]:
    commit = str(body["sha"])
    if not _COMMIT.fullmatch(commit):
        raise ValueError(commit)
    found = {}
    for sibling in body["siblings"]:
        lfs = sibling.get("lfs") or {}
        digest = str(lfs.get("sha256") or lfs.get("oid") or sibling.get("blobId") or "").removeprefix("sha256:")
        size = lfs.get("size", sibling.get("size"))
        if _DIGEST.fullmatch(digest) and type(size) is int and 0 <= size < 1 << 62:
            name = str(sibling["rfilename"])
            found[name] = RemoteFile(name, size, digest)
    return commit, found


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
    """Feed the bytes that are there, at most `size`; how many that were."""
    source.seek(0)
    have = 0
    while have < size and (chunk := source.read(min(_CHUNK, size - have))):
        hasher.update(chunk)
        have += len(chunk)
        progress(have)
    return have
