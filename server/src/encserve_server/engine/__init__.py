"""The engines that run models: the interface (`base`), ONNX Runtime (`onnx`) and OpenVINO (`openvino`)."""
