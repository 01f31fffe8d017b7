"""Mutants: small changes of the product, made by rule, and the tests that find them."""
