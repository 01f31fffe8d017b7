"""Reproductions of papers that nothing in the product needs."""
