"""A local HTTP server that imitates the Hugging Face Hub with one repository."""

import contextlib
import functools
import hashlib
import http.server
import json
import threading
import urllib.parse
from collections.abc import Iterator, Mapping
from pathlib import Path

COMMIT = "0123456789abcdef0123456789abcdef01234567"

_CHUNK_BYTES = 64 * 1024
_MESSAGES = {401: "Invalid credentials in Authorization header"}


class Hub:
    """The state of the server. A test may change it while the server runs.

    Attributes:
        endpoint: The URL for the variable HF_ENDPOINT.
        commits: The commit of each branch and tag.
        files: The files of each commit, by path.
        token: The token that callers must send; None if the repository is public.
        is_gated: Whether the server refuses every caller, with or without a token.
        cut_after: If set, the next reply with more bytes ends early, after this number of bytes.
        is_cut: Whether every reply with more than 64 KiB ends after its headers.
        hold_after: If set, replies with more bytes pause after this number of bytes, until `go_on` is set.
        go_on: See `hold_after`.
        sent: The path of each request for a file's content, and the first byte that was requested.
    """

    def __init__(self, repository: str) -> None:
        """Create a repository without commits."""
        self.repository = repository
        self.endpoint = ""
        self.commits: dict[str, str] = {}
        self.files: dict[str, dict[str, bytes]] = {}
        self.token: str | None = None
        self.is_gated = False
        self.cut_after: int | None = None
        self.is_cut = False
        self.hold_after: int | None = None
        self.go_on = threading.Event()
        self.sent: list[tuple[str, int]] = []

    def commit(self, directory: Path, *revisions: str, commit: str = COMMIT) -> None:
        """Store the files of a directory as a commit, and point branches and tags to the commit."""
        paths = [path for path in directory.rglob("*") if path.is_file()]
        self.files[commit] = {path.relative_to(directory).as_posix(): path.read_bytes() for path in paths}
        self.commits |= dict.fromkeys((*revisions, commit), commit)


class _Handler(http.server.BaseHTTPRequestHandler):
    """Answers the requests of huggingface_hub for one repository."""

    protocol_version = "HTTP/1.1"

    def __init__(self, hub: Hub, *arguments: object) -> None:
        self.hub = hub
        super().__init__(*arguments)  # type: ignore[arg-type]

    def do_HEAD(self) -> None:
        self._answer()

    def do_GET(self) -> None:
        self._answer()

    def _answer(self) -> None:
        hub = self.hub
        path = urllib.parse.unquote(urllib.parse.urlparse(self.path).path)
        api, resolve = f"/api/models/{hub.repository}", f"/{hub.repository}/resolve/"
        if not path.startswith((api, resolve)):
            self._send(404, b"{}", "RepoNotFound")
        elif hub.is_gated:
            self._send(403, b"{}", "GatedRepo")
        elif hub.token is not None and self.headers.get("Authorization") != f"Bearer {hub.token}":
            # Without a token, the hub reports a private repository as missing.
            self._send(401, b"{}", "" if "Authorization" in self.headers else "RepoNotFound")
        elif path.startswith(resolve):
            revision, _, name = path.removeprefix(resolve).partition("/")
            self._file(hub.commits.get(revision), name)
        else:
            self._api(path.removeprefix(api))

    def _api(self, path: str) -> None:
        kind, _, revision = path.removeprefix("/").partition("/")
        commit = self.hub.commits.get(revision or "main")
        if commit is None:
            self._send(404, b"{}", "RevisionNotFound")
            return
        files = self.hub.files[commit]
        if kind == "tree":
            tree = [
                {"type": "file", "path": name, "size": len(content), "oid": hashlib.sha256(content).hexdigest()[:40]}
                for name, content in files.items()
            ]
            self._send(200, json.dumps(tree).encode())
        else:
            siblings = [{"rfilename": name} for name in files]
            name = self.hub.repository
            self._send(200, json.dumps({"id": name, "modelId": name, "sha": commit, "siblings": siblings}).encode())

    def _file(self, commit: str | None, name: str) -> None:
        content = None if commit is None else self.hub.files[commit].get(name)
        if content is None:
            self._send(404, b"", "EntryNotFound")
            return
        first = int(self.headers.get("Range", "bytes=0-").removeprefix("bytes=").partition("-")[0])
        if self.command == "GET":
            self.hub.sent.append((name, first))
        self._send(206 if first else 200, content, commit=commit or "", first=first)

    def _send(self, status: int, content: bytes, error: str = "", *, commit: str = COMMIT, first: int = 0) -> None:
        self.send_response(status)
        self.send_header("Content-Type", "application/json")
        self.send_header("Content-Length", str(len(content) - first))
        self.send_header("ETag", f'"{hashlib.sha256(content).hexdigest()}"')
        self.send_header("X-Repo-Commit", commit)
        if first:
            self.send_header("Content-Range", f"bytes {first}-{len(content) - 1}/{len(content)}")
        if error:
            self.send_header("X-Error-Code", error)
        elif status in _MESSAGES:
            self.send_header("X-Error-Message", _MESSAGES[status])
        self.end_headers()
        if self.command != "HEAD":
            self._write(content[first:])

    def _write(self, content: bytes) -> None:
        hub = self.hub
        with contextlib.suppress(ConnectionError):  # the client was killed
            if hub.is_cut and len(content) > _CHUNK_BYTES:
                self.close_connection = True
                return
            for start in range(0, len(content), _CHUNK_BYTES):
                if hub.hold_after is not None and start >= hub.hold_after:
                    hub.go_on.wait()
                if hub.cut_after is not None and start >= hub.cut_after:
                    hub.cut_after = None
                    self.close_connection = True
                    return
                self.wfile.write(content[start : start + _CHUNK_BYTES])

    def log_message(self, *_: object) -> None:
        """Do nothing, so that the server does not log its requests."""


@contextlib.contextmanager
def open_hub(repository: str) -> Iterator[Hub]:
    """Start a fake hub with an empty repository. The test adds the commits."""
    hub = Hub(repository)
    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), functools.partial(_Handler, hub)) as server:
        hub.endpoint = f"http://127.0.0.1:{server.server_address[1]}"
        thread = threading.Thread(target=server.serve_forever, daemon=True)
        thread.start()
        try:
            yield hub
        finally:
            hub.go_on.set()
            server.shutdown()
            thread.join()


@contextlib.contextmanager
def fake_hub(repository: str, directory: Path, revisions: tuple[str, ...] = ("main",)) -> Iterator[str]:
    """Start a fake hub with the files of a directory as a repository. Yield the URL for the variable HF_ENDPOINT."""
    with open_hub(repository) as hub:
        hub.commit(directory, *revisions)
        yield hub.endpoint


def hub_variables(endpoint: str, cache: Path, *, offline: bool = False) -> Mapping[str, str]:
    """Return the environment variables of a process that uses a fake hub and a folder as huggingface_hub's cache."""
    return {
        "HF_ENDPOINT": endpoint,
        "HF_HOME": str(cache),
        "HF_HUB_DISABLE_XET": "1",
        "HF_HUB_DISABLE_TELEMETRY": "1",
        "HF_HUB_OFFLINE": str(int(offline)),
    }
