"""Tests of HTTP that share a service with a gateway: in the order of their names, since they change its weights."""
