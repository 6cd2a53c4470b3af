"""What runs the model: the interface (`base`), ONNX Runtime (`onnx`), and a fake for tests (`fake`)."""
