"""What runs the model: the interface (`base`), ONNX Runtime (`onnx`), OpenVINO (`openvino`), and a fake (`fake`)."""
