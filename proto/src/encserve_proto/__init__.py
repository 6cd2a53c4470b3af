"""Generated code for the contracts in `proto/encserve`, packages as there, and the rule for fingerprints."""
