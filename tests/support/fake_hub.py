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


class _Hub(http.server.BaseHTTPRequestHandler):
    """Answers the requests of huggingface_hub for one repository."""

    def __init__(
        self, repository: str, files: Mapping[str, bytes], revisions: tuple[str, ...], *arguments: object
    ) -> None:
        self.repository, self.files, self.revisions = repository, files, revisions
        super().__init__(*arguments)  # type: ignore[arg-type]

    def do_HEAD(self) -> None:
        self._answer()

    def do_GET(self) -> None:
        self._answer()

    def _answer(self) -> None:
        path = urllib.parse.unquote(urllib.parse.urlparse(self.path).path)
        api, resolve = f"/api/models/{self.repository}", f"/{self.repository}/resolve/"
        if path.startswith(f"{api}/tree/"):
            self._tree()
        elif path == api or path.startswith(f"{api}/revision/"):
            self._model(path.removeprefix(api).removeprefix("/revision/"))
        elif path.startswith(resolve):
            content = self.files.get(path.removeprefix(resolve).partition("/")[2])
            self._send(404, b"", "EntryNotFound") if content is None else self._send(200, content)
        else:
            self._send(404, b"{}", "RepoNotFound")

    def _tree(self) -> None:
        files = [
            {"type": "file", "path": name, "size": len(content), "oid": hashlib.sha256(content).hexdigest()[:40]}
            for name, content in self.files.items()
        ]
        self._send(200, json.dumps(files).encode())

    def _model(self, revision: str) -> None:
        if revision not in ("", COMMIT, *self.revisions):
            self._send(404, b"{}", "RevisionNotFound")
            return
        siblings = [{"rfilename": name} for name in self.files]
        model = {"id": self.repository, "modelId": self.repository, "sha": COMMIT, "siblings": siblings}
        self._send(200, json.dumps(model).encode())

    def _send(self, status: int, content: bytes, error: str = "") -> None:
        self.send_response(status)
        self.send_header("Content-Type", "application/json")
        self.send_header("Content-Length", str(len(content)))
        self.send_header("ETag", f'"{hashlib.sha256(content).hexdigest()}"')
        self.send_header("X-Repo-Commit", COMMIT)
        if error:
            self.send_header("X-Error-Code", error)
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(content)

    def log_message(self, *_: object) -> None:
        """Do nothing, so that the server does not log its requests."""


@contextlib.contextmanager
def fake_hub(repository: str, directory: Path, revisions: tuple[str, ...] = ("main",)) -> Iterator[str]:
    """Serve the files of a directory as a repository on the Hub. Yield the URL for the variable HF_ENDPOINT."""
    paths = [path for path in directory.rglob("*") if path.is_file()]
    files = {path.relative_to(directory).as_posix(): path.read_bytes() for path in paths}
    handler = functools.partial(_Hub, repository, files, revisions)
    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), handler) as server:
        thread = threading.Thread(target=server.serve_forever, daemon=True)
        thread.start()
        try:
            yield f"http://127.0.0.1:{server.server_address[1]}"
        finally:
            server.shutdown()
            thread.join()
