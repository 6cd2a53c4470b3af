"""The extras of the distribution encserve, and the error for an extra that is not installed."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from importlib.util import find_spec

# The modules that each extra brings. An error names the first one, if that module is missing too.
MODULES = {
    "cpu": (
        "onnxruntime",
        "tokenizers",
        "uvloop",
        "prometheus_client",
        "grpc_health",
        "grpc_reflection",
        "google.rpc",
        "pythonjsonlogger",
        "click",
    ),
    "openvino": ("openvino",),
    "http": ("aiohttp", "msgspec", "orjson"),
    "tls": ("cryptography",),
    "tracing": ("opentelemetry",),
    "pooling": ("scipy",),
    "export": (
        "torch",
        "transformers",
        "sentence_transformers",
        "onnx",
        "onnxruntime",
        "onnxscript",
        "safetensors",
        "sentencepiece",
        "huggingface_hub",
        "tokenizers",
        "click",
        "rich",
    ),
    "cli": ("click", "rich", "pyarrow", "plotly"),
    "ray": ("ray",),
}


def install_line(extra: str) -> str:
    """Return the command that installs an extra."""
    return f'pip install "encserve[{extra}]"'


@contextmanager
def needs(user: str, extra: str, error: Callable[[str], BaseException]) -> Iterator[None]:
    """In the `with` block, turn the failed import of an extra's module into an error that says what to install.

    Args:
        user: The command, the flag or the setting that needs the extra.
        extra: The extra that `user` needs. If the missing module is in another extra, the error names the other extra.
        error: The class of the error.

    Raises:
        error: The text is 'USER needs MODULE: pip install "encserve[EXTRA]"'.
        ModuleNotFoundError: No extra brings the missing module.
    """
    try:
        yield
    except ModuleNotFoundError as failed:
        missing = failed.name or ""
        brings = (
            (it, module) for it in (extra, *MODULES) for module in MODULES[it] if f"{missing}.".startswith(f"{module}.")
        )
        found, module = next(brings, ("", ""))
        if not found:
            raise
        # A part of a package may be missing, such as opentelemetry.sdk.
        named = next((it for it in (MODULES[found][0], module) if find_spec(it) is None), missing)
        raise error(f"{user} needs {named}: {install_line(found)}") from failed
