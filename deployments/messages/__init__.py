"""Typed messages between driver, coordinator, engines, drafters and the group context."""
