"""Counts the server's own functions that run for one short text over gRPC, pooled: which, where, and how often.

    python scripts/count_hot_path.py                        a fake engine, of tests/support
    python scripts/count_hot_path.py --bundle models/all-MiniLM-L6-v2/1

Python's profiler sees every call of every thread, after warm-up; of many calls the fewest functions count, since a
timer or a gauge may run beside any of them. A coroutine that goes on after it has waited is called once more.
"""

import argparse
import asyncio
import sys
import tempfile
import threading
from collections import Counter
from pathlib import Path
from types import CodeType, FrameType
from typing import Any

import grpc

import encserve_server
from encserve_proto.v1 import encoder_pb2 as pb
from encserve_server.app import App
from encserve_server.repository.loading import load_model
from encserve_server.repository.manager import Loader
from encserve_server.settings import Settings

SOURCE = str(Path(encserve_server.__file__).parent)
SUPPORT = Path(__file__).parent.parent / "tests/support"
ENCODE = "/encserve.v1.EncoderService/Encode"
# They run whether or not there is a call.
BESIDE = {"telemetry/lag.py", "telemetry/page.py", "rpc/health.py", "repository/manager.py", "system/clock.py:sleep"}
WARM_UP_CALLS = 50
CALLS = 50

Counts = Counter[CodeType]


class Profile:
    """Counts calls of functions under `SOURCE`, in every thread that starts after it."""

    def __init__(self) -> None:
        """Counts nothing yet."""
        self.counts: Counts | None = None

    def install(self) -> None:
        """To be called before any thread of the server starts."""
        threading.setprofile(self._called)
        sys.setprofile(self._called)

    def _called(self, frame: FrameType, event: str, _: object) -> None:
        if event == "call" and self.counts is not None and frame.f_code.co_filename.startswith(SOURCE):
            self.counts[frame.f_code] += 1


async def measure(settings: Settings, load: Loader, profile: Profile) -> Counts:
    """What runs for one call: of many calls that with the fewest functions."""
    app = App(settings, load)
    await app.start()
    options = pb.EncodeOptions(outputs=[pb.OutputSpec(kind=pb.OUTPUT_KIND_MODEL_POOLING)])
    data = pb.EncodeRequest(inputs=[pb.Input(text="hello world")], options=options).SerializeToString()
    async with grpc.aio.insecure_channel(f"127.0.0.1:{app.grpc_port}") as channel:
        rpc: Any = channel.unary_unary(ENCODE)
        for _ in range(WARM_UP_CALLS):
            await rpc(data)
        found: list[Counts] = []
        for _ in range(CALLS):
            profile.counts = Counter()
            await rpc(data)
            await asyncio.sleep(0.01)  # what follows the answer
            found.append(Counter({code: n for code, n in profile.counts.items() if not _is_beside(code)}))
            profile.counts = None
    await app.stop()
    return min(found, key=lambda counts: (len(counts), counts.total()))


def _is_beside(code: CodeType) -> bool:
    file = file_of(code)
    return file in BESIDE or f"{file}:{code.co_name}" in BESIDE


def file_of(code: CodeType) -> str:
    """The file of a function, within the package."""
    return str(Path(code.co_filename).relative_to(SOURCE))


def report(counts: Counts) -> str:
    """The functions of each file with how often they ran, and the totals."""
    files: dict[str, list[str]] = {}
    for code, times in sorted(counts.items(), key=lambda item: (file_of(item[0]), item[0].co_firstlineno)):
        files.setdefault(file_of(code), []).append(code.co_qualname + (f" x{times}" if times > 1 else ""))
    lines = [f"{file} ({len(names)}): {', '.join(names)}" for file, names in files.items()]
    return "\n".join([*lines, "", f"{len(counts)} functions in {len(files)} files, {counts.total()} calls"])


def main() -> None:
    """Measures once and prints."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--bundle", type=Path, help="a bundle's directory, MODEL/VERSION; default: a fake engine")
    chosen: Path | None = parser.parse_args().bundle
    profile = Profile()
    profile.install()
    if chosen is not None:
        settings = Settings(
            model_repository=chosen.absolute().parent.parent, model=(chosen.parent.name,), grpc_port=0, metrics_port=0
        )
        print(report(asyncio.run(measure(settings, load_model, profile))))
        return
    sys.path.insert(0, str(SUPPORT))
    from fake_engine import FakeEngine
    from fake_server import D_MODEL, fake_model, write_tokenizer

    with tempfile.TemporaryDirectory() as made:
        version = Path(made) / "models/tiny/1"
        version.mkdir(parents=True)
        (version / "manifest.json").touch()
        tokenizer = write_tokenizer(Path(made) / "tokenizer.json")
        settings = Settings(model_repository=version.parent.parent, model=("tiny",), grpc_port=0, metrics_port=0)
        fake: Loader = lambda directory, _, pool, __: fake_model(  # noqa: E731
            directory, pool, FakeEngine(D_MODEL), tokenizer_file=tokenizer
        )
        print(report(asyncio.run(measure(settings, fake, profile))))


if __name__ == "__main__":
    main()
