"""Code that is generated from `proto/encserve`, in the same packages, and the computation of fingerprints."""
