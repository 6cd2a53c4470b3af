"""The names of a bundle's ONNX files, and of their inputs and outputs."""

# 20 is the first opset with the operator Gelu, and the newest opset that PyTorch's tracing exporter writes.
OPSET = 20
FILE = "model.onnx"
DATA_FILE = "model.onnx.data"
INSPECT_FILE = "inspect.onnx"
INPUT_IDS, EMBEDDINGS, ATTENTION_MASK, OUTPUT = "input_ids", "inputs_embeds", "attention_mask", "last_hidden_state"
POSITIONS = "positions"
