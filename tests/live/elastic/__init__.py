"""Tests that need a service whose replicas come and go, and share one."""
