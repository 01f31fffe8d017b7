"""Tests of engines, tokenizers and samplers in the process of the tests, without Ray."""
