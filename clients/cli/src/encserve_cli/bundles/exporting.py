"""Exports a checkpoint with `encserve-export` in a child process, so that PyTorch's memory is free afterwards."""

import json
import os
import re
import selectors
import signal
import subprocess
import sys
from collections import deque
from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass
from importlib.util import find_spec
from pathlib import Path
from typing import Any, Literal

from encserve import hub
from encserve.extras import install_line
from encserve_cli.bundles.work import Work
from encserve_server.system.memory import usable_bytes

ExportPrecision = Literal["float32", "float16", "int8"]

# The exporter runs in this Python. A program of the same name on PATH may be of another version.
_EXPORTER = "from encserve.commands import encserve_export; encserve_export()"
# An export needs at most 3 times the size of the float32 weights, plus 500 MB, plus the memory of the imports. The
# figures are measured: docs/explanation/performance.md, "Memory".
_WEIGHTS_FACTOR = 3
_OTHER_BYTES = 500_000_000
_IMPORT_BYTES = 530_000_000
_FLOAT32_BYTES = 4
_BYTES = {"float64": 8, "float32": 4, "float16": 2, "bfloat16": 2}
_DECODER = "ForCausalLM"
_LOOK_SECONDS = 0.2
_LAST_LINES = 20
_READ_BYTES = 65536
_STEP = " …"
_CHECKS = ("comparing", "computing", "running")
_ESCAPES = re.compile(r"\x1b\[[0-9;?]*[A-Za-z]")
_ERROR = "Error: "
# On Linux, prctl(1, SIGKILL) makes the kernel kill the child when the parent ends; 1 is PR_SET_PDEATHSIG. The parent
# may end before prctl runs, so the child also compares the parent's process id.
_START = (
    "import ctypes, os, signal, sys\n"
    "try: ctypes.CDLL(None).prctl(1, signal.SIGKILL)\n"
    "except (OSError, AttributeError): pass\n"
    "if os.getppid() != int(sys.argv[1]): os._exit(1)\n"
    "os.execv(sys.argv[2], sys.argv[2:])"
)


@dataclass(frozen=True, slots=True)
class ExportOptions:
    """The options of an export. Each has the name and the meaning of an option of `encserve-export hf`.

    Attributes:
        precision: The precision of the bundle.
        pooling: The pooling, if the files of the checkpoint do not name one.
        max_sequence_tokens: The longest sequence to serve, in tokens.
        ignore_head: Whether to export only the encoder of a classifier or a cross-encoder.
        ids_only: Set this for a checkpoint that has no tokenizer. The model then takes token ids only.
    """

    precision: ExportPrecision = "float32"
    pooling: str | None = None
    max_sequence_tokens: int | None = None
    ignore_head: bool = False
    ids_only: bool = False

    def arguments(self) -> list[str]:
        """Return the options as arguments of `encserve-export hf`."""
        arguments = []
        for name, value in asdict(self).items():
            flag = f"--{name.replace('_', '-')}"
            if value is True:
                arguments.append(flag)
            elif value not in (None, False):
                arguments += [flag, str(value)]
        return arguments


def check_exporter(source: str, name: str) -> None:
    """Check that PyTorch is installed.

    Args:
        source: The model as the user wrote it, for error messages.
        name: The name of the exported model.

    Raises:
        ValueError: PyTorch is not installed.
    """
    if find_spec("torch") is None:
        raise ValueError(
            f"{source} is a checkpoint and must be exported first. The export needs PyTorch (1.4 GB on disk for the "
            f"CPU build). Install PyTorch with: {install_line('export')}. Or run `encserve pull {source} --to models` "
            f"on another machine, and use models/{name} here"
        )


def check_settings(source: str, directory: Path, options: ExportOptions) -> None:
    """Refuse a decoder without a pooling. Without a pooling, the bundle has no default vector for a text.

    Args:
        source: The model as the user wrote it, for error messages.
        directory: The checkpoint's directory. The directory has config.json, and modules.json if the checkpoint has
            that file.
        options: The options of the export.

    Raises:
        ValueError: No file and no option names the pooling of a decoder.
    """
    is_decoder = any(str(it).endswith(_DECODER) for it in _settings(directory).get("architectures") or ())
    if is_decoder and options.pooling is None and not (directory / "modules.json").is_file():
        raise ValueError(
            f"{source}: is a decoder, and its files do not name the pooling. Give --pooling with the pooling that the "
            "model was trained with; for most decoders this is last_token"
        )


