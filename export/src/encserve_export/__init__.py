"""Export a PyTorch or ONNX encoder as a model bundle: a directory with an ONNX graph and a manifest.

The command line is `encserve-export`. In Python, call `export_hf`, `export_checkpoint`, `export_module`, `export_onnx`,
`export_init` or `export_encoder`.
"""

from encserve_export.bundle.manifest import Source
from encserve_export.bundle.write import Exported, Target
from encserve_export.core.errors import ExportError
from encserve_export.models.own.config import EncoderConfig
from encserve_export.models.own.encoder import Encoder
from encserve_export.routes.checkpoint import export_checkpoint, export_init
from encserve_export.routes.encoder import export_encoder
from encserve_export.routes.export_module import export_module
from encserve_export.routes.hf import export_hf
from encserve_export.routes.onnx import OnnxOptions, export_onnx
from encserve_export.source.tokenizer import read_tokenizer

__all__ = [
    "Encoder",
    "EncoderConfig",
    "ExportError",
    "Exported",
    "OnnxOptions",
    "Source",
    "Target",
    "export_checkpoint",
    "export_encoder",
    "export_hf",
    "export_init",
    "export_module",
    "export_onnx",
    "read_tokenizer",
]
