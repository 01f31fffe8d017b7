"""Reproductions of papers that nothing in the product needs; they import the product, never the reverse."""
