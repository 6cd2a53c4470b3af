"""Generated code for the contracts in `proto/encserve` (import `encserve_proto.v1`), and the rule for fingerprints."""
