"""Test support: problems with known answers, the module zoo, random inputs, and independent oracles."""
