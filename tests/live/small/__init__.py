"""Tests of small applications on Ray, without an engine, that share one cluster."""