def check_memory(source: str, weights_bytes: int, directory: Path) -> int:
    """Return the memory in bytes that an export needs at most.

    Args:
        source: The model as the user wrote it, for error messages.
        weights_bytes: The size of the checkpoint's weights in bytes.
        directory: The checkpoint's directory. Its config.json may name the type of the weights.

    Raises:
        ValueError: The machine, or the container, has less memory.
    """
    settings = _settings(directory)
    number_bytes = _BYTES.get(str(settings.get("dtype") or settings.get("torch_dtype")), _FLOAT32_BYTES)
    float32_bytes = weights_bytes * _FLOAT32_BYTES // number_bytes
    needed, there = _WEIGHTS_FACTOR * float32_bytes + _OTHER_BYTES + _IMPORT_BYTES, usable_bytes()
    if needed > there:
        raise ValueError(
            f"{source}: its export needs up to {needed / 1e9:.1f} GB of memory, but this machine or container has "
            f"{there / 1e9:.1f} GB. Run `encserve pull {source} --to models` on a larger machine, and copy the folder "
            "models/ to this machine"
        )
    return needed


def _settings(directory: Path) -> Mapping[str, Any]:
    """Return the content of config.json. Return an empty mapping for a broken file; the exporter reports the error."""
    try:
        settings = json.loads((directory / "config.json").read_bytes())
    except (OSError, ValueError):
        return {}
    return settings if isinstance(settings, dict) else {}


def export(
    source: Path | hub.Snapshot,
    name: str,
    options: ExportOptions,
    *,
    version: str,
    repository: Path,
    temporary: Path,
    work: Work,
) -> None:
    """Export a checkpoint into a model repository, as NAME/VERSION.

    Args:
        source: A directory, or a downloaded checkpoint.
        name: The name of the model.
        options: The options of the export.
        version: The version of the model.
        repository: The folder for NAME/VERSION.
        temporary: A folder for the exporter's temporary files.
        work: Receives the current step, and each line of the exporter's report.

    Raises:
        RuntimeError: The export failed. The message is the exporter's error, or the exit status and the last line.
    """
    arguments = [str(source)]
    variables = {"TMPDIR": str(temporary)}
    if isinstance(source, hub.Snapshot):
        arguments = [source.repository, "--revision", source.revision]
        variables["HF_HUB_OFFLINE"] = "1"  # all files are in the cache
    arguments += ["--model-repository", str(repository), "--name", name, "--version", version, *options.arguments()]
    # -P: modules in the current folder are not imported.
    exporter = [sys.executable, "-P", "-c", _EXPORTER]
    command = [sys.executable, "-I", "-c", _START, str(os.getpid()), *exporter, "hf", *arguments]
    work.stage("exporting")
    with subprocess.Popen(
        command,
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        env=os.environ | variables,
        start_new_session=True,  # Ctrl-C goes to this process only, which then ends the child
    ) as process:
        try:
            lines = _follow(process, work)
            status = process.wait()
        except BaseException:
            process.kill()
            raise
    if status:
        raise RuntimeError(
            _failure(f"{source.repository if isinstance(source, hub.Snapshot) else source}", status, lines)
        )


def _follow(process: "subprocess.Popen[bytes]", work: Work) -> Iterable[str]:
    """Pass the output of the exporter to `work` until the output ends. Return the last lines of stdout and stderr."""
    assert process.stdout is not None  # noqa: S101 - both are pipes
    assert process.stderr is not None  # noqa: S101
    last: deque[str] = deque(maxlen=_LAST_LINES)
    stage = "exporting"
    with selectors.DefaultSelector() as selector:
        for stream in (process.stdout, process.stderr):
            selector.register(stream, selectors.EVENT_READ, bytearray())
        while selector.get_map():
            for key, _ in selector.select(_LOOK_SECONDS):
                data = os.read(key.fd, _READ_BYTES)
                if not data:
                    selector.unregister(key.fileobj)
                key.data.extend(data)
                *lines, rest = _ESCAPES.sub("", key.data.decode(errors="replace")).split("\n")
                key.data[:] = rest.encode()
                for line in filter(None, map(str.rstrip, lines)):
                    if key.fileobj is process.stdout:
                        work.detail(line)
                    elif line.endswith(_STEP):
                        stage = _stage_of(line.removesuffix(_STEP))
                    last.append(line)
            work.stage(stage)
    return last


def _stage_of(step: str) -> str:
    return f"{'checking' if step.startswith(_CHECKS) else 'exporting'}: {step}"


def _failure(source: str, status: int, lines: Iterable[str]) -> str:
    """Return the error of a failed export in one line."""
    for line in lines:
        if line.startswith(_ERROR):
            return line.removeprefix(_ERROR)
    if status == -signal.SIGKILL:
        return f"{source}: the export was killed, perhaps because the machine has too little memory"
    last_line = "; its last line: ".join(["", *list(lines)[-1:]])
    return f"{source}: encserve-export failed with exit status {status}{last_line}"
