"""Version 1 of the contracts: the service (`encoder_pb2`) and the bundle's manifest (`manifest_pb2`)."""
