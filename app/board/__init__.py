"""`tailrace board`: a page on loopback that shows a running service as it changes."""
