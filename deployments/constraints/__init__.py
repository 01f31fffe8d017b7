"""Requests' rules for tokens: changed logits, forms of answers, texts that end them; functions of a sample's tokens."""
