"""The contract between callers and an encserve server (`encoder_pb2`)."""
