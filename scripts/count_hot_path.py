"""Counts the server functions that run during one gRPC call. The call asks for the pooled vector of one short text.

    python scripts/count_hot_path.py [models/all-MiniLM-L6-v2/1]

Python's profiler counts function calls in every thread. After a warm-up, the script makes 50 gRPC calls. The report is
about the gRPC call with the fewest function calls, because background timers may run during other gRPC calls. Each
resumption of a coroutine counts as a function call.
"""

import argparse
import asyncio
import sys
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
from encserve_server.settings import Settings

SOURCE = str(Path(encserve_server.__file__).parent)
ENCODE = "/encserve.v1.EncoderService/Encode"
# Functions that run even without a gRPC call, and are not counted. An entry is FILE or FILE:FUNCTION.
BACKGROUND = {
    "telemetry/lag.py",
    "telemetry/page.py",
    "rpc/health.py",
    "repository/manager.py",
    "system/clock.py:sleep",
}
WARMUP_CALLS = 50
CALLS = 50

Counts = Counter[CodeType]


class Profile:
    """Counts the calls of functions under `SOURCE`.

    Attributes:
        counts: The number of calls of each function, or None while counting is off.
    """

    def __init__(self) -> None:
        """Start profiling this thread and all threads that start later."""
        self.counts: Counts | None = None
        threading.setprofile(self._count)
        sys.setprofile(self._count)

    def _count(self, frame: FrameType, event: str, _: object) -> None:
        counts = self.counts  # read once, because another thread may set self.counts to None
        if event == "call" and counts is not None and frame.f_code.co_filename.startswith(SOURCE):
            counts[frame.f_code] += 1


async def measure(settings: Settings, profile: Profile) -> Counts:
    """Make several gRPC calls. Return the counts of the gRPC call with the fewest function calls."""
    app = App(settings, load_model)
    await app.start()
    options = pb.EncodeOptions(outputs=[pb.OutputSpec(kind=pb.OUTPUT_KIND_MODEL_POOLING)])
    request = pb.EncodeRequest(inputs=[pb.Input(text="hello world")], options=options).SerializeToString()
    async with grpc.aio.insecure_channel(f"127.0.0.1:{app.grpc_port}") as channel:
        encode: Any = channel.unary_unary(ENCODE)
        for _ in range(WARMUP_CALLS):
            await encode(request)
        found: list[Counts] = []
        for _ in range(CALLS):
            counts: Counts = Counter()
            profile.counts = counts
            await encode(request)
            await asyncio.sleep(0.01)  # after the reply, the server may run more functions for the call
            profile.counts = None
            found.append(Counter({code: n for code, n in counts.copy().items() if not _is_background(code)}))
    await app.stop()
    return min(found, key=lambda counts: (len(counts), counts.total()))


def _is_background(code: CodeType) -> bool:
    return bool({file_of(code), f"{file_of(code)}:{code.co_name}"} & BACKGROUND)


def file_of(code: CodeType) -> str:
    """The file of a function, relative to the package encserve_server."""
    return str(Path(code.co_filename).relative_to(SOURCE))


def report(counts: Counts) -> str:
    """Return the counts as text: the functions of each file with their numbers of calls, and the totals."""
    files: dict[str, list[str]] = {}
    for code, calls in sorted(counts.items(), key=lambda item: (file_of(item[0]), item[0].co_firstlineno)):
        files.setdefault(file_of(code), []).append(code.co_qualname + (f" x{calls}" if calls > 1 else ""))
    lines = [f"{file} ({len(names)}): {', '.join(names)}" for file, names in files.items()]
    return "\n".join([*lines, "", f"{len(counts)} functions in {len(files)} files, {counts.total()} calls"])


def main() -> None:
    """Count the functions for the model in the given directory, and print the report."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    default = Path("models/all-MiniLM-L6-v2/1")
    parser.add_argument("bundle", nargs="?", type=Path, default=default, help="a model's directory, MODEL/VERSION")
    bundle: Path = parser.parse_args().bundle.absolute()
    repository, model = bundle.parent.parent, f"{bundle.parent.name}@{bundle.name}"
    profile = Profile()  # created before the server, because it profiles only threads that start later
    settings = Settings(model_repository=repository, model=(model,), grpc_port=0, metrics_port=0)
    print(report(asyncio.run(measure(settings, profile))))


if __name__ == "__main__":
    main()
