"""The callers file of a loaded server changes: a revoked caller is out within 2 s, others notice nothing."""

import itertools
import threading
import time
from pathlib import Path

import httpx
from real_server import RealServer, real_server
from tiny_bundle import write_bundle

from encserve_client import EncoderClient, UnauthenticatedError
from encserve_server.callers.keys import digest_of, make_key

EFFECT_SECONDS = 2.0


class Loading(threading.Thread):
    """Calls without a pause, with the times of answers and of refusals."""

    def __init__(self, server: RealServer, key: str) -> None:
        super().__init__(daemon=True)
        self.answered: list[float] = []
        self.refused: list[float] = []
        self._server = server
        self._key = key
        self._over = threading.Event()
        self.start()

    def run(self) -> None:
        while not self._over.is_set():
            try:
                self._call()
            except UnauthenticatedError:
                self.refused.append(time.monotonic())
                time.sleep(0.01)

    def _call(self) -> None:
        """Call until refused, or until the load ends."""
        with EncoderClient(self._server.target, token=self._key) as client:
            while not self._over.is_set():
                client.encode([[1, 2, 3]])
                self.answered.append(time.monotonic())

    def finish(self) -> None:
        self._over.set()
        self.join(timeout=30)
        assert not self.is_alive()


class LoadingByHttp(Loading):
    """The same over HTTP, on one connection."""

    def _call(self) -> None:
        url, body = f"{self._server.url}/v1/embeddings", {"input": [1, 2, 3], "model": "tiny"}
        with httpx.Client(headers={"api-key": self._key}, trust_env=False) as client:
            while not self._over.is_set():
                answer = client.post(url, json=body)
                if answer.status_code == 401:
                    raise UnauthenticatedError(answer.text)
                answer.raise_for_status()
                self.answered.append(time.monotonic())


class LoadingByStream(Loading):
    """The same by the requests of one open stream."""

    def _call(self) -> None:
        endless = itertools.takewhile(lambda _: not self._over.is_set(), itertools.repeat([1, 2, 3]))
        with EncoderClient(self._server.target, token=self._key) as client:
            for _ in client.encode_stream(endless, max_in_flight=2):
                self.answered.append(time.monotonic())


def file_of(*keys: str) -> str:
    entries = [f'[[caller]]\nname = "caller-{key[-8:]}"\nkey_sha256 = ["{digest_of(key).hex()}"]' for key in keys]
    return "\n".join(entries)


def test_a_key_that_is_revoked_under_load(tmp_path: Path) -> None:
    write_bundle(tmp_path / "models")
    stays, goes = (make_key().replace("_", "a").replace("-", "b") for _ in range(2))
    file, link = tmp_path / "callers-1.toml", tmp_path / "callers.toml"
    file.write_text(file_of(stays, goes))
    link.symlink_to(file)  # as Kubernetes mounts it
    with real_server(tmp_path / "models", "--http-port", "0", "--callers", str(link)) as server:
        kinds = (Loading, LoadingByHttp, LoadingByStream)
        staying, going, wrong = ([kind(server, key) for kind in kinds] for key in (stays, goes, "encserve-wrong"))
        time.sleep(1.0)
        (tmp_path / "callers-2.toml").write_text(file_of(stays))
        swapped = tmp_path / "next.toml"
        swapped.symlink_to(tmp_path / "callers-2.toml")
        began_at = time.monotonic()
        swapped.rename(link)
        revoked_at = time.monotonic()
        time.sleep(EFFECT_SECONDS + 1)
        for it in (*staying, *going, *wrong):
            it.finish()
        for it in going:
            assert it.answered
            assert max(it.answered) < revoked_at + EFFECT_SECONDS
            assert min(it.refused) > began_at
        for it in staying:
            assert it.answered[-1] > revoked_at + EFFECT_SECONDS
            assert not it.refused
        assert not any(it.answered for it in wrong)
        log = "".join(map(str, server.log))
    refusals = [it for it in server.log if it["message"] == "calls were refused, or failed"]
    assert sum(it["count"] for it in refusals) == sum(len(it.refused) for it in (*going, *wrong))
    assert 3 <= len(refusals) <= 10  # one immediately, then one per second
    assert stays not in log
    assert goes not in log
